from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches, out_of_memory
from vitreous.capture.attention import widen
from vitreous.capture.capture import ModuleNames
from vitreous.errors import Unsupported
from vitreous.methods.attention.low_rank_variants import Spread, Variants
from vitreous.methods.attention.value_runs import (
    Block,
    Layer,
    Swap,
    again,
    need_blocks,
    record,
    side_by_side,
    wide,
)
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Map, Tokens

CACHE = 5_000_000  # bytes of activations per batch on a CPU; more are slower


@method(cite="mohebbi2023quantifying", attention=True, alone=True, cheap={"layer": -1})
def value_zeroing(
    trace: Trace,
    target: Target,
    *,
    layer: Annotated[
        int | None, Field(description="one layer's own row, from 0, or from the end by -1, -2, …; none: all layers")
    ] = None,
) -> Map:
    """How much the tokens that the classifier reads change when a patch's value vector is set to zero; use it to test
    what attention only suggests.

    C_ij = 1 − cos(x̃_i, x̃_i⁻ʲ), x̃ what leaves the block; ρᵀC⁽ˡ⁾, or ρᵀ Π_l C⁽ˡ⁾ with rows normalised
    """
    need_blocks(trace, "value_zeroing", "norm_attention or rollout")
    numbers = list(range(trace.layout.layers)) if layer is None else [trace.layer_number(layer)]
    rows = [read_image(trace, index, numbers, normalise=layer is None) for index in range(len(trace))]
    return trace.map(torch.stack(rows))


def read_image(trace: Trace, index: int, numbers: list[int], normalise: bool) -> Float[Tensor, "N"]:
    """ρᵀC of one layer of one image, or ρᵀ times the product over several layers."""
    tokens = trace.read_tokens
    whole = len(numbers) > 1 or tokens is None  # whether some layers need all rows
    layers = record(trace, [index], numbers, projections=whole)
    carried = trace.readout[index]  # [N]
    for number in reversed(numbers):
        carried = carried.to(layers[number].attention.wide)
        rows = tokens if tokens is not None else carried.nonzero().flatten().tolist()
        c = value_changes(trace, layers[number], rows)  # [n N]
        if normalise:
            c = c / c.sum(-1, keepdim=True).clamp_min(torch.finfo(c.dtype).tiny)
        carried, tokens = carried[rows] @ c, None
    return carried


def value_changes(trace: Trace, layer: Layer, rows: list[int] | None = None) -> Float[Tensor, "n N"]:
    """C of one layer of one image: all rows, or these."""
    assert layer.block is not None
    count = layer.attention.shape[2]
    if layer.block.entered.shape[1] != count:
        said = f"value_zeroing needs blocks that are given the {count} tokens of their attention, one by one"
        raise Unsupported(f"{said}, and those of {trace.model.name} are not. Try norm_attention or rollout.")
    with again(trace, layer.block) as names:
        runs = Runs(layer, layer.block, names)
        if rows is not None and 2 * len(rows) < count:
            found = runs.by_row(rows)
            if found is not None:
                return found
        whole = runs.by_value()
    return whole if rows is None else whole[rows]


class Runs:
    """Runs of one block of one image with a value set to zero."""

    def __init__(self, layer: Layer, block: Block, names: ModuleNames) -> None:
        self.block, self.names, self.projection, self.call = block, names, layer.projection, layer.attention
        self.v, self.out = (widen(t[0]) for t in (self.call.v, self.call.out))  # [H N d]
        self.tokens = block.entered  # [1 N D]
        self.count = self.tokens.shape[1]
        self.whole = block.out if layer.exact else self.swapped(self.tokens, self.out[None])  # x̃ [1 N D]

    def batches(self, run: Callable[[slice], Tensor], count: int) -> Tensor:
        """Call `run` on slices of 0…count that fit the machine, and concatenate the results."""
        size = 4 * self.tokens.nbytes  # an MLP is four times as wide as the tokens
        device = self.tokens.device
        most = max(1, CACHE // size) if device.type == "cpu" else None
        return torch.cat(in_batches(run, count, batch_size(4 * size, device, most)))

    def swapped(self, tokens: Tokens, heads: Heads) -> Tokens:
        """The output of the block for these input tokens and this attention output."""
        with Swap(self.names, heads):
            return self.block.run(tokens)

    def by_row(self, rows: list[int]) -> Float[Tensor, "n N"] | None:
        """C by rows, if everything after the attention treats each token independently (None if it does not).

        Image r of a batch repeats token i_r; at position j, value j is set to zero.
        """

        def run(part: slice, share: float = 1.0) -> Tensor:
            chosen = rows[part]
            a = self.call.rows(chosen)[0, ..., None] * share  # [H n N 1]
            heads = self.out[:, chosen, None] - a * self.v[:, None]  # [H n N d]
            return self.swapped(self.tokens[0, chosen, None].expand(-1, self.count, -1), heads.transpose(0, 1))

        kept = self.whole[0, rows, None]  # [n 1 D]
        if not alike(run(slice(0, 1), 0.0), kept[:1].expand(-1, self.count, -1)):
            return None
        return self.batches(lambda part: distance(run(part), kept[part]), len(rows))

    def by_value(self) -> Float[Tensor, "N N"]:
        """C by columns: in image j of a batch, value j is set to zero."""
        run = self.projected() or self.replaced
        return self.batches(lambda part: distance(run(part), self.whole), self.count).T

    @cached_property
    def a(self) -> Float[Tensor, "H N M"]:
        return self.call.weights[0]

    def replaced(self, part: slice) -> Tokens:
        """Run the block with O − A_j ⊗ v_j in place of O, for each of these j."""
        a = self.a[:, :, part].permute(2, 0, 1)[..., None]  # [J H N 1]
        v = self.v[:, part].transpose(0, 1)[:, :, None]  # [J H 1 d]
        heads = self.out - a * v
        return self.swapped(self.tokens.expand(len(heads), -1, -1), heads)

    def projected(self) -> Callable[[slice], Tokens] | None:
        """The same, changed after the output projection, so that everything before it runs for one image only.

        o_i⁻ʲ = o_i − Σ_h A^h_ij W_O^h v_j^h
        """
        projection = self.projection
        if projection is None or projection.weight is None:
            return None
        weight = projection.weight
        o = F.linear(side_by_side(self.out[None]), widen(weight), wide(projection.bias))  # [1 N D]
        a = self.a.permute(2, 1, 0).contiguous()  # [N N H]: by key
        u = projection.by_head(self.v.transpose(0, 1))  # [N H D]

        memory: list[Tensor] = []

        def run(part: slice) -> Tokens:
            with Spread(weight, Variants(o, a[part], u[part]), memory):
                return self.block.run(self.tokens)

        heaviest = int((self.a.sum(1) * self.v.norm(dim=-1)).sum(0)[1:].argmax())
        trial = slice(heaviest, heaviest + 2)
        try:
            return run if alike(run(trial), self.replaced(trial)) else None
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            return None  # the rest of the block does not accept more images than before


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 200 * torch.finfo(b.dtype).eps * b.abs().max())


def distance(a: Tokens, b: Tensor) -> Float[Tensor, "B N"]:
    """1 − cos as ½|u − v|² of unit vectors, which avoids cancellation."""
    u, v = (x / x.norm(dim=-1, keepdim=True) for x in (a, b))
    apart: Tensor = (u - v).norm(dim=-1)
    return apart.square() / 2
