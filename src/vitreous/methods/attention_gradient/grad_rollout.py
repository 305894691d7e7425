from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitreous.capture import Attention
from vitreous.methods.attention.rollout import check_start, step, trim
from vitreous.registry import method
from vitreous.target import Target
from vitreous.trace import Trace, layer_dtype
from vitreous.types import Map


@method(cite="gildenblat2020exploring", targeted=True, attention=True)
def grad_rollout(
    trace: Trace,
    target: Target,
    *,
    discard: Annotated[
        float, Field(ge=0, lt=1, description="share of each layer's smallest entries that is set to zero")
    ] = 0.0,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
) -> Map:
    """Rollout over attention weighted by its gradient.

    ρᵀ Π_l (I + Ā⁽ˡ⁾)/2, rows normalised, Ā = (mean_h ∇A ⊙ A)⁺
    """
    grads = trace.grads(target)
    layers = trace.record(grad=True).layers
    check_start(trace, start_layer)
    carried = trace.readout.to(layer_dtype(layers[-1]))
    rows = trace.read_tokens
    for layer, grad in reversed(list(zip(layers, grads))[start_layer:]):
        if discard > 0:
            whole = torch.cat([a for _, a in wanted(layer, grad, None)], 1)
            carried = step(carried, trim(whole, discard, ()), 0.5)
        else:
            total = torch.zeros_like(carried)
            for i, a in wanted(layer, grad, rows):
                total += step(carried, a, 0.5, i)
            carried = total
        rows = None
    return trace.map(carried)


def wanted(layer: Attention, grad: Tensor, rows: list[int] | None) -> list[tuple[slice | list[int], Tensor]]:
    """Ā by rows: attention times gradient, the mean of the heads, then what is positive."""
    return [(i, (a * layer.weights_grad(grad, i)).mean(1).clamp_min(0)) for i, a in layer.chunks(rows)]
