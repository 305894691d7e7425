from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from vitreous._support.precision import doubled
from vitreous._support.statistics import pearson
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Curve, Scale, Share, hide
from vitreous.registry import metric
from vitreous.trace.perturb.fills import Fill
from vitreous.trace.trace import Trace

ROUNDING = 1e-6  # of the score: drops that differ by less do not differ


@metric(better="higher", cite="ancona2018towards")
def sensitivity_n(
    case: Case,
    *,
    shares: Annotated[
        tuple[Share, ...], Field(min_length=1, description="sizes of the random sets, as shares of the patches")
    ] = (0.05, 0.1, 0.2, 0.4, 0.8),
    subsets: Annotated[int, Field(ge=3, description="random sets of each size")] = 50,
    fill: Annotated[
        Fill, Field(description="what hides: the image's mean colour, its blurred self, or zeros")
    ] = "mean",
    seed: Annotated[int, Field(ge=0, description="another seed gives other sets")] = 0,
    of: Scale = "score",
) -> Measured:
    """How well the sums of a map over random sets of patches predict the fall of the score when those are hidden;
    checks the values of signed maps.

    Pearson's r of Σ_{i∈S} s_i and y(x) − y(x without S) over random sets S of n patches, y the score (a logit for a
    class) or what `of` says; the mean over n. NaN where all sums are the same (a map of one value) or all drops are
    """
    hidden = draw(case.trace, shares, subsets, seed)
    whole = doubled(case.trace.score(case.scored(of)).detach())[:, None]
    drops = whole - doubled(hide(case, of, hidden, fill, "sensitivity_n", *shares, subsets, seed))
    sums = torch.einsum("btn,bn->bt", doubled(hidden), doubled(case.patches.flatten(1)))
    each = (len(sums), len(shares), subsets)
    curve = foretold(sums.view(each), drops.view(each), ROUNDING * whole.abs())
    return Measured(curve.nanmean(1), curve, shares)


def draw(trace: Trace, shares: Sequence[float], subsets: int, seed: int) -> Bool[Tensor, "B T n"]:
    """Random sets of patches: `subsets` of each size, from a stream of each image's own."""
    patches = trace.layout.patches
    sizes = torch.tensor([min(max(round(share * patches), 1), patches - 1) for share in shares])
    sizes = sizes.repeat_interleave(subsets)[:, None]
    ranks = [torch.rand(len(sizes), patches, generator=stream).argsort(1) for stream in trace.generators(seed)]
    return (torch.stack(ranks) < sizes).to(trace.images.device)


def foretold(sums: Float[Tensor, "B S K"], drops: Float[Tensor, "B S K"], least: Float[Tensor, "B 1"]) -> Curve:
    """Pearson's r along the last axis; NaN where the sums are all the same, or the drops up to `least`."""
    off = (drops - drops.mean(-1, keepdim=True)).abs().amax(-1)
    r = torch.from_numpy(pearson(sums.cpu().numpy(), drops.cpu().numpy())).to(drops.device)
    return r.masked_fill(off <= least, torch.nan)
