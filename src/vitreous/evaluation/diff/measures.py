"""How alike two maps of one image are.

distance      ½ Σ |a / Σ|a| − b / Σ|b||: the share of the relevance that lies elsewhere, 0 … 1
correlation   Spearman's rank correlation over the patches
overlap       |top(a) ∩ top(b)| / |top(a) ∪ top(b)|, top: the tenth of the patches with the highest values
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy import stats

from vitreous._support.statistics import pearson

TOP = 0.1  # of the patches
Maps = Float[np.ndarray, "K h w"]
Corners = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the view


def shares(maps: Maps) -> Float[np.ndarray, "K n"]:
    """Each map as signed shares of its relevance: Σ|·| = 1; NaN where there is none."""
    flat = maps.reshape(len(maps), -1).astype(np.float64)
    total = np.abs(flat).sum(1, keepdims=True)
    return np.where(total > 0, flat / np.where(total > 0, total, 1), np.nan)


def distance(one: Maps, other: Maps) -> Float[np.ndarray, "K"]:
    return np.asarray(np.abs(shares(one) - shares(other)).sum(1) / 2)


def correlation(one: Maps, other: Maps) -> Float[np.ndarray, "K"]:
    """NaN where a map is the same everywhere."""
    ranked = [stats.rankdata(maps.reshape(len(maps), -1), axis=1) for maps in (one, other)]
    return pearson(*ranked)


def overlap(one: Maps, other: Maps) -> Float[np.ndarray, "K"]:
    first, second = top(one), top(other)
    return np.asarray((first & second).sum(1) / (first | second).sum(1))


def top(maps: Maps) -> np.ndarray:
    """The tenth of the patches with the highest values; of equal ones, the first."""
    flat = maps.reshape(len(maps), -1)
    count = max(1, round(TOP * flat.shape[1]))
    order = np.argsort(-flat, axis=1, kind="stable")[:, :count]
    found = np.zeros(flat.shape, bool)
    np.put_along_axis(found, order, True, axis=1)
    return found


def on_grid(maps: Maps, grid: tuple[int, int], seen: Corners | None = None) -> Float[np.ndarray, "K H W"]:
    """Maps on another grid, of the part of the view that is `seen`: means over the new cells."""
    if seen is None and maps.shape[1:] == grid:
        return maps
    values = torch.from_numpy(np.ascontiguousarray(maps, np.float32))[:, None]
    if seen is not None:
        values = part(values, seen)
    found: np.ndarray = F.interpolate(values, grid, mode="area")[:, 0].numpy()
    return found


def part(values: torch.Tensor, seen: Corners, fine: int = 8) -> torch.Tensor:
    """The values inside a box, `fine` times as many: each of the value of the cell it lies in."""
    high, wide = values.shape[-2:]
    left, top_, right, bottom = seen
    rows = top_ + (bottom - top_) * (torch.arange(fine * high) + 0.5) / (fine * high)
    columns = left + (right - left) * (torch.arange(fine * wide) + 0.5) / (fine * wide)
    y = (rows * high).long().clamp(0, high - 1)
    x = (columns * wide).long().clamp(0, wide - 1)
    return values[..., y[:, None], x[None, :]]
