"""RISE, mask by mask: published masks, and the mean of the scores weighted by them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_score(run: Callable[[Tensor], Tensor], image: Tensor, cover: Tensor, cells: Tensor, shifts: Tensor) -> Tensor:
    """One image [1 3 Y X], cells [K s s] of 0 and 1, shifts [K 2] in pixels: a map [Y X]."""
    total, weight = torch.zeros_like(image[0, 0]), torch.zeros_like(image[0, 0])
    for visible, shift in zip(cells, shifts, strict=True):
        mask = enlarged(visible.to(image), tuple(shift.tolist()), tuple(image.shape[2:]))
        y = float(run(image * mask + cover * (1 - mask)))
        total, weight = total + y * mask, weight + mask
    return total / weight


def enlarged(visible: Tensor, shift: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Cells as large as they must be for s of them to fill the image, one more for the shift, and cropped."""
    s = len(visible)
    height, width = (math.ceil(side / s) for side in size)
    large = F.interpolate(visible[None, None], ((s + 1) * height, (s + 1) * width), mode="bilinear")[0, 0]
    return large[shift[0] : shift[0] + size[0], shift[1] : shift[1] + size[1]]
