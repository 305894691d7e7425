"""Models that visitors may add: those that the server was started with `--allow-model` for, and no others."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from vitreous.models.model import Model
from vitreous.models.speaker import heard
from vitreous.web import schema
from vitreous.web.clips import usable
from vitreous.web.common import JOB, Client, Served
from vitreous.web.engine import Allowed, Engine
from vitreous.web.jobs import Job
from vitreous.web.problems import Problem

router = APIRouter()


class ModelAsked(schema.Asked):
    name: Annotated[str, Field(min_length=1, max_length=200, description="one of the models that the server allows")]


@router.post("/models", status_code=202, responses=JOB)
async def add(engine: Served, client: Client, asked: ModelAsked) -> schema.Started:
    """Load a model that the server allows; after the event `done` it is among the models of /api/info."""
    allowed = engine.allowed.get(asked.name)
    if allowed is None:
        names = ", ".join(engine.allowed) or "none; who runs it names them with --allow-model"
        raise Problem(404, f"{asked.name[:60]!r} is not among the models that may be added here: {names}")
    check_room(engine, allowed)

    def work(job: Job) -> None:
        job.report({"what": f"loading {allowed.name}", "done": 0, "total": 1, "seconds_left": None})
        load(engine, allowed)

    first = next(iter(engine.models.values()))
    return schema.Started(job=engine.jobs.start(client, engine.loading, [first.quick], work).id)


def load(engine: Engine, allowed: Allowed) -> None:
    """Load a model and run it once; the thread that loads does one after the other, so none is loaded twice."""
    check_room(engine, allowed)
    if allowed.name not in engine.models:
        publish(engine, usable(heard(allowed.load())), allowed)


def publish(engine: Engine, model: Model, allowed: Allowed) -> None:
    """Add a model under the name by which it was allowed, after its layout run."""
    made = engine.served(allowed.name, model, allowed.source)
    try:
        _ = engine.trace(made, engine.first(made)).classifies
    except BaseException:
        for lane in made.lanes:
            lane.close()
        raise
    engine.models = {**engine.models, made.name: made}


def check_room(engine: Engine, allowed: Allowed) -> None:
    most = engine.limits.models
    if allowed.name not in engine.models and len(engine.models) >= most:
        said = f"this server holds {len(engine.models)} models, and may hold {most}"
        raise Problem(422, f"{said}; use one of {', '.join(engine.models)}")
