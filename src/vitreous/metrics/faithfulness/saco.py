from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous._support.precision import doubled, widest
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale, first, hide
from vitreous.registry import metric
from vitreous.trace.perturb.fills import Fill
from vitreous.types import Scores


@metric(better="higher", cite="wu2024faithfulness")
def saco(
    case: Case,
    *,
    groups: Annotated[int, Field(ge=2, description="sets of patches of alike relevance")] = 10,
    fill: Annotated[
        Fill, Field(description="what hides: the image's mean colour, its blurred self, or zeros")
    ] = "mean",
    of: Scale = "probability",
) -> Measured:
    """Whether hiding a more relevant group of patches lowers the probability more, weighted by how far groups differ;
    checks the values, not only their order.

    patches in order, in K groups of mean relevance s and drop d of p(target), or of what `of` says; over all i < j:
    Σ ±(s_i − s_j) / Σ (s_i − s_j), + where d_i ≥ d_j; from −1 to 1; 0 for a map of one value
    """
    patches = case.order.shape[1]
    groups = min(groups, patches)
    ends = [patches * group // groups for group in range(groups + 1)]
    until = first(case.order, ends)
    members = until[:, 1:] & ~until[:, :-1]  # [B K n]
    whole = case.trace.score(case.scored(of)).detach()[:, None]
    drops = whole - hide(case, of, members, fill, "saco", groups)
    sums = torch.einsum("bkn,bn->bk", doubled(members), doubled(case.patches.flatten(1)))
    means = (sums / members.sum(-1).to(sums)).to(
        drops.device, widest(drops.device)
    )  # of equal float32 values exactly that value
    return Measured(coefficient(means, drops), drops, [end / patches for end in ends[1:]])


def coefficient(means: Float[Tensor, "B K"], drops: Float[Tensor, "B K"]) -> Scores:
    """How much of all differences in relevance lies between groups in the right order, minus the rest."""
    i, j = torch.triu_indices(means.shape[1], means.shape[1], 1, device=means.device)
    apart = means[:, i] - means[:, j]
    right = torch.where(drops[:, i] >= drops[:, j], apart, -apart).sum(1)
    total = apart.abs().sum(1)
    return torch.where(total > 0, right / total, torch.zeros_like(total))
