"""Queries and keys as vectors of one token, all attention heads together, and through the output projection."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.methods.attention.value_runs import Projection, side_by_side, wide
from vitreous.types import Heads


def projected(projection: Projection | None, heads: Heads) -> Float[Tensor, "B N D"] | None:
    """W_O·x + b_O of queries or keys x; None if there is no such projection."""
    flat = side_by_side(widen(heads.detach()))
    if projection is None or projection.weight is None:
        return None if projection is None else flat
    if projection.weight.shape[1] != flat.shape[-1]:
        return None
    return F.linear(flat, widen(projection.weight.detach()).to(flat), wide(projection.bias))
