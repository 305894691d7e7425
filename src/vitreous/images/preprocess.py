"""Preprocessing: from an image to a model's input, and back to colours for drawing."""

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
MIDDLE = 128  # blue of the ramp: any other value is padding
BICUBIC = Image.Resampling.BICUBIC
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the image


@dataclass(frozen=True, eq=False)
class Preprocess:
    """A callable from image to tensor, with the mean and standard deviation that undo it."""

    transform: Callable[[Image.Image], Any]
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: Image.Image) -> Float[Tensor, "3 Y X"]:
        return checked(self.transform(image))

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of the input it makes."""
        shape = self(Image.new("RGB", (320, 320))).shape
        return shape[-2], shape[-1]

    def colours(self, x: Float[Tensor, "3 Y X"]) -> np.ndarray:
        """The image that this input shows, [Y X 3] in 0…1."""
        mean, std = (torch.tensor(tuple(c), dtype=torch.float32)[:, None, None] for c in (self.mean, self.std))
        rgb = x.detach().float().cpu() * std + mean
        if rgb.min() < -0.2 or rgb.max() > 1.2:  # normalised in some other way: use the full range
            rgb = (rgb - rgb.min()) / (rgb.max() - rgb.min()).clamp_min(1e-12)
        return rgb.clamp(0, 1).permute(1, 2, 0).numpy()

    @cached_property
    def _boxes(self) -> dict[tuple[int, int], Box]:
        return {}

    def box(self, size: tuple[int, int]) -> Box:
        """The part of an image of this (width, height) that the model sees; larger than the image if it is padded."""
        if size not in self._boxes:
            self._boxes[size] = find_box(self, size)
        return self._boxes[size]

    def view(self, image: Image.Image, most: int = 1024) -> Image.Image:
        """The part of an image that the model sees, in the image's resolution (at most `most` pixels per side)."""
        left, top, right, bottom = self.box(image.size)
        scale = min(1.0, most / max(right - left, bottom - top))
        size = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
        if min(left, top) < -1 or right > image.width + 1 or bottom > image.height + 1:
            return image.crop((round(left), round(top), round(right), round(bottom))).resize(size, BICUBIC)
        inside = max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)
        return image.resize(size, BICUBIC, box=inside)


def checked(x: Any) -> Tensor:
    """The result of a preprocessing; raises unless it is a float tensor [3 Y X]."""
    x = x[0] if isinstance(x, Tensor) and x.ndim == 4 and len(x) == 1 else x
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[0] != 3 or not x.is_floating_point():
        said = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ModelError(f"the preprocessing returns {said}; it must turn a PIL image into a float tensor [3, H, W]")
    return x


def find_box(preprocess: Preprocess, size: tuple[int, int]) -> Box:
    """Preprocess a colour ramp and read off where its edges are."""
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
    """Where a rising line meets the outer edges, rounded to the image's own edges; None if it is not a line."""
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
    """Any callable from a PIL image to a tensor."""
    if isinstance(given, Preprocess):
        return given
    if not callable(given):
        raise ModelError(f"a {type(given).__name__} is not a preprocessing; give a callable from PIL image to tensor")
    return measured(given)


def measured(transform: Callable[[Image.Image], Any]) -> Preprocess:
    """Find the colours of any transform from what it makes of a black and a white image."""
    black, white = (checked(transform(Image.new("RGB", (256, 256), c))).double() for c in ("black", "white"))
    low, high = black.mean((1, 2)), white.mean((1, 2))  # [3]
    even = max(black.flatten(1).std(1).max(), white.flatten(1).std(1).max()) < 1e-3
    if not even or (high - low).min() < 1e-6:  # it normalises every image by itself
        return Preprocess(transform, *UNKNOWN)
    return Preprocess(transform, (low / (low - high)).tolist(), (1 / (high - low)).tolist())
