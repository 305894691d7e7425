"""How alike two maps are."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.types import Map, Scores


def correlation(one: Map, other: Map) -> Scores:
    """Pearson's r, image by image; a map that is the same everywhere is like another such, and unlike all others."""
    a, b = (each.detach().cpu().double().flatten(1) for each in (one, other))
    flat = torch.stack([each.amax(1) == each.amin(1) for each in (a, b)])
    a, b = (unit(each) for each in (a, b))
    r = (a * b).sum(1).clamp(-1, 1).masked_fill(flat.any(0), 0).masked_fill(flat.all(0), 1)
    return r.masked_fill((a + b).isnan().any(1), torch.nan).to(one)


def rank_correlation(one: Map, other: Map) -> Scores:
    """Spearman's ρ: the correlation of ranks, equal values sharing theirs."""
    return correlation(*(ranks(each).to(one.device) for each in (one, other)))


def ranks(values: Map) -> Float[Tensor, "B 1 n"]:
    """1 for the smallest; not a number in a map that holds such."""
    from scipy.stats import rankdata

    flat = values.detach().cpu().double().flatten(1)
    ranked = torch.from_numpy(rankdata(flat.numpy(), axis=1))
    return ranked.masked_fill(flat.isnan().any(1, keepdim=True), torch.nan)[:, None]


def unit(values: Float[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    """Centred, of length one."""
    centred = values - values.mean(1, keepdim=True)
    length: Tensor = centred.norm(dim=1, keepdim=True)
    return centred / length.masked_fill(length == 0, 1)
