from __future__ import annotations

import math

import torch

from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric


@metric(better="lower", cite="bhatt2020evaluating")
def entropy(case: Case) -> Measured:
    """How evenly a map is spread over the patches: 0 if it lies on one patch, 1 if it is the same on all; use it to
    describe maps, not to judge them.

    −Σ p ln p / ln n, p = |s| / Σ|s|; 1 where s is zero everywhere
    """
    size = case.patches.flatten(1).abs()
    total = size.sum(1, keepdim=True)
    share = torch.where(total > 0, size / total, 1 / size.shape[1])
    return Measured(torch.special.entr(share).sum(1) / max(math.log(size.shape[1]), 1e-12))
