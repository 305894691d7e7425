"""The Explain tab: images in, classes and maps out."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response, StreamingResponse
from torch import Tensor

from vitreous._support.arrays import plain
from vitreous._support.words import finite
from vitreous.attribute import attribute
from vitreous.attribution import Attribution
from vitreous.models.output import Form
from vitreous.plot.colour import is_control, limits
from vitreous.registry import METHODS, Method
from vitreous.trace.apply import is_aimed
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.arrivals import keep
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
from vitreous.web.engine import Engine, Kept, key_of
from vitreous.web.films import Frame, seen_frame
from vitreous.web.jobs import Cancelled, Job, note
from vitreous.web.limits import check_options
from vitreous.web.problems import Problem, of_error
from vitreous.web.regions import places_of
from vitreous.web.targets import expect, heading, resolve, settle
from vitreous.web.uploads import read_form

router = APIRouter()
BRIEF = 16  # maps of a job that does not wait behind long ones
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
        return await engine.decode(lambda: keep(engine, part))


@router.get("/images/{image}/view", responses={200: {"content": {"image/webp": {}}}}, response_class=Response)
async def view(engine: Served, image: ImagePath, model: ModelQuery = None, frame: Frame = None) -> Response:
    """What the model sees of an image; of a clip, one of the frames that it takes, the middle one by default."""
    served = engine.find(model)

    def draw() -> bytes:
        still = served.model.frames is not None and image in engine.packaged  # an example of a concept, as a frame
        shown = engine.picture(image).image if still else None
        seen = seen_frame(engine.views(image, served), frame) if shown is None else served.model.preprocess.view(shown)
        buffer = io.BytesIO()
        seen.save(buffer, "WEBP", quality=90, method=2)
        return buffer.getvalue()

    return Response(await engine.decode(draw), media_type="image/webp", headers={"Cache-Control": FOREVER})


@router.post("/predict")
async def predict(engine: Served, asked: schema.PredictAsked) -> schema.Prediction:
    """The model's best classes."""
    served = engine.find(asked.model)
    trace = await engine.seen(served, asked.image)
    seen = trace.crops[0].seen if served.model.form is not Form.VECTOR else None
    if served.model.form is Form.WORDS:
        said = f"{served.name.partition('?')[0]} answers questions in words: ask one"
        return schema.Prediction(classes=[], why=said, seen=seen)
    if not trace.classifies:
        said = f"{served.name} has no classifier: explain a concept, a text or neuron:NUMBER"
        return schema.Prediction(classes=[], why=said)
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
        trace = engine.trace(served, asked.image).fork()
        for method, values, target in job.each(wanted):
            job.report({"what": method.name, "done": 0, "total": 1, "seconds_left": None})
            try:
                job.tell("map", one_map(engine, served, asked.image, trace, method, values, target))
            except Cancelled:
                raise
            except Exception as error:
                note(error)
                job.tell("problem", {**of_error(error), "method": method.name, "target": target})

    brief = len(wanted) <= BRIEF and all(is_brief(method, values) for method, values in chosen)
    return schema.Started(job=engine.start(client, served, work, brief).id)


def is_brief(method: Method, values: dict[str, Any]) -> bool:
    """Whether a map takes a run or two: of some attention, or of one gradient."""
    once = method.can_replay(values) or method.takes_several(values)
    return once and not method.costly and not method.alone


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
        made = attribute(trace, method, target, values, engine.views(image, served))
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
        "times": made.times or each_frame(values),
        "signed": made.signed,
        "level": method.level,
        "control": is_control(made.method),
        "min": finite(values.min()),
        "max": finite(values.max()),
        "limits": limits(values.numpy(), made.signed, method.level),
        "seconds": round(seconds, 4),
        "notes": notes_of(made),
        "places": places_of(target, trace),
    }
    slim = replace(made, map=made.map.cpu(), views=None)
    kept = Kept(meta, slim, made.provenance, served.name, image, target)
    engine.maps.put(known, kept, 4 * values.numel() + 4000)
    return kept


def each_frame(values: Tensor) -> tuple[tuple[int, int], ...]:
    """The frames of a map that has a value for each pixel of a clip; of an image, none."""
    return tuple((frame, frame + 1) for frame in range(len(values))) if values.ndim == 3 else ()


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
