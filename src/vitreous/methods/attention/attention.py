from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.errors import OptionError
from vitreous.methods.common import fuse_heads
from vitreous.methods.decoded import cross_rows
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map, Row


@method(
    cite="dosovitskiy2021image",
    attention=True,
    stages=True,
    decodes=True,
    replays=True,
    quick=True,
    default=5,
    tried=[{"across": "mean"}],
)
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
        Literal["read-out"] | tuple[int, int] | tuple[int, int, int],
        Field(
            description="whose attention: the tokens that the classifier reads, or the patch (row, column); of a "
            "video, the tubelet (time, row, column)"
        ),
    ] = "read-out",
) -> Map:
    """How much the tokens that the classifier reads attend to each patch, in one layer or over all; a first look, the
    same for every class.

    ρᵀA⁽ˡ⁾ₕ; of a decoder (DETR), what the query reads of the encoder's tokens in layer l of the decoder
    """
    if trace.layout.decoder is not None and query == "read-out":
        reads = cross_rows(trace, None if across != "none" else layer)
        return trace.map(over_layers(torch.stack([fuse_heads(read, heads) for read in reads]), across))
    last = trace.layer_number(layer)
    chosen = {last: trace.layer(layer)} if across == "none" else dict(enumerate(trace.attention))
    if trace.layout.stages:
        maps = [staged_map(trace, number, one, heads, query) for number, one in chosen.items()]
        return over_layers(torch.stack(maps), across)
    rows: list[Row] = []
    for one in chosen.values():
        if query == "read-out":
            read = trace.read_layer(one)  # [B H M]
        else:
            read = one.rows([patch_token(trace, query)])[:, :, 0]  # [B H M]
        rows.append(fuse_heads(read, heads))
    return trace.map(over_layers(torch.stack(rows), across))


def staged_map(trace: Trace, number: int, layer: Attention, heads: str | int, query: str | tuple[int, ...]) -> Map:
    """The map of one layer that attends in windows or over pooled keys, on the finest grid."""
    stage = trace.layout.stage(number)
    if not bool((stage.keys.place >= stage.special).any()):
        able = [i for i, one in enumerate(trace.layout.stages) if bool((one.keys.place >= one.special).any())]
        said = f"layer {number} of {trace.model.name} attends to no patch that the map shows"
        raise OptionError(f"{said}; the last that does is layer={able[-1]}")
    if isinstance(query, str):
        row = stage.gather(read_behind(trace, number))
    else:
        patch_token(trace, query)  # in range
        cell = sum(query[:-2]) * trace.layout.grid[0] + query[-2], query[-1]
        row = stage.queries.gather(stage.at(cell, trace.layout.lattice).to(trace.readout).expand(len(trace), -1))
    read = fuse_heads(layer.read(row.to(layer.wide)), heads)  # [B·W M]
    return trace.map(stage.scatter_keys(read), number)


def read_behind(trace: Trace, number: int) -> Row:
    """ρ as the weights of the places behind a layer: the tokens that were merged into one share what it has."""
    carried = trace.readout
    for later in reversed(range(number + 1, trace.layout.layers)):
        carried = trace.layout.stage(later).unmoved(carried)
    return carried


def patch_token(trace: Trace, query: tuple[int, ...]) -> int:
    """The token of the patch at (row, column), or of the tubelet at (time, row, column)."""
    cells, said = trace.layout.cells, f"query={','.join(map(str, query))}"
    axes = ("times", "rows", "columns")[-len(cells) :]
    *others, last = [f"{count} {axis}" for count, axis in zip(cells, axes)]
    there = f"{', '.join(others)} and {last}"
    if len(query) != len(cells):
        raise OptionError(f"{said}: give {len(cells)} numbers, one for each axis of the grid ({there})")
    if not all(0 <= place < count for place, count in zip(query, cells)):
        raise OptionError(f"{said} is out of range: the grid has {there} of patches")
    return trace.layout.token(*query)


def over_layers(rows: Tensor, across: str) -> Tensor:
    """Reduce [L B …] to [B …]."""
    if across == "max":
        return rows.amax(0)
    if across == "min":
        return rows.amin(0)
    return rows.mean(0)
