"""Maps at the size of their images, and on coarser grids."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitreous.types import Box


def spread(maps: Tensor, size: tuple[int, int], box: Box | None) -> Tensor:
    """Maps at the size of their images (bilinear), put where they lie; zero where they cover nothing.

    Of videos [B T h w], each tubelet by itself.
    """
    if maps.ndim == 4:
        return spread(maps.flatten(0, 1), size, box).reshape(*maps.shape[:2], *size)
    if box is None:
        return F.interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    top, left, bottom, right = (round(share * size[axis % 2]) for axis, share in enumerate(box))
    inner = F.interpolate(maps[:, None], (bottom - top, right - left), mode="bilinear", align_corners=False)[:, 0]
    inner = inner[:, : size[0] - top, : size[1] - left]
    whole = maps.new_zeros(len(maps), *size)
    whole[:, top : top + inner.shape[1], left : left + inner.shape[2]] = inner
    return whole


def pooled(maps: Tensor, cells: tuple[int, ...]) -> Tensor:
    """The mean over each cell of a coarser grid: of patches (h, w), or of tubelets (T, h, w)."""
    if len(cells) == 2:
        return F.adaptive_avg_pool2d(maps[:, None], (cells[0], cells[1]))[:, 0]
    return F.adaptive_avg_pool3d(maps[:, None], (cells[0], cells[1], cells[2]))[:, 0]
