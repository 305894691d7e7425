"""The Compare tab: what one target means to several models, and how far their maps agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Annotated, Literal

import numpy as np
import torch
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field

from vitreous._support.words import finite
from vitreous.attribute import attribute
from vitreous.errors import TargetError, Unsupported, one_line
from vitreous.evaluation.diff.measures import Corners, correlation, distance, on_grid, overlap, shares
from vitreous.evaluation.diff.sides import match_classes, match_views
from vitreous.models.labels import names
from vitreous.models.model import Model
from vitreous.registry import Method
from vitreous.trace.apply import class_methods
from vitreous.trace.target import Class, Contrast, Target
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.common import BINARY, Served, numbers
from vitreous.web.engine import Engine, Kept
from vitreous.web.exports import ZIP, Named, archive, name_of
from vitreous.web.problems import Problem
from vitreous.web.targets import heading, resolve, settle

router = APIRouter()
MapQuery = Annotated[str, Query(pattern=schema.HEX)]


# ------------------------------------------------------------------------------------------------ targets across models


class MatchAsked(schema.Asked):
    """A target of the first model; the others are asked for the same."""

    image: schema.ImageId
    models: Annotated[list[schema.ModelName], Field(min_length=1, max_length=16)]
    target: schema.TargetText = "top-1"


class Match(BaseModel):
    model: str
    target: str | None  # as this model writes it; None: it has no such target
    title: str | None
    why: str | None  # why it has none


@router.post("/match")
async def match(engine: Served, asked: MatchAsked) -> list[Match]:
    """What a target of the first model is called in the others: classes are matched by name."""
    served = [engine.find(name) for name in asked.models]
    first = served[0]

    def meant() -> Target:
        trace = engine.trace(first, asked.image)
        return settle(resolve(engine, first, trace, asked.target), trace)

    target = await engine.ask(first, meant)
    return [await matched(engine, first, one, asked.image, target) for one in served]


async def matched(engine: Engine, first: engines.Served, other: engines.Served, image: str, target: Target) -> Match:
    def work() -> Match:
        trace = engine.trace(other, image)
        text = str(target) if other is first else translated(target, first.model, other.model)
        found = settle(resolve(engine, other, trace, text), trace)
        return Match(model=other.name, target=text, title=heading(found, trace), why=None)

    try:
        return await engine.ask(other, work)
    except (TargetError, Problem) as error:
        if isinstance(error, Problem) and error.status_code >= 500:
            raise
        said = str(error.detail) if isinstance(error, Problem) else one_line(error)
        return Match(model=other.name, target=None, title=None, why=said)


def translated(target: Target, one: Model, other: Model) -> str:
    """A target of one model as another one writes it."""
    if isinstance(target, Contrast):
        return f"{translated(target.one, one, other)}-{translated(target.other, one, other)}"
    if type(target) is not Class:
        return str(target)
    known, _ = match_classes(one, other)
    (number,) = target.numbers
    if known is None:
        return str(number)
    if known[number] < 0:
        raise TargetError(f"{other.name} has no class {one.label(number)!r}")
    return str(known[number])


# -------------------------------------------------------------------------------------------------------------- method


class ModelsAsked(schema.Asked):
    models: Annotated[list[schema.ModelName], Field(min_length=1, max_length=16)]


class Suited(BaseModel):
    method: str | None  # None: there is none


@router.post("/compare/method")
async def method(engine: Served, asked: ModelsAsked) -> Suited:
    """The best quick map for a class that works on all of these models, tried on each."""
    served = [engine.find(name) for name in asked.models]
    for declared in class_methods():
        if all([await works(engine, one, declared) for one in served]):
            return Suited(method=declared.name)
    return Suited(method=None)


async def works(engine: Engine, served: engines.Served, declared: Method) -> bool:
    """Whether a model supports a method; tried once."""
    known = engine.tried.get((served.name, declared.name))
    if known is None:

        def attempt() -> bool:
            trace = engine.trace(served, engine.first(served)).fork()
            try:
                attribute(trace, declared, None, declared.check({}), strict=False)
            except (Unsupported, TargetError):
                return False
            return True

        known = await engine.ask(served, attempt)
        engine.tried[served.name, declared.name] = known
    return known


# ----------------------------------------------------------------------------------------------------------- agreement


class AgreementAsked(schema.Asked):
    maps: Annotated[list[schema.MapId], Field(min_length=2, max_length=128)]


class Agreement(BaseModel):
    """How far two maps of one image agree, as `vitreous diff` measures it."""

    one: str
    other: str
    correlation: schema.Number  # Spearman's, over the patches
    overlap: schema.Number  # of the tenths with the highest values, intersection over union
    distance: schema.Number  # the share of the relevance that lies elsewhere, 0 … 1
    grid: tuple[int, int]
    how: str | None  # how maps of different grids or views were brought together
    targets: str | None  # a sentence if the two maps explain different things
    why: str | None  # why there are no figures


@router.post("/agreement")
async def agreement(engine: Served, asked: AgreementAsked) -> list[Agreement]:
    """Every two maps of the same image; maps of different images are not compared."""
    kept = {one: engine.map(one) for one in asked.maps}
    pairs = [(a, b) for a, b in combinations(kept, 2) if kept[a].image == kept[b].image]
    if len(pairs) > engine.limits.pairs:
        raise Problem(422, f"{len(pairs)} pairs of maps are more than {engine.limits.pairs}; compare fewer at a time")
    return await engine.read(lambda: [agreed(engine, kept[a], kept[b]) for a, b in pairs])


def agreed(engine: Engine, a: Kept, b: Kept) -> Agreement:
    ids = {"one": a.meta["id"], "other": b.meta["id"], "targets": different(engine, a, b)}
    try:
        first, second, how = together(engine, a, b)
    except Problem as problem:
        none = {"correlation": None, "overlap": None, "distance": None, "grid": (0, 0), "how": None}
        return Agreement(**ids, **none, why=str(problem.detail))
    return Agreement(
        **ids,
        correlation=finite(correlation(first, second)[0]),
        overlap=finite(overlap(first, second)[0]),
        distance=finite(distance(first, second)[0]),
        grid=(first.shape[-2], first.shape[-1]),
        how=how,
        why=None,
    )


def together(engine: Engine, a: Kept, b: Kept) -> tuple[np.ndarray, np.ndarray, str | None]:
    """Two maps of one image [1 h w] on one grid, and how they came to it, if they had to."""
    if a.image != b.image:
        said = "these maps explain different images: a patch of one has no counterpart in the other"
        raise Problem(422, f"{said}, so there is no difference; choose two maps of one image")
    maps = [one.attribution.map[0].float().numpy()[None] for one in (a, b)]
    models = [engine.find(one.model).model for one in (a, b)]
    boxes, notes = (None, list[str]()) if a.model == b.model else match_views(*models)
    if boxes is None and maps[0].shape == maps[1].shape:
        return maps[0], maps[1], "; ".join(notes) or None
    if maps[0].ndim != 3 or maps[1].ndim != 3:
        raise Problem(422, "maps of videos are compared only if they have the same frames and patches")
    grid = (min(one.shape[1] for one in maps), min(one.shape[2] for one in maps))
    sides: Sequence[Corners | None] = (None, None) if boxes is None else boxes
    first, second = (on_grid(one, grid, box) for one, box in zip(maps, sides))
    sizes = " and ".join(f"{one.shape[1]} × {one.shape[2]}" for one in maps)
    if maps[0].shape != maps[1].shape:
        notes = [f"maps of {sizes} are compared on {grid[0]} × {grid[1]}, by means over its cells", *notes]
    return first, second, "; ".join(notes) or None


def different(engine: Engine, a: Kept, b: Kept) -> str | None:
    """A sentence if two maps explain different things."""
    if a.target is None or b.target is None:
        return None
    one, other = explained(engine, a), explained(engine, b)
    if {*names(one)} & {*names(other)}:
        return None
    return f"the first explains {one}, the second {other}: such maps answer different questions"


def explained(engine: Engine, kept: Kept) -> str:
    if type(kept.target) is Class:
        return engine.find(kept.model).model.label(kept.target.numbers[0])
    return str(kept.target)


# ---------------------------------------------------------------------------------------------------------- difference


@router.get("/difference", response_class=Response, responses=BINARY)
async def difference(
    engine: Served,
    one: MapQuery,
    other: MapQuery,
    of: Annotated[Literal["shares", "values"], Query()] = "shares",
) -> Response:
    """One map minus the other, of the same image; `shares`: each divided by its Σ|·| first, `values`: as they are."""
    a, b = engine.map(one), engine.map(other)

    def work() -> np.ndarray:
        first, second, _ = together(engine, a, b)
        if of == "values":
            return np.asarray(first[0].astype(np.float64) - second[0])
        return np.asarray((shares(first) - shares(second)).reshape(first.shape[1:]))

    values = torch.from_numpy(await engine.read(work)).float()
    return numbers(values, shape=tuple(values.shape), lasting=True)


# -------------------------------------------------------------------------------------------------------------- export


class ComparedAsked(schema.Asked):
    maps: Annotated[list[schema.MapId], Field(min_length=1, max_length=256)]


@router.post("/compare/maps.npz", response_class=Response, responses=ZIP)
async def everything(engine: Served, asked: ComparedAsked) -> Response:
    """Maps of several images and models in one file, named IMAGE/MODEL/METHOD@TARGET, each with its provenance."""
    kept = [engine.map(one) for one in dict.fromkeys(asked.maps)]
    return await engine.draw(lambda: archive(placed(engine, kept), "compare"))


def placed(engine: Engine, kept: Sequence[Kept]) -> list[Named]:
    titles: dict[str, str] = {}
    for one in kept:
        if one.image not in titles:
            titles[one.image] = distinct(engine.name_of(one.image), set(titles.values()))
    found: list[Named] = []
    taken: set[str] = set()
    for one in kept:
        name = distinct(f"{titles[one.image]}/{one.model}/{name_of(one.attribution, one.meta['options'])}", taken)
        taken.add(name)
        found.append((name, one.attribution.map[0].numpy(), one.provenance))
    return found


def distinct(name: str, taken: set[str]) -> str:
    found, number = name, 2
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found
