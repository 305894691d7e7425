"""From a picture to a model's input, as the model's own configuration says, and back again for drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous.errors import ModelError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNKNOWN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
MIDDLE = 128  # blue of the ramp: what is not of this colour did not come from the picture
BICUBIC = Image.Resampling.BICUBIC
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the picture


@dataclass(frozen=True, eq=False)
class Preprocess:
    """A callable from picture to tensor, with the colours that undo it."""

    transform: Callable[[Image.Image], Any]
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 Y X"]:
        return checked(self.transform(image))

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of what comes out."""
        shape = self(Image.new("RGB", (320, 320))).shape
        return shape[-2], shape[-1]

    def colours(self, x: Float[Tensor, "3 Y X"]) -> np.ndarray:
        """The picture that this input shows, [Y X 3] in 0…1."""
        mean, std = (torch.tensor(tuple(c), dtype=torch.float32)[:, None, None] for c in (self.mean, self.std))
        rgb = x.detach().float().cpu() * std + mean
        if rgb.min() < -0.2 or rgb.max() > 1.2:  # not the colours this class knows: stretch what there is
            rgb = (rgb - rgb.min()) / (rgb.max() - rgb.min()).clamp_min(1e-12)
        return rgb.clamp(0, 1).permute(1, 2, 0).numpy()

    @cached_property
    def _boxes(self) -> dict[tuple[int, int], Box]:
        return {}

    def box(self, size: tuple[int, int]) -> Box:
        """What part of a picture of this (width, height) reaches the model; beyond the picture where it is padded."""
        if size not in self._boxes:
            self._boxes[size] = find_box(self, size)
        return self._boxes[size]

    def view(self, image: Image.Image, most: int = 1024) -> Image.Image:
        """The part of a picture that the model sees, in the picture's own resolution (at most `most` pixels a side)."""
        left, top, right, bottom = self.box(image.size)
        scale = min(1.0, most / max(right - left, bottom - top))
        size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
        if min(left, top) < -1 or right > image.width + 1 or bottom > image.height + 1:
            return image.crop((round(left), round(top), round(right), round(bottom))).resize(size, BICUBIC)
        inside = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
        return image.resize(size, BICUBIC, box=inside)


def checked(x: Any) -> Tensor:
    """What a preprocessing returned, if it is one picture for a network."""
    x = x[0] if isinstance(x, Tensor) and x.ndim == 4 and len(x) == 1 else x
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != 3 or not x.is_floating_point():
        said = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ModelError(f"the preprocessing returns {said}; it must turn a PIL image into a float tensor [3, H, W]")
    return x


def find_box(preprocess: Preprocess, size: tuple[int, int]) -> Box:
    """Send a ramp of colours through and read off where its edges lie."""
    wide, high = size
    ramp = np.full((high, wide, 3), MIDDLE, np.uint8)
    ramp[:, :, 0] = ((np.arange(wide) + 0.5) / wide * 255).round()
    ramp[:, :, 1] = ((np.arange(high) + 0.5) / high * 255).round()[:, None]
    seen = preprocess.colours(preprocess(Image.fromarray(ramp)))  # [Y X 3]
    inside = np.abs(seen[:, :, 2] - MIDDLE / 255) < 0.02
    across, down = ends(seen[:, :, 0], inside, 0), ends(seen[:, :, 1], inside, 1)
    if across is None or down is None:
        return 0.0, 0.0, float(wide), float(high)
    return across[0] * wide, down[0] * high, across[1] * wide, down[1] * high


def ends(ramp: np.ndarray, inside: np.ndarray, axis: int) -> tuple[float, float] | None:
    """Where a rising line meets the outer edges, the photo's own where they are half a pixel off; None: it is none."""
    where = np.flatnonzero(inside.mean(axis) > 0.5 * inside.mean(axis).max(initial=0.1))
    if len(where) < 2:
        return None
    line = np.array([ramp.take(i, 1 - axis)[inside.take(i, 1 - axis)].mean() for i in where])
    slope, start = np.polyfit(where, line, 1)
    if slope <= 0 or np.abs(start + slope * where - line).max() > 0.05:
        return None
    first, last = float(start - slope / 2), float(start + slope * (ramp.shape[1 - axis] - 0.5))
    return (0.0 if abs(first) < slope / 2 else first), (1.0 if abs(last - 1) < slope / 2 else last)


def adapt(given: Any) -> Preprocess:
    """What a user calls preprocessing: torchvision transforms, a Hugging Face image processor, any callable."""
    if isinstance(given, Preprocess):
        return given
    if not callable(given):
        raise ModelError(f"a {type(given).__name__} is not a preprocessing; give a callable from PIL image to tensor")
    return measured(given)


def measured(transform: Callable[[Image.Image], Any]) -> Preprocess:
    """The colours come from what a black and a white picture turn into, whoever wrote the transform."""
    black, white = (checked(transform(Image.new("RGB", (256, 256), c))).double() for c in ("black", "white"))
    low, high = black.mean((1, 2)), white.mean((1, 2))  # [3]
    even = max(black.flatten(1).std(1).max(), white.flatten(1).std(1).max()) < 1e-3
    if not even or (high - low).min() < 1e-6:  # colours of its own for every picture
        return Preprocess(transform, *UNKNOWN)
    return Preprocess(transform, (low / (low - high)).tolist(), (1 / (high - low)).tolist())
