from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.capture.shown import Shown
from vitreous.methods.common import GradientRules, check_start, following, graph_of
from vitreous.methods.decoded import gradient_steps, refuse_rules, two_modalities
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(
    cite="chefer2021generic",
    targeted=True,
    attention=True,
    joins=True,
    stages=True,
    decodes=True,
    several=True,
    graph=graph_of,
    replays=True,
    quick=True,
    tried=[{"rules": "libra"}],
)
def gae(
    trace: Trace,
    target: Target,
    *,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
    rules: GradientRules = "plain",
) -> Map:
    """Attention that raises the score, followed through all layers (generic attention explainability); a good first map
    for a class.

    R ← R + mean_h (∇A ⊙ A)⁺ · R, R₀ = I; ρᵀ(R − I), carried as one row from the last layer to the first; of a decoder
    (DETR), the rule for two modalities: R_qi ← R_qi + R̄_qqᵀ · mean_h (∇A ⊙ A)⁺ · R̄_ii, R̄ = I + (R − I) / row sums
    """
    check_start(trace, start_layer)
    if trace.layout.decoder is not None:
        refuse_rules(trace, rules)
        return trace.map(two_modalities(gradient_steps(trace, target), start_layer))
    follow = following(trace, rules)  # makes the one forward pass that everything below uses
    read, joins = trace.readout, trace.joins
    gained = torch.zeros_like(read)  # ρᵀ(R − I), kept apart from ρ so that small values are not lost to rounding
    layout, left = trace.layout, trace.layout.layers  # not the trace itself, which keeps `visit`

    def visit(layer: Shown) -> None:
        nonlocal gained, left, read
        left -= 1
        stage = layout.stage(left)
        read = stage.joined(read, joins[left]) if left in joins else read
        more = stage.scatter_keys(layer.gained(stage.asked(read) + stage.asked(gained)))
        if left >= start_layer:
            read, gained = stage.unmoved(read), stage.unmoved(gained) + more

    follow(target, visit)
    return trace.map(gained, start_layer)
