from __future__ import annotations

import torch

from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric


@metric(better="higher", cite="chalasani2020concise")
def gini(case: Case) -> Measured:
    """How unequal the patches of a map are: 0 if all are alike, near 1 if one has everything; use it to describe maps,
    not to judge them.

    Σᵢ (2i − n − 1) · |s|₍ᵢ₎ / (n Σ|s|), |s|₍ᵢ₎ rising; 0 where s is zero everywhere
    """
    size = case.patches.flatten(1).abs().sort(1).values
    count, total = size.shape[1], size.sum(1)
    place = 2 * torch.arange(1, count + 1, device=size.device) - count - 1
    return Measured(torch.where(total > 0, (place * size).sum(1) / (count * total), 0))
