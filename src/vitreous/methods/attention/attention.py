from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.errors import OptionError
from vitreous.methods.common import fuse_heads
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map, Row


@method(cite="dosovitskiy2021image", attention=True, replays=True, quick=True, default=5, tried=[{"across": "mean"}])
def attention(
    trace: Trace,
    target: Target,
    *,
    layer: Annotated[int, Field(description="layer from 0, or from the end by -1, -2, …")] = -1,
    heads: Annotated[
        Literal["mean", "max", "min"] | int,
        Field(description="how the attention heads become one, or one head's number"),
    ] = "mean",
    across: Annotated[
        Literal["none", "mean", "min", "max"], Field(description="over all layers, in place of one layer")
    ] = "none",
    query: Annotated[
        Literal["read-out"] | tuple[int, int],
        Field(description="whose attention: the tokens that the classifier reads, or the patch (row, column)"),
    ] = "read-out",
) -> Map:
    """How much the tokens that the classifier reads attend to each patch, in one layer or over all; a first look, the
    same for every class.

    ρᵀA⁽ˡ⁾ₕ
    """
    chosen = [trace.layer(layer)] if across == "none" else trace.attention
    rows: list[Row] = []
    for one in chosen:
        if query == "read-out":
            read = trace.read_layer(one)  # [B H M]
        else:
            read = one.rows([patch_token(trace, query)])[:, :, 0]  # [B H M]
        rows.append(fuse_heads(read, heads))
    return trace.map(over_layers(torch.stack(rows), across))


def patch_token(trace: Trace, query: tuple[int, int]) -> int:
    """The token of the patch at (row, column)."""
    (h, w), (row, column) = trace.layout.grid, query
    if not (0 <= row < h and 0 <= column < w):
        raise OptionError(f"query={row},{column} is out of range: the grid has {h} rows and {w} columns of patches")
    return trace.layout.token(row, column)


def over_layers(rows: Tensor, across: str) -> Row:
    """Reduce [L B M] to [B M]."""
    if across == "max":
        return rows.amax(0)
    if across == "min":
        return rows.amin(0)
    return rows.mean(0)
