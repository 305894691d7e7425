from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale, area, counts_of, first, hide
from vitreous.registry import metric
from vitreous.trace.perturb.fills import Fill


@metric(better="lower", cite="petsiuk2018rise")
def deletion(
    case: Case,
    *,
    steps: Annotated[
        int | None, Field(ge=1, description="equal steps from the whole image to none of it; None: patch by patch")
    ] = 28,
    fill: Annotated[
        Fill, Field(description="what hides: the image's mean colour, its blurred self, or zeros")
    ] = "mean",
    of: Scale = "probability",
) -> Measured:
    """How fast the probability falls while patches are hidden, most relevant first; use it to see whether a map finds
    what the model needs.

    area under y(target) over the share of patches hidden, 0 … 1; y: the probability, or what `of` says
    """
    patches = case.order.shape[1]
    counts = counts_of(patches, steps)
    shares = [count / patches for count in counts]
    curve = hide(case, of, first(case.order, counts), fill, "deletion", *counts)
    return Measured(area(curve, shares), curve, shares)
