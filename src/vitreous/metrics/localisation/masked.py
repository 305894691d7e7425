"""What the metrics of localisation share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.images.masks import Mask
from vitreous.metrics.case import Case, Measured
from vitreous.types import Map

One = Callable[[Float[Tensor, "rows columns"], Mask], float]


def with_masks(case: Case, maps: Map, measure: One) -> Measured:
    """`measure` for each map and its mask; NaN where the object is unknown or out of sight."""
    masks = [None] * len(maps) if case.masks is None else case.masks
    values = [
        torch.nan if mask is None or not mask.any() else measure(values, mask.cpu())
        for values, mask in zip(maps.detach().cpu(), masks, strict=True)
    ]
    return Measured(torch.tensor(values, dtype=torch.float32, device=maps.device))
