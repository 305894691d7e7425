"""The Explain tab: images in, classes and maps out."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response, StreamingResponse

from vitreous._support.arrays import plain
from vitreous._support.words import finite
from vitreous.attribute import attribute
from vitreous.attribution import Attribution
from vitreous.images.pictures import Picture
from vitreous.models.output import Form
from vitreous.plot.colour import is_control, limits
from vitreous.registry import METHODS, Method
from vitreous.trace.apply import is_aimed
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.common import (
    BINARY,
    FOREVER,
    JOB,
    Client,
    HexPath,
    ImagePath,
    ModelQuery,
    Served,
    best,
    numbers,
)
from vitreous.web.engine import Engine, Kept, kept_as, key_of
from vitreous.web.jobs import Cancelled, Job, note
from vitreous.web.limits import check_options
from vitreous.web.problems import Problem, of_error
from vitreous.web.targets import expect, heading, resolve, settle
from vitreous.web.uploads import Part, identity, open_picture, read_form, weight

router = APIRouter()
ONE_FILE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}


@router.post("/images", status_code=201, openapi_extra=ONE_FILE)
async def upload(request: Request, engine: Served) -> schema.Uploaded:
    """Keep an image in memory; the same image has the same id."""
    async with engine.arriving:
        form = await read_form(request, engine.limits.upload_bytes, files=1, fields=8)
        if not form.files:
            raise Problem(422, "the form holds no file")
        (part,) = form.files
        number, picture = await engine.decode(lambda: keep(engine, part))
    wide, high = picture.image.size
    return schema.Uploaded(id=number, name=picture.name, width=wide, height=high, note=picture.note)


def keep(engine: Engine, part: Part) -> tuple[str, Picture]:
    """Decode an image for every number of channels that the models take; one of them must be able to use it."""
    number, kept, problems = identity(part.held), list[Picture](), list[Problem]()
    for count in engine.channels:
        try:
            kept.append(open_picture(part, engine.limits, count))
            engine.images.put(kept_as(number, count), kept[-1], weight(kept[-1]))
        except Problem as problem:
            problems.append(problem)
    if not kept:
        raise problems[0]
    return number, kept[0]


@router.get("/images/{image}/view", responses={200: {"content": {"image/webp": {}}}}, response_class=Response)
async def view(engine: Served, image: ImagePath, model: ModelQuery = None) -> Response:
    """What the model sees of an image."""
    served = engine.find(model)

    def draw() -> bytes:
        seen, buffer = served.model.preprocess.view(engine.picture(image, served).image), io.BytesIO()
        seen.save(buffer, "WEBP", quality=90, method=2)
        return buffer.getvalue()

    return Response(await engine.decode(draw), media_type="image/webp", headers={"Cache-Control": FOREVER})


@router.post("/predict")
async def predict(engine: Served, asked: schema.PredictAsked) -> schema.Prediction:
    """The model's best classes."""
    served = engine.find(asked.model)
    trace = await engine.seen(served, asked.image)
    if not trace.classifies:
        said = f"{served.name} has no classifier: explain a concept, a text or neuron:NUMBER"
        return schema.Prediction(classes=[], why=said)
    seen = trace.crops[0].seen if served.model.form is not Form.VECTOR else None
    return schema.Prediction(classes=best(served.model, trace.output[0], asked.top), seen=seen)


# ---------------------------------------------------------------------------------------------------------------- maps


@router.post("/explain", status_code=202, responses=JOB)
async def explain(engine: Served, client: Client, asked: schema.ExplainAsked) -> schema.Started:
    """Compute maps: every method for every target, one after the other."""
    served = engine.find(asked.model)
    engine.expect(asked.image)
    chosen = [(METHODS[one.name], check_options(METHODS[one.name], one.options)) for one in asked.methods]
    targets = list(dict.fromkeys(map(str, asked.targets)))
    wanted = [
        (method, values, target)
        for number, target in enumerate(targets)
        for method, values in chosen
        if is_aimed(served.model, method) or number == 0
    ]
    if len(wanted) > engine.limits.maps:
        raise Problem(422, f"{len(wanted)} maps are more than {engine.limits.maps}, all that one job may make")
    await expect(engine, served, asked.image, targets)

    def work(job: Job) -> None:
        job.steps = len(wanted)
        trace = engine.trace(served, asked.image).fork()
        for job.step, (method, values, target) in enumerate(wanted, 1):
            job.check()
            job.report({"what": method.name, "done": 0, "total": 1, "seconds_left": None})
            try:
                job.tell("map", one_map(engine, served, asked.image, trace, method, values, target))
            except Cancelled:
                raise
            except Exception as error:
                note(error)
                job.tell("problem", {**of_error(error), "method": method.name, "target": target})

    return schema.Started(job=engine.start(client, served, work).id)


def one_map(
    engine: Engine,
    served: engines.Served,
    image: str,
    trace: Trace,
    method: Method,
    values: dict[str, Any],
    asked: str,
) -> dict[str, Any]:
    """Compute one map, or take it from the store, and describe it as an event."""
    aimed = is_aimed(served.model, method)
    target = settle(resolve(engine, served, trace, asked), trace) if aimed else None
    known = key_of(served.name, image, method.name, sorted(values.items(), key=str), target and target.identity)
    found, cached = engine.maps.get(known), True
    if found is None:
        cached, began = False, time.perf_counter()
        picture = engine.picture(image, served)
        made = attribute(trace, method, target, values, Views([picture], served.model.preprocess))
        seconds = time.perf_counter() - began
        found = remember(engine, known, served, image, trace, made, target, seconds)
    told = schema.MapMeta(**{**found.meta, "target": asked if aimed else None, "cached": cached})
    return told.model_dump(mode="json")


def remember(
    engine: Engine,
    known: str,
    served: engines.Served,
    image: str,
    trace: Trace,
    made: Attribution,
    target: Target | None,
    seconds: float,
) -> Kept:
    method = METHODS[made.method]
    values = made.map[0].cpu()
    defaults = method.check({})
    meta = {
        "id": known,
        "method": made.method,
        "options": {k: plain(v) for k, v in made.options.items() if v != defaults[k]},
        "resolved": made.target,
        "title": None if target is None else heading(target, trace),
        "shape": tuple(values.shape),
        "signed": made.signed,
        "level": method.level,
        "control": is_control(made.method),
        "min": finite(values.min()),
        "max": finite(values.max()),
        "limits": limits(values.numpy(), made.signed, method.level),
        "seconds": round(seconds, 4),
        "notes": notes_of(made),
    }
    slim = replace(made, map=made.map.cpu(), views=None)
    kept = Kept(meta, slim, made.provenance, served.name, image, target)
    engine.maps.put(known, kept, 4 * values.numel() + 4000)
    return kept


def notes_of(made: Attribution) -> dict[str, Any]:
    """A method's notes, where they are short and JSON can hold them."""
    said = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in plain(dict(made.notes)).items()
    }
    short = {name: value for name, value in said.items() if len(str(value)) < 2000}
    try:
        json.dumps(short, allow_nan=False)
    except ValueError:
        return {name: str(value) for name, value in short.items()}
    return short


@router.get(
    "/jobs/{job}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}, 204: {"description": "all of it was heard"}},
)
async def events(
    engine: Served, job: HexPath, last_event_id: Annotated[str | None, Header(max_length=20)] = None
) -> Response:
    """Server-sent events of a job, from its first (or the one after Last-Event-ID) to its last."""
    after = int(last_event_id) if last_event_id and last_event_id.isascii() and last_event_id.isdigit() else 0
    found = engine.jobs.find(job)
    if found.over(after):
        return Response(status_code=204)  # a browser that lost the connection asks no more
    stream = found.stream(after)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.delete("/jobs/{job}", status_code=204, response_class=Response)
async def cancel(engine: Served, job: HexPath) -> Response:
    """End a job within one step."""
    engine.jobs.cancel(engine.jobs.find(job))
    return Response(status_code=204)


@router.get("/maps/{map}", response_class=Response, responses=BINARY)
async def grid(engine: Served, map: HexPath) -> Response:
    """The raw map."""
    values = engine.map(map).attribution.map[0]
    return numbers(values, shape=tuple(values.shape), lasting=True)
