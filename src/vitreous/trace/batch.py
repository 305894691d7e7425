"""A batch of images with the inputs that travel with it, and its forward passes."""

from __future__ import annotations

from typing import Any

import torch

from vitreous._support.memory import capturing, later
from vitreous.errors import Unsupported
from vitreous.images.preprocess import refuse_infinite
from vitreous.models.facts import Facts
from vitreous.models.inputs import Given, Inputs
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.trace.run import Finished, Run, Stopped, perform
from vitreous.types import Extent, Images


class Batch:
    """Runs a model on images and variants of them; every row gets the inputs of the image that it belongs to."""

    layout: Layout

    def __init__(self, model: Model, images: Any, inputs: Any = None) -> None:
        self.model = model
        self.images: Images = model.prepare(images)
        self.inputs: Inputs = model.arguments.check(inputs, len(self.images), self.images)
        self.size: tuple[int, int] = (self.images.shape[-2], self.images.shape[-1])
        self.extent: Extent = (*self.images.shape[1:-3], *self.size)
        self._sum = later(self.images.float().sum()) if self.images.is_cuda and not capturing(self.images) else None
        self.autocast = torch.is_autocast_enabled(self.images.device.type)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def facts(self) -> Facts:
        """What was found out about the network with inputs of this kind."""
        return self.model.facts_for(self.inputs)

    def refuse_infinite(self) -> None:
        """Raise if an image on a GPU contains NaN or infinity; checked once, after the first forward pass."""
        if self._sum is not None and not capturing(self.images):
            refuse_infinite(self._sum())
            self._sum = None

    def look(self, images: Images, how: Run) -> Finished | Stopped:
        """A new forward pass, possibly stopped early."""
        if not self.inputs:
            seen = perform(self.model, self.layout, images, how, self.autocast)
        else:
            how, given = self._given(images, how)
            seen = perform(self.model, self.layout, images, how, self.autocast, given)
        self.refuse_infinite()
        return seen

    def _given(self, images: Images, how: Run) -> tuple[Run, Given]:
        """The same run and what its rows get; raise if it is not known which image each row belongs to."""
        count = how.count or len(images)
        if how.noise:
            return how, self.model.arguments.sample(self.inputs).rows([0] * count)
        rows = how.rows
        if rows is None and len(self) == 1 and how.extend is None:
            rows = (0,) * count
        elif rows is None and images is self.images and how.extend is None and count == len(self):
            rows = tuple(range(count))
        if rows is None:
            said = "this method makes variants of the images and does not say of which image each is (Run.of)"
            raise Unsupported(f"{said}, so it cannot take inputs. Try gradient, gae or occlusion.")
        return how.of(rows), self.inputs.rows(rows)

    def run(self, images: Images, how: Run) -> Finished:
        """A new forward pass to the output."""
        seen = self.look(images, how)
        assert isinstance(seen, Finished), "a run to the output was stopped"
        return seen
