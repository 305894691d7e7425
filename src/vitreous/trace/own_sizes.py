"""Maps of images of different sizes in one tensor: each fills its upper left part, and NaN the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def together(maps: Sequence[Tensor]) -> Tensor:
    """Maps [b … h w] of several batches as one tensor."""
    high, wide = (max(one.shape[axis] for one in maps) for axis in (-2, -1))
    more = [(0, wide - one.shape[-1], 0, high - one.shape[-2]) for one in maps]
    return torch.cat([F.pad(one, beyond, value=torch.nan) if any(beyond) else one for one, beyond in zip(maps, more)])


def differ(maps: Tensor) -> bool:
    """Whether these are maps of different sizes: some end in NaN and do not begin so."""
    return bool((maps[..., -1, -1].isnan() & ~maps[..., 0, 0].isnan()).any())


def own_part(maps: Tensor) -> Tensor:
    """The same without rows and columns that lie beyond all of them."""
    if not differ(maps):
        return maps
    inside = ~maps.isnan().flatten(0, -3).all(0)  # [h w]
    return maps[..., : int(inside.any(1).sum()), : int(inside.any(0).sum())]
