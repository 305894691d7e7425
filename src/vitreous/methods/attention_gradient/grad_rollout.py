from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.capture import Attention
from vitreous.follow import Chunks
from vitreous.methods.attention.rollout import check_start, step, trim
from vitreous.registry import method
from vitreous.target import Target
from vitreous.trace import Trace
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
    check_start(trace, start_layer)
    trace.followed()  # the one run that all below is read from
    carried = trace.readout
    left = len(trace.layout.entries)

    def visit(layer: Attention, chunks: Chunks) -> None:
        nonlocal carried, left
        left -= 1
        wanted = ((rows, product.mean(1).clamp_min_(0)) for rows, _, product in chunks)
        row = carried.to(layer.wide)
        if discard > 0:
            whole = trim(torch.cat([part for _, part in wanted], 1), discard, ())
            row = step(row, whole, 0.5)
        else:
            total = torch.zeros_like(row)
            for rows, part in wanted:
                total += step(row, part, 0.5, rows)
            row = total
        if left >= start_layer:
            carried = row

    trace.follow(target, visit)
    return trace.map(carried)
