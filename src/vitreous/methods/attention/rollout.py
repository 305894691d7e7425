from __future__ import annotations

from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention, widen
from vitreous.capture.attention_backward import joined, step
from vitreous.errors import OptionError
from vitreous.methods.attention.heads import fuse_heads
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Map, Row


@method(cite="abnar2020quantifying", attention=True)
def rollout(
    trace: Trace,
    target: Target,
    *,
    heads: Annotated[Literal["mean", "min", "max"], Field(description="how the heads of a layer become one")] = "mean",
    discard: Annotated[
        float, Field(ge=0, lt=1, description="share of each layer's smallest attentions that is set to zero")
    ] = 0.0,
    residual: Annotated[float, Field(ge=0, le=1, description="weight of the skip connection")] = 0.5,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
) -> Map:
    """How much of each patch reaches, through every layer, the tokens that the head reads.

    ρᵀ Π_l (r·I + (1−r)·Ā⁽ˡ⁾), rows normalised; the row vector is carried from the last layer to the first
    """
    formed = Formed(heads)
    layers = trace.formed(formed)
    check_start(trace, start_layer)
    carried: Row = trace.readout.to(layers[-1].wide)  # [B N]
    rows = trace.read_tokens  # only these rows of the last layer are ever read
    for number, layer in reversed(list(enumerate(layers))[start_layer:]):
        a = formed.maps[number] if number < len(formed.maps) else None
        if discard > 0:
            a = whole(layer, heads) if a is None else a
            carried = step(carried, trim(a, discard, trace.layout.readout), residual)
        elif heads == "mean":  # rows of a mean of softmaxes already sum to one
            moved = layer.read(carried, rows).mean(1) if a is None else (carried[:, None] @ a)[:, 0]
            carried = residual * carried + (1 - residual) * moved
        else:
            carried = sum_steps(carried, layer, heads, residual) if a is None else step(carried, a, residual)
        rows = None
    return trace.map(carried)


class Formed:
    """Ā of each layer, kept while the model runs: A is formed once, for O and for the rollout."""

    def __init__(self, heads: str) -> None:
        self.heads = heads
        self.maps: list[Float[Tensor, "B N M"]] = []

    def __call__(self, call: Attention) -> Heads:
        outs, maps = [], []
        with torch.autocast(call.v.device.type, enabled=False):
            for _, part in call.pieces():
                a = part.weights
                outs.append(a @ widen(part.v))
                maps.append(fuse_heads(a, self.heads))
        self.maps.append(torch.cat(maps))
        return torch.cat(outs).to(call.v.dtype)


def check_start(trace: Trace, start_layer: int) -> None:
    last = trace.layout.layers - 1
    if start_layer > last >= 0:
        raise OptionError(f"start_layer={start_layer} is out of range: {trace.model.name} has layers 0 to {last}")


def sum_steps(carried: Row, layer: Attention, heads: str, residual: float) -> Row:
    """`step` over all rows, a few hundred of a few images at a time."""
    return joined(
        (images, step(carried[images], fuse_heads(a, heads), residual, rows))
        for images, part in layer.pieces()
        for rows, a in part.chunks()
    )


def whole(layer: Attention, heads: str) -> Float[Tensor, "B N M"]:
    """Ā: all rows of a layer, heads fused."""
    return torch.cat([fuse_heads(a, heads) for _, a in layer.chunks()], 1)


def trim(a: Float[Tensor, "B N M"], discard: float, keep: tuple[int, ...]) -> Float[Tensor, "B N M"]:
    """Zero the smallest share of each image's entries, but never a read-out token's attention to itself."""
    drop = int(a[0].numel() * discard)
    if drop == 0:
        return a
    limit = a.flatten(1).kthvalue(drop).values  # [B]
    trimmed = a.masked_fill(a <= limit[:, None, None], 0)
    own = list(keep)
    trimmed[:, own, own] = a[:, own, own]
    return trimmed
