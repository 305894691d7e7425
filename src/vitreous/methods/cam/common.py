"""Class activation maps of tokens: where tokens and gradients are taken, and how a map is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.errors import OptionError
from vitreous.methods.common import Baseline, GradientRules, less_baseline, sum_layers, table_of
from vitreous.trace.ruled import Pair, entering_blocks, entry_grad_ruled, ruled, token_grads
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

Layer = Annotated[int, Field(description="layer from 0, or from the end by -1, -2, …")]
At = Annotated[
    Literal["block", "norm"],
    Field(description="the tokens that enter the block (weights over all of them), or its attention (over patches)"),
]
Layers = Annotated[Literal["one", "all"], Field(description="this layer, or the sum over all (at=block only)")]
Weigh = Callable[[Tensor, Tensor], Tensor]  # tokens and their gradients, [B … D], to one weight per channel, [B D]


def graph_at(options: Mapping[str, Any]) -> str:
    """The forward pass of these options: the model's own, or that under rules in which every block is noted."""
    if options["rules"] == "libra":
        return "libra" if options["at"] == "block" else ""
    return "model" if options["at"] == "norm" and options["layer"] == -1 else ""


@dataclass(frozen=True)
class Place:
    """The tokens of which a map is made."""

    layer: int
    at: At
    layers: Layers
    rules: GradientRules


def tokens_at(trace: Trace, target: Target, place: Place) -> list[Pair]:
    """The tokens at a place and their gradients, [B N D] (or [B h w D]): of one layer, or of all."""
    table, number = table_of(place.rules), trace.layer_number(place.layer)
    if place.at == "block":
        found = ruled(trace, table)
        streams = entering_blocks(trace, found)
        return token_grads(trace, found, target, streams if place.layers == "all" else (streams[number],))
    if place.layers == "all":
        raise OptionError("layers=all works with at=block only: at=norm, every layer needs a forward pass of its own")
    if table is None:
        return [trace.entry_grad(target, number)]
    return [entry_grad_ruled(trace, table, target, number)]


def cam(trace: Trace, target: Target, place: Place, weigh: Weigh, baseline: Baseline) -> Map:
    """Σ_k w_k·(T_k − baseline) of every patch, summed over the layers."""
    maps = []
    for tokens, grad in tokens_at(trace, target, place):
        patches = trace.to_patches(less_baseline(trace, tokens, baseline))
        if place.at == "norm":
            tokens, grad = trace.to_patches(tokens), trace.to_patches(grad)
        maps.append(torch.einsum("b...d,bd->b...", patches, weigh(tokens, grad)))
    return sum_layers(trace, maps)


def over_tokens(values: Tensor) -> tuple[int, ...]:
    """The axes of the tokens: of [B N D] or [B h w D]."""
    return tuple(range(1, values.ndim - 1))
