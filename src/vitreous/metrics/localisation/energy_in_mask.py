from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from vitreous.images.masks import Mask
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.localisation.masked import with_masks
from vitreous.registry import metric


@metric(better="higher", cite="wang2020score", masks=True)
def energy_in_mask(case: Case) -> Measured:
    """The share of the positive relevance that lies on the object; use it to see how much of a map falls on the
    background.

    Σ_mask s⁺ / Σ s⁺, s at the resolution of the image; 0 where nothing is positive
    """
    return with_masks(case, case.pixels, inside)


def inside(values: Float[Tensor, "rows columns"], mask: Mask) -> float:
    positive = values.double().clamp(min=0)
    total = positive.sum()
    return float(positive[mask].sum() / total) if total > 0 else 0.0
