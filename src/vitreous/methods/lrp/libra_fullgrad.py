from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field

from vitreous.methods.common import Baseline, blocks_x_gradients, tokens_x_gradients
from vitreous.methods.lrp.contributions import bias_map, contributions
from vitreous.registry import method
from vitreous.trace.rules.libra import LIBRA
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


def without_bias(options: Mapping[str, Any]) -> bool:
    return not options["bias"]


def graph_of(options: Mapping[str, Any]) -> str:
    return "libra" if without_bias(options) else ""


@method(
    cite="mehri2025libragrad",
    targeted=True,
    signed=True,
    tokens=True,
    blocks=True,
    joins=True,
    several=without_bias,
    graph=graph_of,
    replays=without_bias,
    quick=True,
    tried=[{"baseline": "mean"}],
)
def libra_fullgrad(
    trace: Trace,
    target: Target,
    *,
    bias: Annotated[bool, Field(description="also what the biases of each token contribute, image by image")] = False,
    baseline: Baseline = "zero",
) -> Map:
    """Tokens × gradient at every block, with the Libra gradient, summed over the blocks (FullGrad+); use it for
    faithful evidence for and against a class.

    Σ_l Σ_c h_l ⊙ ∂y/∂h_l, h_l the tokens that enter block l; with `bias` + Σ_b b ⊙ ∂y/∂b, each bias once
    """
    if bias:
        return with_biases(trace, target, baseline)
    return blocks_x_gradients(trace, target, LIBRA, baseline)


def with_biases(trace: Trace, target: Target, baseline: Baseline) -> Map:
    """The same with the contributions of all biases, image by image."""
    if len(trace) == 1:
        parts = contributions(trace, target)
        return tokens_x_gradients(trace, parts.pairs, baseline) + bias_map(trace, parts.added)
    fixed = target.fix(trace.output)
    return torch.cat([with_biases(trace.only(i), fixed.of_image(i), baseline) for i in range(len(trace))])
