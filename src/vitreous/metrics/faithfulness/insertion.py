from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale, area, counts_of, first, hide
from vitreous.registry import metric
from vitreous.trace.perturb.fills import Fill


@metric(better="higher", cite="petsiuk2018rise")
def insertion(
    case: Case,
    *,
    steps: Annotated[
        int | None, Field(ge=1, description="equal steps from none of the image to all of it; None: patch by patch")
    ] = 28,
    fill: Annotated[
        Fill, Field(description="what hides: the image's mean colour, its blurred self, or zeros")
    ] = "blur",
    of: Scale = "probability",
) -> Measured:
    """How fast the probability rises while patches are revealed, most relevant first; use it to see whether a map finds
    what is enough for the model.

    area under y(target) over the share of patches shown, 0 … 1; y: the probability, or what `of` says
    """
    patches = case.order.shape[1]
    counts = counts_of(patches, steps)
    shares = [count / patches for count in counts]
    curve = hide(case, of, ~first(case.order, counts), fill, "insertion", *counts)
    return Measured(area(curve, shares), curve, shares)
