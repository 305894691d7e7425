"""Parts of an image as weights of the places of an output: the share of the part that lies in each place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vitreous.types import Box

Sides = tuple[float, float, float, float]  # left, top, right, bottom


class Area(ABC):
    """A part of what the model sees."""

    @abstractmethod
    def coverage(self, size: tuple[int, int]) -> Tensor:
        """How much of the part lies in each of (rows, columns) places, [Y X] in float64; any unit."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Equal for equal parts."""

    def weights(self, like: Tensor) -> Tensor:
        """The share of the part in each place of [… Y X], which sum to one."""
        covered = self.coverage((like.shape[-2], like.shape[-1]))
        return (covered / covered.sum()).to(like.device, like.dtype)


@dataclass(frozen=True)
class Point(Area):
    """The place that holds one point, given as shares of the width and the height."""

    across: float
    down: float

    def coverage(self, size: tuple[int, int]) -> Tensor:
        found = torch.zeros(size, dtype=torch.float64)
        row, column = (min(int(share * count), count - 1) for share, count in zip((self.down, self.across), size))
        found[row, column] = 1
        return found

    @property
    def key(self) -> Hashable:
        return self


@dataclass(frozen=True, eq=False)
class Drawn(Area):
    """Pixels of a mask; `seen` are the sides of what the model sees, in pixels of the mask.

    A box is a mask of one pixel.
    """

    pixels: np.ndarray  # [rows columns]
    seen: Sides
    _kept: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def coverage(self, size: tuple[int, int]) -> Tensor:
        if size not in self._kept:
            left, top, right, bottom = self.seen
            down = overlaps(top, bottom, size[0], self.pixels.shape[0])
            across = overlaps(left, right, size[1], self.pixels.shape[1])
            self._kept[size] = torch.from_numpy(down @ self.pixels.astype(np.float64) @ across.T)
        return self._kept[size]

    @property
    def key(self) -> Hashable:
        return self.seen, self.pixels.shape, self.pixels.tobytes()


@dataclass(frozen=True, eq=False)
class Weighed(Area):
    """The places of an output themselves."""

    shares: Tensor  # [Y X]

    def coverage(self, size: tuple[int, int]) -> Tensor:
        if tuple(self.shares.shape) == size:
            return self.shares
        whole = Drawn(self.shares.cpu().numpy(), (0, 0, self.shares.shape[1], self.shares.shape[0]))
        return whole.coverage(size)

    @property
    def key(self) -> Hashable:
        return tuple(self.shares.shape), self.shares.cpu().numpy().tobytes()


def overlaps(start: float, stop: float, places: int, pixels: int) -> np.ndarray:
    """The length that each of `places` equal parts of start…stop shares with each pixel i…i+1, [places pixels]."""
    edges = start + (stop - start) * np.arange(places + 1) / places
    own = np.arange(pixels)
    shared = np.minimum(edges[1:, None], own + 1) - np.maximum(edges[:-1, None], own)
    return shared.clip(0)


def boxed(box: Sides, seen: Sides) -> Drawn:
    """A box as a mask of one pixel; both in pixels of the image."""
    (left, top), wide, high = box[:2], box[2] - box[0], box[3] - box[1]
    part = (seen[0] - left) / wide, (seen[1] - top) / high, (seen[2] - left) / wide, (seen[3] - top) / high
    return Drawn(np.ones((1, 1), np.bool_), part)


def bounds(area: Area, size: tuple[int, int]) -> Box:
    """The smallest rectangle of places around a part, as shares: top, left, bottom, right."""
    rows, columns = area.coverage(size).nonzero(as_tuple=True)
    top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
    return float(top / size[0]), float(left / size[1]), float(bottom / size[0]), float(right / size[1])
