"""Maps in the pixels of the original image, of which the model may have seen a part only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from vitreous._support.spread import spread
from vitreous.attribution import Attribution
from vitreous.errors import InputError
from vitreous.images import pictures

Edges = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


@dataclass(frozen=True, eq=False)
class Placed:
    """A map at the size of its image, zero outside what the model saw."""

    map: Float[np.ndarray, "Y X"]
    seen: Bool[np.ndarray, "Y X"]  # what the model saw
    original: bool  # False: the pixels are those of what the model saw, as it cannot be found in the image

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.map.shape[1], self.map.shape[0]


def placed(found: Attribution, index: int, side: int | None = None) -> Placed:
    """One map in the pixels of its upright image; `side`: the most pixels on a side, for a smaller one."""
    size, box = place_of(found, index)
    scale = 1.0 if side is None else min(1.0, side / max(size))
    wide, high = (max(1, round(length * scale)) for length in size)
    left, top, right, bottom = (round(edge * scale) for edge in box or (0, 0, *size))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    values = spread(found[index].map.detach().float().cpu(), (bottom - top, right - left), found.box)[0]
    inner = slice(max(0, -top), high - top), slice(max(0, -left), wide - left)
    part = values.numpy()[inner]
    y, x = max(0, top), max(0, left)
    whole, seen = np.zeros((high, wide), np.float32), np.zeros((high, wide), bool)
    whole[y : y + part.shape[0], x : x + part.shape[1]] = part
    seen[y : y + part.shape[0], x : x + part.shape[1]] = True
    return Placed(whole, seen, box is not None)


def place_of(found: Attribution, index: int) -> tuple[tuple[int, int], Edges | None]:
    """Width and height of an image and what the model saw of it; of the latter alone, and None, if it is not known."""
    views = found.views
    if found.map.ndim == 4:
        raise InputError("these are maps of videos, and this exports maps of images")
    if views is None:
        raise InputError("this attribution was loaded from a file without its images; explain them again to export it")
    source = views.sources[index]
    if isinstance(source, Tensor) and source.is_floating_point():
        high, wide = source.shape[-2:]
        return (wide, high), (0, 0, wide, high)
    steps = views.preprocess
    size = pictures.read(source, index, steps.channels).image.size
    box = steps.located(size) if steps.known else None
    if box is None or box[2] - box[0] < 1 or box[3] - box[1] < 1:
        return views[index].size, None
    return size, (round(box[0]), round(box[1]), round(box[2]), round(box[3]))


def paths_of(found: Attribution) -> list[str | None]:
    """The file of each image, where there is one."""
    if found.views is None:
        return [told.get("path") for told in found.sources] or [None] * len(found)
    return [found.views.told(i).get("path") for i in range(len(found))]


def as_several(found: Attribution | Sequence[Any]) -> list[Attribution]:
    several = [found] if isinstance(found, Attribution) else list(found)
    for one in several:
        if not isinstance(one, Attribution):
            raise InputError(f"a {type(one).__name__} is not an attribution; give what vitreous.explain returns")
    return several
