from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from vitreous._support.precision import widest
from vitreous.capture.attention import sum_of, widen
from vitreous.capture.shown import split, step
from vitreous.errors import Unsupported
from vitreous.methods.attention.attention import read_behind
from vitreous.methods.attention.value_runs import Layer, Projection, need_blocks, record
from vitreous.methods.common import repeated_step
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Keys, Map, Row, Weights


@method(cite="kobayashi2020attention", attention=True, stages=True)
def norm_attention(
    trace: Trace,
    target: Target,
    *,
    residual: Annotated[bool, Field(description="with each token itself in what it takes from itself (2021)")] = False,
    layer: Annotated[
        int | None, Field(description="one layer's own row, from 0, or from the end by -1, -2, …; none: all layers")
    ] = None,
) -> Map:
    """Attention weighted by the norms of the value vectors that it moves; use it where large attention may carry
    little, as on sink tokens.

    S_ij = ‖Σ_h A^h_ij W_O^h v_j^h‖, with `residual` ‖… + δ_ij x_i‖, x what enters the block; ρᵀS⁽ˡ⁾, or, rows
    normalised, ρᵀ Π_l (S⁽ˡ⁾ + I)/2, with `residual` ρᵀ Π_l S⁽ˡ⁾
    """
    numbers = list(range(trace.layout.layers)) if layer is None else [trace.layer_number(layer)]
    if residual and trace.layout.stages:
        said = f"{trace.model.name} {trace.layout.obstacle}. Try norm_attention without it, or rollout."
        raise Unsupported(f"norm_attention with residual needs attention between all tokens; {said}")
    if residual:
        need_blocks(trace, "norm_attention with residual", "norm_attention without it, or rollout")
    layers = record(trace, range(len(trace)), numbers if residual else None)
    carried: Row = trace.readout.to(layers[numbers[0]].attention.wide)  # [B N]
    tokens = trace.read_tokens
    if trace.layout.stages:
        return staged(trace, layers, numbers, layer is None)
    for number in reversed(numbers):
        moved = torch.zeros_like(carried)
        for rows, s in norms(trace, layers[number], residual, tokens):
            if layer is None:
                s = s / s.sum(-1, keepdim=True).clamp_min(1e-30)
                moved += step(carried, s, 0.0 if residual else 0.5, rows)
            else:
                moved += torch.einsum("bn,bnm->bm", carried[:, rows], s)
        carried, tokens = moved, None
    return trace.map(carried)


def staged(trace: Trace, layers: dict[int, Layer], numbers: list[int], product: bool) -> Map:
    """The same where tokens attend in windows or over pooled keys: a product of layers, or one layer's own row."""
    carried = read_behind(trace, numbers[-1]).to(layers[numbers[-1]].attention.wide)
    for number in reversed(numbers):
        stage = trace.layout.stage(number)
        row = stage.gather(carried)
        real = stage.key_mask(row)
        parts = ((slice(None), rows, s) for rows, s in norms(trace, layers[number], False))
        if stage.repeats and product:
            s = torch.cat([s for _, _, s in parts], 1) / stage.copies(carried)[:, :, None]
            sums = stage.asked(stage.scatter_queries(s.sum(-1)))
            carried = repeated_step(carried, stage, s / sums.clamp_min(1e-30)[:, :, None], 0.5)
        elif product:
            carried = stage.onward(carried, *split(row, normalised(parts, real), 0.5, real))
        else:
            carried = stage.scatter_keys(sum_of(torch.einsum("bn,bnm->bm", row[:, rows], s) for _, rows, s in parts))
    return trace.map(carried, numbers[0])


def normalised(
    parts: Iterable[tuple[slice, slice | list[int], Tensor]], real: Bool[Tensor, "B M"] | None
) -> Iterator[tuple[slice, slice | list[int], Tensor]]:
    """Rows of S that sum to one over the keys that are tokens."""
    for images, rows, s in parts:
        s = s if real is None else s * real[images, None]
        yield images, rows, s / s.sum(-1, keepdim=True).clamp_min(1e-30)


def norms(
    trace: Trace, layer: Layer, residual: bool, tokens: list[int] | None = None
) -> Iterator[tuple[slice | list[int], Float[Tensor, "B n M"]]]:
    """Rows of S: of all tokens, or of these."""
    call, projection = layer.attention, layer.projection
    if projection is None:
        raise Unsupported(
            f"norm_attention needs an output projection directly after the attention; {call.name or trace.model.name} "
            f"has another operation in between (a norm, a gate). "
            f"Try {'rollout' if trace.layout.stages else 'value_zeroing or rollout'}."
        )
    products = gram(projection, call.v)
    for rows, a in call.chunks(tokens):
        s = lengths(a, products)
        if residual:
            assert layer.block is not None
            i = torch.arange(call.shape[2], device=a.device)[rows]
            n = torch.arange(len(i), device=a.device)
            own = a[:, :, n, i, None] * widen(call.v)[:, :, i]  # [B H n d]
            s[:, n, i] = (projection(own.transpose(1, 2).flatten(2)) + layer.block.entered[:, i]).norm(dim=-1)
        yield rows, s


def gram(projection: Projection, values: Keys) -> Float[Tensor, "B M H H"]:
    """⟨W_O^h v_j^h, W_O^h′ v_j^h′⟩ of every two heads, in double precision, since heads may cancel."""
    h, d = values.shape[1], values.shape[3]
    v = values.to(widest(values.device))
    between = projection(torch.eye(h * d, dtype=v.dtype, device=v.device))  # [H·d D]
    between = (between @ between.mT).reshape(h, d, h, d)
    return torch.stack([torch.einsum("bmx,xhy,bhmy->bmh", v[:, i], between[i], v) for i in range(h)], 2)


def lengths(a: Weights, products: Float[Tensor, "B M H H"]) -> Float[Tensor, "B n M"]:
    """‖Σ_h A^h_ij W_O^h v_j^h‖ from the inner products alone: no vector is formed for a pair of tokens."""
    found = []
    for one, product in zip(a, products):
        by_key = one.permute(2, 1, 0).to(product)  # [M n H]
        found.append((by_key @ product).mul_(by_key).sum(-1).clamp_min_(0).sqrt_().mT)
    return torch.stack(found).to(a.dtype)
