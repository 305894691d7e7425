"""The Attention tab: which token attends to which, from the recorded run alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from fastapi import APIRouter, Query
from fastapi.responses import Response
from jaxtyping import Float
from torch import Tensor

from vitreous.attribute import attribute
from vitreous.capture.attention import Attention
from vitreous.errors import OptionError, Unsupported
from vitreous.registry import METHODS
from vitreous.trace.apply import between_all
from vitreous.trace.tokens import (
    one_head,
    one_token,
    prefix_names,
    read_by,
    readout_name,
    reads,
    suffix_names,
    token_names,
)
from vitreous.trace.trace import Trace
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.abilities import heads_of
from vitreous.web.clips import only_images
from vitreous.web.common import BINARY, ImageQuery, Layer, ModelQuery, Served, numbers
from vitreous.web.engine import Engine

router = APIRouter()
Head = Annotated[str, Query(pattern=r"^(mean|\d{1,3})$")]
Token = Annotated[str, Query(pattern=r"^(readout|\d{1,6})$")]


async def looked(
    engine: Engine, model: str | None, image: str, work: Callable[[Trace], Response], tab: str = "attention"
) -> Response:
    """Read something off a recorded run, in a thread that needs no model."""
    trace = await followable(engine, engine.find(model), image, tab)
    return await engine.read(lambda: quietly(work, trace))


def quietly(work: Callable[[Trace], Response], trace: Trace) -> Response:
    with torch.no_grad():
        return work(trace)


async def followable(engine: Engine, served: engines.Served, image: str, tab: str = "attention") -> Trace:
    only_images(served.model, tab)
    trace = await engine.seen(served, image)
    said = between_all(trace.layout, served.name, "this")
    if said is not None:
        raise Unsupported(said)
    return trace


@router.post("/attention")
async def attention(engine: Served, asked: schema.OfImage) -> schema.AttentionInfo:
    """The geometry, and where each layer's read-out looks."""
    trace = await followable(engine, engine.find(asked.model), asked.image)

    def work() -> schema.AttentionInfo:
        layout = trace.layout
        return schema.AttentionInfo(
            layers=len(trace.attention),
            heads=heads_of(trace),
            tokens=layout.tokens,
            grid=layout.grid,
            prefix=prefix_names(layout),
            suffix=suffix_names(layout),
            readout=readout_name(layout),
            share=[share(trace, layer) for layer in trace.attention],
        )

    return await engine.read(work)


def share(trace: Trace, layer: Attention) -> schema.Share:
    row = trace.read_layer(layer).detach().mean(1)[0]  # [M]
    names = token_names(trace.layout)
    special = [i for i, name in names.items() if not name.startswith("register")]
    cls, everything = float(row[special].sum()), float(row.sum())
    registers = float(row[[i for i in names if i not in special]].sum())
    return schema.Share(cls=cls, registers=registers, patches=everything - cls - registers)


@router.get("/attention/thumbs", response_class=Response, responses=BINARY)
async def thumbs(engine: Served, image: ImageQuery, model: ModelQuery = None) -> Response:
    """The read-out's attention in every head, each scaled by its maximum; the maxima come first."""

    def work(trace: Trace) -> Response:
        grid = trace.layout.grid
        rows = torch.cat([trace.read_layer(layer)[0] for layer in trace.attention])  # [ΣH M]
        maps = trace.map(rows)
        top = maps.flatten(1).amax(1)
        scaled = (maps / top.clamp_min(1e-30)[:, None, None] * 255).round().to(torch.uint8)
        return numbers(top, scaled, shape=(len(maps), *grid), lasting=True)

    return await looked(engine, model, image, work)


@router.get("/attention/row", response_class=Response, responses=BINARY)
async def row(
    engine: Served,
    image: ImageQuery,
    model: ModelQuery = None,
    layer: Layer = -1,
    head: Head = "mean",
    token: Token = "readout",
    direction: Annotated[Literal["reads", "read_by"], Query()] = "reads",
) -> Response:
    """What a token reads, or who reads it: a value for each patch, then for each other token."""

    def work(trace: Trace) -> Response:
        seen = one_head(trace.layer(layer), head)
        weights = query(trace, token).to(seen.wide)
        found = reads(seen, weights) if direction == "reads" else read_by(seen, weights)
        extra = found[trace.layout.special]
        return numbers(trace.map(found[None])[0], extra, shape=trace.layout.grid, extra=len(extra), lasting=True)

    return await looked(engine, model, image, work)


def query(trace: Trace, token: str) -> Float[Tensor, "1 N"]:
    """A weight for each token: one for a patch, ρ for the read-out."""
    if token == "readout":
        return trace.readout
    layout, number = trace.layout, int(token)
    if number >= layout.patches:
        raise OptionError(f"patch {number} is out of range: there are patches 0 to {layout.patches - 1}")
    return one_token(trace, layout.patch_tokens[number])


@router.post("/rollout", response_class=Response, responses=BINARY)
async def rollout(engine: Served, asked: schema.RolloutAsked) -> Response:
    """Rollout from the recorded run, quick enough for a slider."""
    trace = await followable(engine, engine.find(asked.model), asked.image)
    method = METHODS["rollout"]
    values = method.check(asked.model_dump(exclude={"model", "image"}))

    def work() -> Response:
        found = attribute(trace, method, None, values).map[0]
        return numbers(found, shape=trace.layout.grid)

    return await engine.read(work)
