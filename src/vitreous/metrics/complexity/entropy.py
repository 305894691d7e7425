from __future__ import annotations

from vitreous._support import concentration
from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric


@metric(better="lower", cite="bhatt2020evaluating")
def entropy(case: Case) -> Measured:
    """How evenly a map is spread over the patches: 0 if it lies on one patch, 1 if it is the same on all; use it to
    describe maps, not to judge them.

    −Σ p ln p / ln n, p = |s| / Σ|s|; 1 where s is zero everywhere
    """
    return Measured(concentration.entropy(case.patches.flatten(1)))
