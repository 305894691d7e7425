from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import first, hide, least_first, take_out
from vitreous.registry import metric
from vitreous.trace.perturb.fills import Fill


@metric(better="higher", cite="blucher2024decoupling")
def srg(
    case: Case,
    *,
    by: Annotated[
        Literal["tokens", "pixels"], Field(description="patches are taken out of the sequence, or hidden by `fill`")
    ] = "tokens",
    steps: Annotated[
        int, Field(ge=2, description="equal steps of the share taken away, from 0; the last: 1 − 1/n")
    ] = 10,
    fill: Annotated[
        Fill, Field(description="what hides, by=pixels: the image's mean colour, its blurred self, or zeros")
    ] = "mean",
) -> Measured:
    """How much longer the probability lasts when the least relevant patches are removed first than the most relevant;
    the metric by which advise decides.

    symmetric relevance gain: mean over s of p(target) without the ⌊n·s⌋ least relevant patches − without the ⌊n·s⌋ most
    relevant, s = 0, 0.1 … 0.9; the effect of any patch being gone cancels
    """
    orders = [least_first(case), case.order]
    if by == "tokens":
        least, most = take_out(case, orders, steps, "srg", "by=pixels")
    else:
        patches = case.order.shape[1]
        counts = [patches * step // steps for step in range(steps)]
        least, most = (hide(case, case.graded, first(order, counts), fill, "srg") for order in orders)
    return Measured((least - most).mean(1), least - most, [step / steps for step in range(steps)])
