"""Fills for hidden pixels, and coarse masks that are upsampled to the image only when needed."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.trace.run import Run
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images

Fill = Literal["mean", "blur", "zero"]
Stretch = Float[Tensor, "..."]  # [size cells], possibly per mask: the weight of each cell in each pixel


def filled(trace: Trace, fill: Fill) -> Images:
    """The fill of each image: its mean colour, the blurred image, or zero (after normalisation, the mean colour)."""
    if fill == "mean":
        every = (-2, -1) if len(trace.extent) == 2 else (1, -2, -1)  # a video has one mean colour
        return widen(trace.images).mean(every, keepdim=True).to(trace.images.dtype).expand_as(trace.images)
    return baseline_images(trace, fill, seed=0)


def stretch(cells: int, size: int) -> Float[Tensor, "size cells"]:
    """Bilinear resizing along one axis, as a matrix."""
    each = torch.eye(cells, dtype=torch.float64)[None, None]
    return F.interpolate(each, (size, cells), mode="bilinear", antialias=True)[0, 0]


def enlarge(coarse: Float[Tensor, "K *frames a b"], down: Stretch, across: Stretch) -> Float[Tensor, "K *frames Y X"]:
    """Coarse masks upsampled to the size of the image; of a video, those of each tubelet."""
    if coarse.ndim == 4 and down.ndim == 3:  # each mask has its own
        down, across = down[:, None], across[:, None]
    return down @ coarse @ across.mT


def for_frames(trace: Trace, masks: Float[Tensor, "K *tubelets Y X"]) -> Float[Tensor, "K *frames Y X"]:
    """The masks of tubelets for each frame of a video; those of images are unchanged."""
    if len(trace.extent) == 2:
        return masks
    return masks[:, [max(0, time) for time in trace.layout.moments(trace.extent[0])]]


def baseline_images(trace: Trace, baseline: str, seed: int) -> Images:
    """Baseline images: zero (the mean colour), the blurred image, or noise."""
    images = trace.images
    if baseline == "zero":
        return torch.zeros_like(images)
    if baseline == "blur":
        from torchvision.transforms.functional import gaussian_blur

        sigma = max(trace.size) / 16
        side = min(2 * int(2 * sigma) + 1, 2 * (min(trace.size) // 2) - 1)
        down: Tensor = gaussian_blur(images.flatten(0, -4), [1, side], [sigma, sigma])  # of videos, frame by frame
        blurred: Tensor = gaussian_blur(down, [side, 1], [sigma, sigma])  # separable: one axis at a time is faster
        return blurred.reshape(images.shape)
    noise = [torch.randn(images.shape[1:], generator=stream) for stream in trace.generators(seed)]
    return torch.stack(noise).to(images)


def end_scores(trace: Trace, target: Target, images: Images) -> Tensor:
    """The scores of a version of each image."""
    return trace.score(target, trace.run(images, Run.to_output().of(range(len(trace))))).detach()
