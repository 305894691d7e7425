from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vitreous.capture.shown import Shown, split, step
from vitreous.methods.common import (
    GradientRules,
    check_start,
    following,
    graph_of,
    keeps_all,
    repeated_step,
    trim,
    trim_slots,
)
from vitreous.methods.decoded import gradient_steps, refuse_rules, rolled
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(
    cite="gildenblat2020exploring",
    targeted=True,
    attention=True,
    joins=True,
    stages=True,
    decodes=True,
    several=True,
    graph=graph_of,
    replays=keeps_all,
    tried=[{"discard": 0.9}, {"rules": "libra"}],
)
def grad_rollout(
    trace: Trace,
    target: Target,
    *,
    discard: Annotated[
        float, Field(ge=0, lt=1, description="share of each layer's smallest entries that is set to zero")
    ] = 0.0,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
    rules: GradientRules = "plain",
) -> Map:
    """Rollout over attention weighted by its gradient; use it for a rollout that depends on the class.

    ρᵀ Π_l (I + Ā⁽ˡ⁾)/2, rows normalised, Ā = (mean_h ∇A ⊙ A)⁺
    """
    check_start(trace, start_layer)
    if trace.layout.decoder is not None:
        refuse_rules(trace, rules)
        return trace.map(rolled(gradient_steps(trace, target, clamp_last=True), 0.5, discard, start_layer))
    follow = following(trace, rules)  # makes the one forward pass that everything below uses
    carried, joins = trace.readout, trace.joins
    layout, left = trace.layout, trace.layout.layers  # not the trace itself, which keeps `visit`

    def visit(layer: Shown) -> None:
        nonlocal carried, left
        left -= 1
        stage = layout.stage(left)
        carried = stage.joined(carried, joins[left]) if left in joins else carried
        if stage.repeats:
            a = layer.means() if discard == 0 else trim_slots(layer.means(), discard, stage)
            onward = repeated_step(carried.to(a), stage, a, 0.5)
        elif layout.stages:
            row = stage.gather(carried)
            if discard > 0:
                trimmed = trim_slots(layer.means(), discard, stage)
                kept, moved = split(row, [(slice(None), slice(None), trimmed)], 0.5, stage.key_mask(row))
            else:
                kept, moved = layer.split(row, stage.key_mask(row))
            onward = stage.onward(carried.to(kept), kept, moved)
        elif discard > 0:
            means = [(images, rows, product.mean(1).clamp_min_(0)) for images, rows, _, product in layer.chunks]
            whole = means[0][2].new_zeros(len(carried), carried.shape[1], carried.shape[1])
            for images, rows, part in means:
                whole[images, rows] = part
            onward = step(carried.to(whole), trim(whole, discard, ()), 0.5)
        else:
            onward = layer.rolled(carried)
        if left >= start_layer:
            carried = onward

    follow(target, visit)
    return trace.map(carried, start_layer)
