from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention, widen
from vitreous.capture.few_images import OneImage, attend, few_images, keeps, one_by_one
from vitreous.capture.shown import joined, split, step
from vitreous.methods.common import (
    check_start,
    fuse_heads,
    keeps_all,
    need_positive_rows,
    repeated_step,
    trim,
    trim_slots,
    whole,
)
from vitreous.methods.decoded import read_through
from vitreous.models.stages import Behind, Places, Stage
from vitreous.registry import method
from vitreous.trace.big import backwards
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Keys, Map, Row, Weights


@method(
    cite="abnar2020quantifying",
    attention=True,
    joins=True,
    stages=True,
    decodes=True,
    replays=keeps_all,
    quick=True,
    tried=[{"discard": 0.9}, {"heads": "max"}],
)
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
    """How much of each patch reaches, through all layers, the tokens that the classifier reads; the usual attention
    map, the same for every class.

    ρᵀ Π_l (r·I + (1−r)·Ā⁽ˡ⁾), rows normalised; the row vector is carried from the last layer to the first; of a decoder
    (DETR), first from the query through the decoder's layers to the tokens of the encoder
    """
    check_start(trace, start_layer)
    formed = Formed(heads)
    layers = from_last(trace, formed)
    through = trace.layout.decoder is not None
    carried: Row = read_through(trace, heads, discard, residual) if through else trace.readout  # [B N]
    joins = trace.joins
    rows = trace.read_tokens  # only these rows of the last layer are used
    for number, layer in layers:
        if number < start_layer:
            break
        need_positive_rows(trace, "rollout", layer, heads, residual)
        carried = carried.to(layer.wide)
        stage = trace.layout.stage(number)
        carried = stage.joined(carried, joins[number].to(carried)) if number in joins else carried
        if trace.layout.stages:
            carried = staged_step(carried, stage, layer, heads, discard, residual, trace.layout.reads_special)
        elif discard > 0:
            a = formed.fused(number)
            a = whole(layer, heads) if a is None else a
            carried = step(carried, trim(a, discard, trace.layout.readout), residual)
        elif heads == "mean" and not layer.mixed:  # rows of a mean of softmaxes already sum to one
            moved = formed.read(number, carried)
            moved = layer.read(carried, rows).mean(1) if moved is None else moved
            carried = residual * carried + (1 - residual) * moved
        else:
            a = formed.fused(number)
            carried = sum_steps(carried, layer, heads, residual) if a is None else step(carried, a, residual)
        rows = None
    return trace.map(carried, start_layer)


def from_last(trace: Trace, formed: Formed) -> Iterator[tuple[int, Attention]]:
    """Every layer with its number, last to first; those of a big model are not kept."""
    return backwards(trace) or reversed(list(enumerate(trace.formed(formed))))


def staged_step(
    carried: Behind, stage: Stage, layer: Attention, heads: str, discard: float, residual: float, special: bool
) -> Places:
    """One factor of the product where tokens attend in windows or over pooled keys.

    `special`: only special tokens are read, so only their attention to themselves is never discarded.
    """
    row = stage.gather(carried)  # [B·W n]
    real = stage.key_mask(row)
    if heads == "mean" and discard == 0 and real is None and not layer.mixed:
        return stage.onward(carried, residual * row, (1 - residual) * layer.read(row).mean(1))
    if stage.repeats:
        a = whole(layer, heads)
        a = a if discard == 0 else trim_slots(a, discard, stage, stage.own(special, carried.device))
        return repeated_step(carried, stage, a / stage.copies(carried)[:, :, None], residual)
    if discard == 0:
        return stage.onward(carried, *split(row, fused(layer, heads), residual, real))
    a = trim_slots(whole(layer, heads), discard, stage, stage.own(special, carried.device))
    return stage.onward(carried, *split(row, [(slice(None), slice(None), a)], residual, real))


def fused(layer: Attention, heads: str) -> Iterator[tuple[slice, slice | list[int], Tensor]]:
    """Ā, a few hundred rows of a few windows at a time."""
    return ((images, rows, fuse_heads(a, heads)) for images, part in layer.pieces() for rows, a in part.chunks())


class Formed:
    """Keeps A of each layer while the model runs, so that it is formed once for both O and the rollout.

    Of a larger A, only Ā is kept.
    """

    def __init__(self, heads: str) -> None:
        self.heads = heads
        self.kept: list[Weights | Float[Tensor, "B N M"]] = []

    def __call__(self, call: Attention) -> Heads:
        q, k = call.q, call.k
        if q is not None and k is not None and call.bias is None and keeps(q, k):
            a, out = attend(q, k, call.v, call.scale)
            self.kept.append(a)
            return out
        if q is not None and k is not None and one_by_one(q, k):
            return self.each(OneImage(q, k, call.scale, call.bias), call.v)
        outs, maps = [], []
        with torch.autocast(call.v.device.type, enabled=False):
            for _, part in call.pieces():
                a = part.weights
                outs.append(a @ widen(part.v))
                maps.append(fuse_heads(a, self.heads))
        self.kept.append(torch.cat(maps))
        return torch.cat(outs).to(call.v.dtype)

    def each(self, memory: OneImage, v: Keys) -> Heads:
        """The same one image at a time; O is laid out as the model reads it, [B N H d]."""
        b, h, _, width = v.shape
        n, m = memory.a.shape[1:]
        out, maps = v.new_empty(b, n, h, width).transpose(1, 2), v.new_empty(b, n, m)
        for part in few_images(b, alone=True):
            a = memory.weights(part)
            out[part].copy_(a @ v[part])
            maps[part].copy_(fuse_heads(a, self.heads))
        self.kept.append(maps)
        return out

    def fused(self, number: int) -> Float[Tensor, "B N M"] | None:
        """Ā of a layer; None if it was not kept."""
        a = self.kept[number] if number < len(self.kept) else None
        return fuse_heads(a, self.heads) if a is not None and a.ndim == 4 else a

    def read(self, number: int, carried: Row) -> Row | None:
        """Σᵢ carriedᵢ·Āᵢ, where Ā is the mean; None if it was not kept."""
        if number >= len(self.kept):
            return None
        a = self.kept[number]
        return (carried[:, None, None] @ a).mean((1, 2)) if a.ndim == 4 else (carried[:, None] @ a)[:, 0]


def sum_steps(carried: Row, layer: Attention, heads: str, residual: float) -> Row:
    """Apply `step` to all rows, a few hundred rows of a few images at a time."""
    return joined((images, step(carried[images], a, residual, rows)) for images, rows, a in fused(layer, heads))
