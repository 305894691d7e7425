"""Occlusion by painting the picture: one window of one image at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def falls(
    run: Callable[[Tensor], Tensor],
    images: Tensor,
    cover: Tensor,
    grid: tuple[int, int],
    patch: tuple[int, int],
    window: int = 1,
    stride: int = 1,
) -> Tensor:
    """The mean fall of y over the windows that cover each patch, [B h w]; `run` gives y [1] of one image."""
    maps = torch.zeros(len(images), *grid, dtype=images.dtype)
    for b in range(len(images)):
        image, whole = images[b : b + 1], float(run(images[b : b + 1]))
        found: dict[tuple[int, int], list[float]] = {}
        for top in starts(grid[0], window, stride):
            for left in starts(grid[1], window, stride):
                painted = image.clone()
                rows = slice(top * patch[0], (top + window) * patch[0])
                columns = slice(left * patch[1], (left + window) * patch[1])
                painted[0, :, rows, columns] = cover[b, :, rows, columns]
                fall = whole - float(run(painted))
                for row in range(top, min(top + window, grid[0])):
                    for column in range(left, min(left + window, grid[1])):
                        found.setdefault((row, column), []).append(fall)
        for (row, column), values in found.items():
            maps[b, row, column] = sum(values) / len(values)
    return maps


def starts(side: int, window: int, stride: int) -> list[int]:
    """Where windows begin: the last one ends at the border."""
    places = [0]
    while places[-1] + window < side:
        places.append(min(places[-1] + stride, side - window))
    return places
