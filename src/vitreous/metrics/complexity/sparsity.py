from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric
from vitreous.types import Scores


@metric(better="higher", cite="brocki2023class")
def sparsity(
    case: Case,
    *,
    share: Annotated[float, Field(gt=0, lt=1, description="of the largest value: less counts as nothing")] = 0.05,
) -> Measured:
    """The share of patches whose value is close to zero; use it to describe maps, not to judge them.

    share of patches with |s| < 0.05 · max s; of max |s| where no s is positive
    """
    return Measured(share_of_little(case.patches.flatten(1), share))


def share_of_little(values: Float[Tensor, "B n"], share: float = 0.05) -> Scores:
    """The share of each row's values that are little beside its largest."""
    size, most = values.abs(), values.amax(1)
    most = torch.where(most > 0, most, size.amax(1))
    return (size < share * most[:, None]).float().mean(1)
