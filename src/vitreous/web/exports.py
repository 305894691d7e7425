"""What can be taken away: maps with their provenance, figures, and the commands that make them again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from vitreous._support.arrays import npz_bytes, plain
from vitreous._support.marks import identity_of, identity_of_result
from vitreous.attribute import attribute
from vitreous.attribution import Attribution
from vitreous.models.output import Meaning
from vitreous.plot.figure import explanation_figure, png_bytes
from vitreous.registry import METHODS
from vitreous.trace.tokens import one_head, projections, read_by
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views
from vitreous.types import Map
from vitreous.web import schema
from vitreous.web.abilities import heads_of
from vitreous.web.attention import Head, Token, looked, query
from vitreous.web.common import HexPath, ImageQuery, Layer, ModelQuery, Served, best
from vitreous.web.engine import Engine, Kept
from vitreous.web.heads import dots
from vitreous.web.limits import check_options
from vitreous.web.problems import Problem
from vitreous.web.snippet import write
from vitreous.web.targets import expect

router = APIRouter()
ZIP: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": {}}}}
Named = tuple[str, np.ndarray, dict[str, Any]]  # a map's name in the file, the map [*T h w], its provenance


# ----------------------------------------------------------------------------------------------------- maps of the page


@router.post("/maps.npz", response_class=Response, responses=ZIP)
async def several(engine: Served, asked: schema.MapsAsked) -> Response:
    """Maps in one file, as `vitreous explain` writes it: `Attribution.load(file, name)` opens each."""
    kept = [engine.map(one) for one in dict.fromkeys(asked.maps)]
    return await engine.draw(lambda: archive(stored(kept), "maps"))


@router.get("/maps/{map}.npz", response_class=Response, responses=ZIP)
async def single(engine: Served, map: HexPath) -> Response:
    """One map, as `Attribution.save` writes it."""
    kept = engine.map(map)
    return zipped({"map": kept.attribution.map.numpy()}, {"map": kept.provenance}, kept.meta["method"])


def stored(kept: Sequence[Kept]) -> list[Named]:
    """The maps with a name for each: method@target, with the options where a name would occur twice."""
    short = [name_of(one.attribution, {}) for one in kept]
    names = [
        name_of(one.attribution, one.meta["options"]) if short.count(name) > 1 else name
        for one, name in zip(kept, short)
    ]
    return [(name, one.attribution.map[0].numpy(), one.provenance) for one, name in zip(kept, names)]


def name_of(one: Attribution, options: dict[str, Any]) -> str:
    """rollout, gae@282, rollout:discard=0.9"""
    told = ",".join(f"{key}={value}" for key, value in options.items())
    method = f"{one.method}:{told}" if told else one.method
    return method if one.target is None else f"{method}@{one.target}"


def archive(maps: Iterable[Named], title: str) -> Response:
    """A file of several maps, in the format of the command line."""
    found = {name: (values, told) for name, values, told in maps}
    arrays = {name: values for name, (values, _) in found.items()}
    return zipped(arrays, {name: told for name, (_, told) in found.items()}, title)


def zipped(arrays: dict[str, Any], told: dict[str, Any], title: str) -> Response:
    """An .npz file of arrays with the provenance of each."""
    identity = identity_of({name: identity_of_result(one) for name, one in told.items()})
    maps = {name: without_folders(one) for name, one in told.items()}
    written = npz_bytes(arrays, {"identity": identity, "maps": maps})
    headers = {"Content-Disposition": f'attachment; filename="{title}.npz"', "Cache-Control": "no-store"}
    return Response(written, media_type="application/zip", headers=headers)


def without_folders(provenance: dict[str, Any]) -> dict[str, Any]:
    """The same without the folders of this computer, which are not for visitors; hashes tell which files they were."""
    weights = provenance.get("weights") or {}
    files = [{**one, "path": Path(one["path"]).name} for one in weights.get("files", ())]
    sources = [{**one, "path": one.get("path") and Path(one["path"]).name} for one in provenance["sources"]]
    return {**provenance, "weights": {**weights, "files": files}, "sources": sources}


# ------------------------------------------------------------------------------------------------ attention and inside


@router.get("/attention/maps.npz", response_class=Response, responses=ZIP)
async def attentions(
    engine: Served,
    image: ImageQuery,
    model: ModelQuery = None,
    layer: Layer = -1,
    head: Head = "mean",
    token: Token = "readout",
    direction: Annotated[Literal["reads", "read_by"], Query()] = "reads",
    discard: Annotated[float, Query(ge=0, lt=1)] = 0.0,
    heads: Annotated[Literal["mean", "min", "max"], Query()] = "mean",
    residual: Annotated[float, Query(ge=0, le=1)] = 0.5,
) -> Response:
    """All maps of the Attention tab: the chosen one, rollout, and the read-out's attention in every head."""
    views = views_of(engine, model, image)

    def work(trace: Trace) -> Response:
        trace.layer(layer)  # raises if there is no such layer
        shown = [chosen(trace, views, layer % len(trace.attention), head, token, direction)]
        rolled = made(trace, views, "rollout", discard=discard, heads=heads, residual=residual)
        each = [(number, one) for number, count in enumerate(heads_of(trace)) for one in [*range(count), "mean"]]
        all_heads = [made(trace, views, "attention", layer=number, heads=one) for number, one in each]
        return archive([*shown, rolled, *all_heads], "attention")

    return await looked(engine, model, image, work)


@router.get("/inside/maps.npz", response_class=Response, responses=ZIP)
async def insides(
    engine: Served,
    image: ImageQuery,
    model: ModelQuery = None,
    layer: Layer = -1,
    head: Head = "mean",
    token: Token = "readout",
) -> Response:
    """All maps of the Inside tab: query × key, and each layer's attention."""
    views = views_of(engine, model, image)

    def work(trace: Trace) -> Response:
        q, k, scale = projections(trace, one_head(trace.layer(layer), head))
        values = trace.map(dots(q, k, scale, query(trace, token)))
        told = {"layer": layer % len(trace.attention), "head": head, "token": token}
        each = [made(trace, views, "attention", layer=number, heads="mean") for number in range(len(trace.attention))]
        return archive([plainly(trace, views, "query_key", told, values, signed=True), *each], "inside")

    return await looked(engine, model, image, work)


def views_of(engine: Engine, model: str | None, image: str) -> Views:
    served = engine.find(model)
    return engine.views(image, served)


def made(trace: Trace, views: Views, name: str, **options: Any) -> Named:
    """A map of a method that does not depend on a target, named by its options."""
    values = METHODS[name].check(options)
    found = attribute(trace, METHODS[name], None, values, views, strict=False)
    return name_of(found, options), found.map[0].cpu().numpy(), found.provenance


def chosen(trace: Trace, views: Views, layer: int, head: str, token: str, direction: str) -> Named:
    """The large map of the Attention tab."""
    if direction == "read_by":
        seen = one_head(trace.layer(layer), head)
        values = trace.map(read_by(seen, query(trace, token).to(seen.wide))[None])
        return plainly(trace, views, "attended_by", {"layer": layer, "head": head, "token": token}, values)
    one: dict[str, Any] = {"layer": layer, "heads": head if head == "mean" else int(head)}
    if token != "readout":
        query(trace, token)  # raises if there is no such patch
        one["query"] = divmod(int(token), trace.layout.grid[1])
    return made(trace, views, "attention", **one)


def plainly(trace: Trace, views: Views, name: str, options: dict[str, Any], values: Map, signed: bool = False) -> Named:
    """A map that the page shows and that no method makes."""
    box = trace.layout.box(trace.size)
    found = Attribution(values, name, options, (None,), trace.model.name, signed, views=views, box=box)
    return name_of(found, options), values[0].float().cpu().numpy(), found.provenance


class FaithfulnessAsked(schema.OfImage):
    """The maps of the curves, the patches that the eraser removed, and those whose removal turns the decision."""

    maps: Annotated[Sequence[schema.MapId], Field(max_length=48)] = ()
    removed: Annotated[Sequence[Annotated[int, Field(ge=0, le=10**6)]], Field(max_length=20_000)] = ()
    turned: Annotated[Sequence[Annotated[int, Field(ge=0, le=10**6)]], Field(max_length=20_000)] = ()


@router.post("/faithfulness/maps.npz", response_class=Response, responses=ZIP)
async def faithful(engine: Served, asked: FaithfulnessAsked) -> Response:
    """All maps of the Faithfulness tab: those of the curves, and which patches are removed (1) or left (0)."""
    kept = [engine.map(one) for one in dict.fromkeys(asked.maps)]
    views = views_of(engine, asked.model, asked.image)
    trace = await engine.seen(engine.find(asked.model), asked.image)

    def work() -> Response:
        masks = [
            plainly(trace, views, name, {}, marked(trace, patches))
            for name, patches in (("removed", asked.removed), ("counterfactual", asked.turned))
            if patches
        ]
        return archive([*stored(kept), *masks], "faithfulness")

    return await engine.draw(work)


def marked(trace: Trace, patches: Sequence[int]) -> Map:
    """One at these patches, zero elsewhere."""
    if max(patches) >= trace.layout.patches:
        raise Problem(422, f"patch {max(patches)} is out of range: there are patches 0 to {trace.layout.patches - 1}")
    values = torch.zeros(trace.layout.patches)
    values[list(patches)] = 1
    return values.view(1, *trace.layout.grid)


# --------------------------------------------------------------------------------------------------- figures, commands


@router.post("/figure", response_class=Response, responses={200: {"content": {"image/png": {}}}})
async def figure(engine: Served, asked: schema.FigureAsked) -> Response:
    """A figure of these maps: a column for each method, a row for each target."""
    kept = [engine.map(one) for one in dict.fromkeys(asked.maps)]
    if len({(one.model, one.image) for one in kept}) > 1:
        raise Problem(422, "these maps explain several images or models; a figure shows one")
    served, image = engine.find(kept[0].model), kept[0].image
    trace = await engine.seen(served, image)
    views = engine.views(image, served)

    def draw() -> bytes:
        rows, heads = arrange([replace_meta(one, views) for one in kept])
        top = best(served.model, trace.output[0], 5) if trace.classifies else []
        values = served.model.meaning is Meaning.VALUE
        bars = [(one.label, (one.value if values else one.probability) or 0.0) for one in top]
        return png_bytes(explanation_figure(rows, top=bars, rows=heads, cells=asked.cells, values=values))

    drawn = await engine.draw(draw)
    return Response(drawn, media_type="image/png", headers={"Cache-Control": "no-store"})


def replace_meta(kept: Kept, views: Views) -> tuple[dict[str, Any], Attribution]:
    return kept.meta, replace(kept.attribution, views=views)


def arrange(maps: Sequence[tuple[dict[str, Any], Attribution]]) -> tuple[list[list[Attribution | None]], list[str]]:
    """Targets × methods, in the order in which they come; a method without target stands in the first row only."""
    columns = list(dict.fromkeys((a.method, json.dumps(plain(dict(a.options)))) for _, a in maps))
    titles = list(dict.fromkeys(meta["title"] for meta, _ in maps if meta["title"] is not None)) or [""]
    rows: list[list[Attribution | None]] = [[None] * len(columns) for _ in titles]
    for meta, a in maps:
        row = 0 if meta["title"] is None else titles.index(meta["title"])
        rows[row][columns.index((a.method, json.dumps(plain(dict(a.options)))))] = a
    return rows, titles


@router.post("/snippet")
async def snippet(request: Request, engine: Served, asked: schema.ExplainAsked) -> schema.Snippet:
    """Python and a command line that give the same maps."""
    served = engine.find(asked.model)
    for one in asked.methods:
        check_options(METHODS[one.name], one.options)
    await expect(engine, served, asked.image, asked.targets)
    return write(engine, served, asked, alone=request.app.state.alone)
