from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.capture import sum_of
from vitreous.methods.attention.rollout import check_start
from vitreous.registry import method
from vitreous.target import Target
from vitreous.trace import Trace, layer_dtype
from vitreous.types import Map


@method(cite="chefer2021generic", targeted=True, attention=True)
def gae(
    trace: Trace,
    target: Target,
    *,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
) -> Map:
    """Generic attention explainability: attention that raises the score, followed through every layer.

    R ← R + mean_h (∇A ⊙ A)⁺ · R, R₀ = I; ρᵀ(R − I)
    """
    grads = trace.grads(target)
    layers = trace.record(grad=True).layers
    check_start(trace, start_layer)
    read = trace.readout.to(layer_dtype(layers[-1]))
    gained, rows = (
        torch.zeros_like(read),
        trace.read_tokens,
    )  # ρᵀ(R − I), kept apart from ρ so that little is not lost in it
    for layer, grad in reversed(list(zip(layers, grads))[start_layer:]):
        row = (read + gained)[:, None, None]  # [B 1 1 N]
        gained = gained + sum_of(
            (row[..., i] @ layer.weights_grad(grad, i).mul_(a).clamp_min_(0)).mean((1, 2))
            for i, a in layer.chunks(rows)
        )
        rows = None
    return trace.map(gained)
