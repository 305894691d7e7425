"""The outline of a region, drawn on its image."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

LINE = 200  # of this part of the longer side
RING = 40  # a point has a ring of this part of it
INNER, OUTER = (255, 255, 255), (0, 0, 0)  # seen on any image


@runtime_checkable
class Covering(Protocol):
    """A part of the image that a model sees."""

    def coverage(self, size: tuple[int, int]) -> Tensor: ...


def surrounded(image: Image.Image, region: Covering | None) -> Image.Image:
    """A copy of the image with a line around a part of it, a ring around a point; the image itself without one."""
    if region is None:
        return image
    wide, high = image.size
    covered = region.coverage((high, wide)).cpu().numpy()
    inside, thick = covered > covered.max() / 2, max(1, round(max(image.size) / LINE))
    copy = image.convert("RGB").copy()
    if inside.sum() <= 1:
        row, column = divmod(int(inside.argmax()), wide)
        return ringed(copy, row, column, max(3 * thick, max(image.size) // RING), thick)
    pixels = np.array(copy)
    pixels[near_edge(inside, 2 * thick)] = OUTER
    pixels[near_edge(inside, thick)] = INNER
    return Image.fromarray(pixels)


def ringed(image: Image.Image, row: int, column: int, radius: int, thick: int) -> Image.Image:
    pen = ImageDraw.Draw(image)
    for width, colour in ((2 * thick, OUTER), (thick, INNER)):
        pen.ellipse((column - radius, row - radius, column + radius, row + radius), outline=colour, width=width)
    return image


def near_edge(inside: np.ndarray, width: int) -> np.ndarray:
    """The pixels of a part that are less than `width` from what is outside; the border of the image is outside too."""
    inner = inside
    for _ in range(width):
        framed = np.pad(inner, 1)
        inner = inner & framed[:-2, 1:-1] & framed[2:, 1:-1] & framed[1:-1, :-2] & framed[1:-1, 2:]
    return np.asarray(inside & ~inner)
