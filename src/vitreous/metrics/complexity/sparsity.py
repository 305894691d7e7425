from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.evaluation import Case, Measured
from vitreous.registry import metric


@metric(better="higher", cite="brocki2023class")
def sparsity(
    case: Case,
    *,
    share: Annotated[float, Field(gt=0, lt=1, description="of the largest value: less counts as nothing")] = 0.05,
) -> Measured:
    """The share of patches that hardly matter.

    share of patches with |s| < 0.05 · max s; of max |s| where no s is positive
    """
    values = case.patches.flatten(1)
    size, most = values.abs(), values.amax(1)
    most = torch.where(most > 0, most, size.amax(1))
    return Measured((size < share * most[:, None]).float().mean(1))
