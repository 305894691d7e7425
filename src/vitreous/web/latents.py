"""Concepts that were found: dictionaries of latents, named when the server starts. No request names a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from weakref import WeakKeyDictionary

import torch
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel
from torch import Tensor

from vitreous._support.words import finite, plain
from vitreous.errors import OptionError, TargetError, VitreousError, nearest, one_line
from vitreous.models.model import Model
from vitreous.trace.features import patch_features
from vitreous.trace.latent import refuse_latents
from vitreous.trace.latents import ENDING, Latent, Latents
from vitreous.trace.trace import Trace
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.common import BINARY, ImageQuery, ModelQuery, Served, numbers

router = APIRouter()
_SAID: WeakKeyDictionary[Model, dict[str | None, str | None]] = WeakKeyDictionary()
Name = Annotated[str, Query(max_length=200, examples=["photos"])]


class ActiveLatent(BaseModel):
    index: int
    label: str  # "#17", with its name if it has one
    mean: schema.Number  # activation in the image


class LatentsInfo(BaseModel):
    """A dictionary that was named at start."""

    name: str
    layer: int
    kind: str
    count: int
    why: str | None  # why it is none of this model
    active: list[ActiveLatent]  # those that are most active in the image


def load_all(places: Sequence[str | Path]) -> list[Latents]:
    """The latents in these files and folders."""
    for missing in (place for place in map(Path, places) if not place.exists()):
        raise OptionError(f"--latents {missing}: there is no such file or folder")
    files = [
        file
        for place in map(Path, places)
        for file in (sorted(place.glob(f"*{ENDING}")) if place.is_dir() else [place])
    ]
    return [Latents.load(file) for file in dict.fromkeys(files)]


def why_not(latents: Latents | None, model: Model) -> str | None:
    """Why these are no latents of a model, or why it can have none; None if they are. Found out once for each model."""
    said = _SAID.setdefault(model, {})
    key = None if latents is None else latents.digest
    if key not in said:
        said[key] = refusal(latents, model)
    return said[key]


def refusal(latents: Latents | None, model: Model) -> str | None:
    try:
        if latents is not None:
            latents.check(model)
        refuse_latents(model, 0 if latents is None else latents.layer)
    except VitreousError as error:
        return one_line(error)
    return None


def find(engine: engines.Engine, served: engines.Served, name: str) -> Latents:
    """The latents of this name that are those of the model."""
    named = [one for one in engine.latents if plain(one.name) == plain(name)]
    if not named:
        hint = (
            nearest(name, [one.name for one in engine.latents]) or "; name them at start: vitreous serve --latents FILE"
        )
        raise TargetError(f"there are no latents {name[:60]!r} here{hint}")
    refused = [why_not(one, served.model) for one in named]
    if None not in refused:
        raise TargetError(str(refused[0]))
    return named[refused.index(None)]


def parse(engine: engines.Engine, served: engines.Served, text: str) -> Latent:
    """Parse NAME#17."""
    name, _, number = text.rpartition("#")
    if not name.strip() or not number.strip().isdecimal():
        raise TargetError(f"latent:{text[:60]}: write latent:NAME#NUMBER, e.g. latent:pets#17")
    return find(engine, served, name.strip())[int(number)]


def activations(latents: Latents, trace: Trace) -> Tensor:
    """How active each latent is in each patch of an image, [h w K]."""
    placed = patch_features(trace, [latents.layer])[latents.layer][0].float()
    with torch.no_grad():
        return latents.to(placed.new_zeros(0)).encode(placed)


@router.get("/latents")
async def listed(
    engine: Served, image: ImageQuery, model: ModelQuery = None, top: Annotated[int, Query(ge=1, le=64)] = 12
) -> list[LatentsInfo]:
    """The dictionaries named at start; of those of the model, the latents that are most active in the image."""
    served = engine.find(model)

    def work() -> list[LatentsInfo]:
        trace = engine.trace(served, image)
        return [described(one, why_not(one, served.model), trace, top) for one in engine.latents]

    return await engine.ask(served, work)


def described(latents: Latents, why: str | None, trace: Trace, top: int) -> LatentsInfo:
    seen = [] if why is not None else most_active(latents, trace, top)
    return LatentsInfo(
        name=latents.name, layer=latents.layer, kind=latents.kind, count=len(latents), why=why, active=seen
    )


def most_active(latents: Latents, trace: Trace, top: int) -> list[ActiveLatent]:
    means = activations(latents, trace).mean((0, 1))
    best = means.topk(min(top, len(means)))
    return [
        ActiveLatent(index=index, label=latents.label(index), mean=finite(mean))
        for mean, index in zip(best.values.tolist(), best.indices.tolist())
        if mean > 0
    ]


@router.get("/latents/map", response_class=Response, responses=BINARY)
async def activation(
    engine: Served,
    image: ImageQuery,
    name: Name,
    index: Annotated[int, Query(ge=0, le=10**6)],
    model: ModelQuery = None,
) -> Response:
    """How active a latent is in each patch."""
    served = engine.find(model)

    def work() -> Tensor:
        found = find(engine, served, name)
        return activations(found, engine.trace(served, image))[..., found.checked(index)].contiguous()

    values = await engine.ask(served, work)
    return numbers(values, shape=tuple(values.shape))
