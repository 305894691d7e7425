from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale, Way, first, hide, ordered, take_out
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
    of: Scale = "probability",
) -> Measured:
    """How much longer the probability lasts when the least relevant patches are removed first than the most relevant;
    the metric by which advise decides.

    symmetric relevance gain: mean over s of y(target) without the ⌊n·s⌋ least relevant patches − without the ⌊n·s⌋ most
    relevant, s = 0, 0.1 … 0.9; the effect of any patch being gone cancels; y: the probability, or what `of` says
    """
    ways: tuple[Way, Way] = ("least", "most")
    if by == "tokens":
        least, most = take_out(case, ways, of, steps, "srg", "by=pixels")
    else:
        patches = case.order.shape[1]
        counts = [patches * step // steps for step in range(steps)]
        least, most = (hide(case, of, first(ordered(case, way), counts), fill, "srg", way, *counts) for way in ways)
    return Measured((least - most).mean(1), least - most, [step / steps for step in range(steps)])
