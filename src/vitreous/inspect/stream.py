"""The patch features of many images, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous._support.progress import steps
from vitreous.capture.attention import widen
from vitreous.errors import OptionError, Unsupported
from vitreous.inspect.view import AnyModel
from vitreous.models.model import Model
from vitreous.models.origin import Origin
from vitreous.trace.apply import as_images, as_model, images_at_once, of_images, of_model
from vitreous.trace.features import final_norm, patch_features, width_of
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views

KEPT = 2**28  # bytes of features that are kept in memory; more are computed again each time
Taken = dict[int, list[Float[Tensor, "h w D"]]]  # by layer, one for each image of a batch


@dataclass(eq=False)
class Stream:
    """Images in a model, and which features of theirs are looked at."""

    model: Model
    images: Any  # a tensor, or a list
    first: Trace  # of the first image
    views: Views
    layers: list[int]
    of: str
    norm: nn.Module | None
    batch: int | None = None
    _kept: list[Taken] | None = field(default_factory=list)
    _whole: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @property
    def told(self) -> dict[str, Any]:
        """What the features are of, as JSON: equal for features that may be compared."""
        origin = Origin.of(self.model, self.first.size)
        about = {"model": self.model.name, "digest": origin.weights["digest"]}
        return {**about, "of": self.of, "normed": self.norm is not None}

    @property
    def about(self) -> dict[str, Any]:
        """What every view records."""
        return {
            "model": self.model.name,
            "image": self.views.name(0) if len(self) == 1 else f"{len(self)} images",
            "photo": self.views[0],
            "views": self.views,
            "made_by": Origin.of(self.model, self.first.size),
            "images": tuple(self.views.name(i) for i in range(len(self))),
            "layers": tuple(self.layers),
            "of": self.of,
            "normed": self.norm is not None,
        }

    def each(self, what: str) -> Iterator[Taken]:
        """The features of a few images after the other; kept if all are small, else computed in every pass."""
        if self._whole and self._kept is not None:
            yield from self._kept
            return
        size = self.batch or images_at_once(self.model, self.images)
        parts = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        for part in steps(parts, len(self), what, lambda one: one.stop - one.start):
            taken = self._taken(Trace(self.model, self.images[part]))
            if self._kept is not None:
                weight = sum(t.numel() * t.element_size() for some in taken.values() for t in some)
                fits = weight / (part.stop - part.start) * len(self) <= KEPT
                self._kept = [*self._kept, taken] if fits else None
            yield taken
        self._whole = True

    def _taken(self, trace: Trace) -> Taken:
        found = patch_features(trace, self.layers, self.of, self.norm)
        return {layer: list(widen(tokens.detach())) for layer, tokens in found.items()}


@contextmanager
def streaming(
    model: AnyModel,
    images: Any,
    layers: Sequence[int] | None,
    of: str,
    norm: bool | None,
    batch: int | None = None,
) -> Iterator[Stream]:
    """The features of images that a view looks at; `images` may be a `Trace`."""
    given = of_model(images, model) if isinstance(images, Trace) else None
    wrapped = as_model(model) if given is None else given.model
    of_images(wrapped, "inspect works")
    listed = as_images(images, wrapped.channels) if given is None else given.images
    first = Trace(wrapped, listed[:1])
    if layers is not None and not layers:
        raise OptionError("layers: name at least one, e.g. 0 or −1")
    every = range(first.layout.layers) if layers is None else layers
    chosen = list(dict.fromkeys(first.layer_number(i) for i in every))
    if not chosen:
        raise first.no_layers()
    device = first.images.device.type
    with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
        module = chosen_norm(first, chosen, of, norm)
        yield Stream(wrapped, listed, first, Views.of(listed, wrapped), chosen, of, module, batch)


def chosen_norm(trace: Trace, layers: list[int], of: str, norm: bool | None) -> nn.Module | None:
    """The norm that is applied to the tokens; None (as given): the final one, if the model has one that fits all."""
    if of != "tokens" or norm is False:
        if norm and of != "tokens":
            raise OptionError(f"norm: the final norm is one of tokens, not of {of}")
        return None
    found = final_norm(trace)
    if found is not None:
        taken = patch_features(trace, layers, of)
        if all(tokens.shape[-1] == width_of(found) for tokens in taken.values()):
            return found
    if norm is None:
        return None
    said = "has no norm of all tokens after its last block" if found is None else "has layers of other width"
    raise Unsupported(f"{trace.model.name} {said}, so none is applied to its features; leave norm out")


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one value or more for each patch, [B h w …]; smaller ones end in NaN."""
    if len({one.shape for one in arrays}) == 1:
        return np.stack(arrays)
    high, wide = (max(one.shape[axis] for one in arrays) for axis in (0, 1))
    found = np.full((len(arrays), high, wide, *arrays[0].shape[2:]), np.nan, np.float32)
    for row, one in zip(found, arrays):
        row[: one.shape[0], : one.shape[1]] = one
    return found
