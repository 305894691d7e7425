from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from vitreous._support.progress import steps as told
from vitreous.methods.common import path
from vitreous.registry import Noted, method
from vitreous.trace.perturb.fills import baseline_images, end_scores
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.trace.versions import input_grads


@method(cite="sundararajan2017axiomatic", targeted=True, signed=True, costly=True, cheap={"steps": 4})
def integrated_gradients(
    trace: Trace,
    target: Target,
    *,
    steps: Annotated[int, Field(ge=1, description="points of the path (Gauss–Legendre)")] = 50,
    baseline: Annotated[
        Literal["zero", "blur", "noise"], Field(description="where the path begins; zero: the mean colour")
    ] = "zero",
    seed: Annotated[int, Field(ge=0, description="of the noise baseline")] = 0,
) -> Noted:
    """What each pixel adds to the score along the path from a baseline to the image; use it when the parts must add up
    to the score.

    Σ_c (x_c − x₀_c) · ∫₀¹ ∂y/∂x_c (x₀ + α(x − x₀)) dα; completeness_error = Σ − (y(x) − y(x₀))
    """
    images = trace.images
    fixed, start = target.fix(trace.output), baseline_images(trace, baseline, seed)
    points, weights = path(steps)
    total = torch.zeros_like(images, dtype=torch.float32)
    way = (start + point * (images - start) for point in told(points, steps, "integrated_gradients"))
    for weight, grad in zip(weights, input_grads(trace, fixed, way)):
        total += weight * grad.float()
    parts = ((images - start).float() * total).sum(-3)  # [B Y X]
    gained = end_scores(trace, fixed, images) - end_scores(trace, fixed, start)
    return Noted(parts, {"completeness_error": parts.flatten(1).sum(1) - gained.float()})
