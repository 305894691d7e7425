from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric
from vitreous.trace.perturb.fills import baseline_images, end_scores


@metric(better="lower", cite="sundararajan2017axiomatic")
def completeness(
    case: Case,
    *,
    baseline: Annotated[
        Literal["zero", "blur"], Field(description="the image that has nothing to explain; zero: the mean colour")
    ] = "zero",
) -> Measured:
    """How far a map is from adding up to the score; only for methods that promise it (integrated_gradients).

    |Σ s − (y(x) − y(x₀))| / |y(x) − y(x₀)|; NaN where y(x) = y(x₀)
    """
    trace = case.trace
    without = end_scores(trace, case.target, baseline_images(trace, baseline, 0))
    gained = (end_scores(trace, case.target, trace.images) - without).cpu().double()
    missed = (case.map.cpu().double().flatten(1).sum(1) - gained).abs() / gained.abs()
    return Measured(missed.masked_fill(gained == 0, torch.nan).to(case.map))
