"""How alike two maps are."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous._support.statistics import pearson
from vitreous.types import Map, Scores


def correlation(one: Map, other: Map) -> Scores:
    """Pearson's r, image by image; a map that is the same everywhere is like another such, and unlike all others."""
    a, b = (each.detach().cpu().double().flatten(1) for each in (one, other))
    flat = torch.stack([each.amax(1) == each.amin(1) for each in (a, b)])
    r = torch.from_numpy(pearson(a.numpy(), b.numpy())).masked_fill(flat.any(0), 0).masked_fill(flat.all(0), 1)
    return r.masked_fill((a + b).isnan().any(1), torch.nan).to(one)


def rank_correlation(one: Map, other: Map) -> Scores:
    """Spearman's ρ: the correlation of ranks, equal values sharing theirs."""
    return correlation(*(ranks(each).to(one.device) for each in (one, other)))


def ranks(values: Map) -> Float[Tensor, "B 1 n"]:
    """1 for the smallest; NaN throughout a map that holds a NaN."""
    from scipy.stats import rankdata

    flat = values.detach().cpu().double().flatten(1)
    ranked = torch.from_numpy(rankdata(flat.numpy(), axis=1))
    return ranked.masked_fill(flat.isnan().any(1, keepdim=True), torch.nan)[:, None]
