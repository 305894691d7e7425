from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale, area, take_out
from vitreous.registry import Better, metric


def direction(options: Mapping[str, Any]) -> Better:
    return "lower" if options["order"] == "most" else "higher"


@metric(better=direction, cite="chefer2021transformer")
def token_deletion(
    case: Case,
    *,
    order: Annotated[
        Literal["most", "least"], Field(description="what goes first: the most relevant tokens or the least")
    ] = "most",
    steps: Annotated[
        int, Field(ge=1, description="equal steps of the share taken away, from 0; the last: 1 − 1/n")
    ] = 10,
    of: Scale = "probability",
) -> Measured:
    """How fast the probability falls while tokens are removed from the sequence; like deletion, without images that the
    model has never seen.

    area under y(target) after removing ⌊n·s⌋ patch tokens, s = 0, 0.1 … 0.9; `most`: lower is better, `least`: higher;
    y: the probability, or what `of` says
    """
    shares = [step / steps for step in range(steps)]
    (curve,) = take_out(case, [order], of, steps, "token_deletion", "deletion, which hides patches")
    return Measured(area(curve, shares), curve, shares)
