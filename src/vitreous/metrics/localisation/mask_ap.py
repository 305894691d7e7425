from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.images.masks import Mask
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.localisation.masked import with_masks
from vitreous.registry import metric


@metric(better="higher", cite="chefer2021transformer", masks=True)
def mask_ap(case: Case) -> Measured:
    """How well a map ranks the object's pixels above all others (average precision); use it to judge segmentation
    without a threshold.

    Σ_t (R_t − R_{t−1}) · P_t over the distinct values t of s, P and R = precision and recall of the pixels with s ≥ t
    """
    return with_masks(case, case.pixels, average_precision)


def average_precision(values: Float[Tensor, "rows columns"], mask: Mask) -> float:
    ranked, order = values.flatten().sort(descending=True)
    found = mask.flatten()[order].double().cumsum(0)
    last = torch.cat([ranked[1:] != ranked[:-1], torch.ones(1, dtype=torch.bool)])  # of equal values
    taken = torch.arange(1, len(ranked) + 1)[last]
    found = found[last]
    return float((found.diff(prepend=found.new_zeros(1)) * found / taken).sum() / found[-1])
