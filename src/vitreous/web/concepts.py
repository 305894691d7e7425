"""The Concepts tab: a few examples become a direction; only numbers are kept, in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from vitreous.models.fingerprint import fingerprint
from vitreous.models.model import Model
from vitreous.trace.concept import SIMILARITIES, Concept, embeddings
from vitreous.web import engine as engines
from vitreous.web import ids, schema
from vitreous.web.clips import only_images
from vitreous.web.common import HexPath, Served
from vitreous.web.engine import Held
from vitreous.web.limits import Limits
from vitreous.web.problems import Problem
from vitreous.web.uploads import Form, Part, open_picture, read_form

router = APIRouter()
NAME = r"[^\W_][\w .-]{0,39}"
EXAMPLES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "files"],
                    "properties": {
                        "name": {"type": "string"},
                        "model": {"type": "string"},
                        "similarity": {"type": "string", "enum": list(SIMILARITIES)},
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                    },
                }
            }
        },
    }
}


@router.post("/concepts", status_code=201, openapi_extra=EXAMPLES)
async def make(request: Request, engine: Served) -> schema.ConceptMade:
    """A concept from a few example images."""
    limits = engine.limits
    async with engine.arriving:
        form = await read_form(request, limits.concept_bytes, files=limits.examples, fields=8)
    name, similarity, served = checked(engine, form)
    only_images(served.model, "concepts")
    vector = await mean(engine, served, form.files)
    examples = tuple(part.name for part in form.files)
    held = Held(ids.fresh(), Concept(vector, similarity, name, fingerprint(served.model), examples), served.name)
    engine.concepts.put(held.id, held)
    return told(held)


async def mean(engine: engines.Engine, served: engines.Served, files: Sequence[Part]) -> Tensor:
    """The mean embedding of the examples; each is a question by itself, so that those of others pass in between."""
    sizes, vectors = set(), []
    for part in files:
        x = await engine.decode(partial(input_of, served.model, part, engine.limits))
        sizes.add(x.shape)
        if len(sizes) > 1:
            raise Problem(422, "the images come out of the model's preprocessing in different sizes; crop them alike")
        vectors.append(await engine.ask(served, partial(embedded, served.model, x)))
    return torch.cat(vectors).mean(0).float().cpu()


def embedded(model: Model, x: Tensor) -> Tensor:
    return torch.cat(list(embeddings(model, x)))


def input_of(model: Model, part: Part, limits: Limits) -> Tensor:
    """Decode and preprocess one example; images may be large, so only one is held at a time."""
    return model.prepare([open_picture(part, limits, model.channels)])


def checked(engine: engines.Engine, form: Form) -> tuple[str, str, engines.Served]:
    name, similarity = form.fields.get("name", "").strip(), form.fields.get("similarity", "dot")
    if not re.fullmatch(NAME, name):
        raise Problem(
            422, "a concept's name has 1 to 40 letters, digits, spaces, dots, dashes and begins with a letter"
        )
    if similarity not in SIMILARITIES:
        raise Problem(422, f"the similarity is one of {', '.join(SIMILARITIES)}")
    if not form.files:
        raise Problem(422, "a concept needs at least one example image")
    return name, similarity, engine.find(form.fields.get("model") or None)


@router.get("/concepts")
async def listed(engine: Served) -> list[schema.ConceptMade]:
    """The concepts that this server holds."""
    return [told(held) for held in engine.concepts.values()]


@router.delete("/concepts/{concept}", status_code=204, response_class=Response)
async def forget(engine: Served, concept: HexPath) -> Response:
    """Forget a concept."""
    if not engine.concepts.drop(concept):
        raise Problem(404, "there is no such concept (any more)")
    return Response(status_code=204)


def told(held: Held) -> schema.ConceptMade:
    c = held.concept
    return schema.ConceptMade(
        id=held.id, name=c.name, model=held.model, similarity=c.similarity, examples=list(c.examples)
    )
