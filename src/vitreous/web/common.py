"""What the routes have in common."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Path, Query, Request
from fastapi.responses import Response
from torch import Tensor

from vitreous._support.words import finite
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning
from vitreous.trace.region import predicted_shares
from vitreous.web import schema
from vitreous.web.engine import Engine
from vitreous.web.notes import Visitor, visitor_of

FOREVER = "private, max-age=31536000, immutable"
BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "little-endian numbers, shape in X-Shape"}
}
JOB: dict[int | str, dict[str, Any]] = {202: {"description": "its events: /api/jobs/{job}/events"}}
PROBLEM = {"content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": said, **PROBLEM}
    for status, said in {
        400: "the request cannot be read",
        401: "a token is needed",
        403: "sent by another site",
        404: "not found, or no longer held",
        408: "the body came too slowly",
        413: "too large",
        415: "not an image",
        421: "another host is meant",
        422: "it cannot be done",
        429: "too many requests",
        503: "the queue is full, the answer took too long, or what is asked is being started or stopped",
    }.items()
}


async def get_engine(request: Request) -> Engine:  # async: no thread is needed for it
    engine: Engine = request.app.state.engine
    return engine


async def get_client(request: Request) -> Visitor:
    return visitor_of(request.scope)


Served = Annotated[Engine, Depends(get_engine)]
Client = Annotated[Visitor, Depends(get_client)]
ModelQuery = Annotated[str | None, Query(max_length=200)]
ImageQuery = Annotated[str, Query(pattern=schema.IMAGE, examples=["sample:cat"])]
ImagePath = Annotated[str, Path(pattern=schema.IMAGE, examples=["sample:cat"])]
HexPath = Annotated[str, Path(pattern=schema.HEX)]
Layer = Annotated[int, Query(ge=-1000, le=1000)]


def numbers(values: Tensor, *more: Tensor, shape: tuple[int, ...], lasting: bool = False, **told: Any) -> Response:
    """A binary response: float32 or uint8 tensors, little-endian, one after the other."""
    headers = {"X-Shape": ",".join(map(str, shape)), "Cache-Control": FOREVER if lasting else "no-store"}
    headers |= {f"X-{name.capitalize()}": str(value) for name, value in told.items()}
    return Response(b"".join(raw(t) for t in (values, *more)), media_type="application/octet-stream", headers=headers)


def raw(values: Tensor) -> bytes:
    array = values.detach().cpu().numpy()
    return array.tobytes() if array.dtype == np.uint8 else array.astype("<f4").tobytes()


def each_number(values: Tensor) -> list[float | None]:
    return [finite(value) for value in values.flatten().tolist()]


def best(model: Model, output: Tensor, top: int) -> list[schema.Chance]:
    """The most probable classes of one image's output [C], or its largest values; an answer has none."""
    if model.form is Form.WORDS:
        return []
    shares = class_shares(model, output)
    return chances(model, output, shares.nan_to_num(0).topk(min(top, len(shares))).indices.tolist())


def class_shares(model: Model, output: Tensor) -> Tensor:
    """The probability or value of each class, [C]; of an output for each place, the share of places that it has."""
    if model.form is Form.DENSE:
        return predicted_shares(output.float(), model)
    if model.detections is not None:
        return model.detections.probabilities(output.float()).nan_to_num(0).amax(0)
    return model.meaning.probabilities(output.float())


def chances(model: Model, output: Tensor, indices: list[int]) -> list[schema.Chance]:
    if model.form is Form.WORDS:
        return []
    meaning, share = model.meaning, [finite(number) for number in class_shares(model, output)]
    known = [i for i in indices if i < len(share)]
    of = "value" if meaning is Meaning.VALUE else "probability"
    return [schema.Chance.model_validate({"index": i, "label": model.label(i), of: share[i]}) for i in known]
