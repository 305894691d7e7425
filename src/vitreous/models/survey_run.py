"""The forward pass of the layout run: of two noise images, everything of interest recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitreous.capture.attention import Attention
from vitreous.capture.entries import Unfrozen
from vitreous.capture.survey import Survey
from vitreous.errors import ModelError
from vitreous.models.blocks import BlockOutputs
from vitreous.models.output import Form
from vitreous.types import Extent


@runtime_checkable
class Network(Protocol):
    """What the layout run asks of a model."""

    name: str
    module: nn.Module
    form: Form

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def channels(self) -> int: ...
    @property
    def has_gradients(self) -> bool: ...
    def run(self, images: Tensor) -> Tensor: ...
    def still(self) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, eq=False)
class Seen:
    """One recorded forward pass."""

    survey: Survey
    blocks: BlockOutputs
    images: Tensor
    output: Tensor
    steady: bool  # every part of the model is differentiated as torch does it

    @property
    def calls(self) -> list[Attention]:
        return self.survey.calls

    @property
    def count(self) -> int:
        """The number of images."""
        return len(self.images)


def noise_images(model: Network, extent: Extent) -> Tensor:
    """The two images of the layout run; videos, if there are frames."""
    shape = (*extent[:-2], model.channels, *extent[-2:])
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def look(model: Network, images: Tensor) -> Seen:
    """One run, measured: of both images, or of one alone where the model returns something else for two.

    So is one that attends to its images one by one, or to all of them in one sequence.
    """
    seen = watch(model, images)
    if len(seen.output) == 2 and not (seen.calls and all(call.shape[0] == 1 for call in seen.calls)):
        return seen
    seen = watch(model, images[:1])
    if len(seen.output) != 1:
        rows = f"{model.name} returns {len(seen.output)} rows for one image"
        if images.ndim == 5:
            raise ModelError(f"{rows.replace('image', 'video')}, one a frame?; join them: Model(net, forward=…)")
        raise ModelError(f"{rows}; say which is the image's: Model(net, forward=lambda x: net(x)[:1])")
    return seen


def watch(model: Network, images: Tensor) -> Seen:
    """One run of these images, with gradients if the model allows them."""
    if not model.has_gradients:
        return surveyed(model, images, grad=False)
    try:
        leaf = images.detach().clone().requires_grad_()
        return surveyed(model, leaf, grad=True)
    except (RuntimeError, ModelError) as error:
        if "nference" not in str(error):  # torch.inference_mode in its forward: only what needs no gradient will work
            raise
    return surveyed(model, images, grad=False)


def surveyed(model: Network, images: Tensor, grad: bool) -> Seen:
    with model.still() as still, torch.inference_mode(False), torch.set_grad_enabled(grad):
        survey, blocks, frozen = Survey(still.names, len(images)), BlockOutputs(model.module), Unfrozen()
        with blocks, survey, frozen if grad else nullcontext():
            output = model.run(images)
        return Seen(survey, blocks, images, output, steady=grad and not frozen.needed)


def gradient(ends: list[Tensor], wrt: Tensor) -> Tensor | None:
    """Of `along(ends)`; None where nothing depends on it, or the model runs without gradients."""
    try:
        return torch.autograd.grad(along(ends), [wrt], retain_graph=True, allow_unused=True)[0]
    except RuntimeError:
        return None


def along(ends: list[Tensor]) -> Tensor:
    """One number that depends on every output of the noise images; an image's part is the same alone and in a pair."""
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(2, *end.shape[1:], generator=random)[: len(end)].to(end) for end in ends]
    return torch.stack([(end * weight).sum() for end, weight in zip(ends, weights)]).sum()
