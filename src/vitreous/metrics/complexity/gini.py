from __future__ import annotations

from vitreous._support import concentration
from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric


@metric(better="higher", cite="chalasani2020concise")
def gini(case: Case) -> Measured:
    """How unequal the patches of a map are: 0 if all are alike, near 1 if one has everything; use it to describe maps,
    not to judge them.

    Σᵢ (2i − n − 1) · |s|₍ᵢ₎ / (n Σ|s|), |s|₍ᵢ₎ rising; 0 where s is zero everywhere
    """
    return Measured(concentration.gini(case.patches.flatten(1)))
