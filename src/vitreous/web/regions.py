"""Places of an image: regions that visitors draw, which are held in memory, and the boxes of detections."""

from __future__ import annotations

import io
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from vitreous._support.words import finite
from vitreous.models.output import Form
from vitreous.trace.area import Area, Drawn, Point, Weighed
from vitreous.trace.crops import Crop
from vitreous.trace.detection import Detected, best_detections, found_at
from vitreous.trace.region import Placed
from vitreous.trace.target import Contrast, Target
from vitreous.trace.trace import Trace
from vitreous.web import schema
from vitreous.web.common import FOREVER, HexPath, ImageQuery, ModelQuery, Served
from vitreous.web.engine import HeldMask, key_of
from vitreous.web.place import Place
from vitreous.web.problems import Problem

router = APIRouter()
LARGEST = 1024  # pixels of the longer side of a mask that is held
FINEST = 64  # cells of the longer side of a region as it is drawn on maps


class MaskAsked(schema.OfImage):
    """A region as a mask of what the model sees."""

    width: Annotated[int, Field(ge=1, le=512)]
    height: Annotated[int, Field(ge=1, le=512)]
    runs: Annotated[list[Annotated[int, Field(ge=0, le=512 * 512)]], Field(min_length=1, max_length=20_000)]


class MaskHeld(BaseModel):
    id: str
    share: float  # of what the model sees


class DetectionFound(BaseModel):
    target: str  # "3@query:17"
    index: int
    label: str
    query: int
    probability: schema.Number
    box: tuple[schema.Number, schema.Number, schema.Number, schema.Number]  # left, top, right, bottom, as shares


# --------------------------------------------------------------------------------------------------------------- masks


@router.post("/masks", status_code=201)
async def draw(engine: Served, asked: MaskAsked) -> MaskHeld:
    """Hold a region that was drawn on what the model sees of an image; CLASS@mask:ID is its target."""
    served = engine.find(asked.model)
    drawn = decoded(asked)

    def work() -> MaskHeld:
        crop = engine.trace(served, asked.image).crops[0]
        pixels = on_image(drawn, crop, served.name)
        held = HeldMask(key_of(pixels.shape, pixels.tobytes()), pixels)
        engine.masks.put(held.id, held, pixels.nbytes)
        return MaskHeld(id=held.id, share=float(drawn.mean()))

    return await engine.ask(served, work)


@router.get("/masks/{mask}.png", response_class=Response, responses={200: {"content": {"image/png": {}}}})
async def picture(engine: Served, mask: HexPath) -> Response:
    """A drawn region as a mask of the whole image, for CLASS@FILE."""
    held = engine.masks.get(mask)
    if held is None:
        raise Problem(404, "this region is not here (any more); draw it again")
    buffer = io.BytesIO()
    Image.fromarray(held.pixels.astype(np.uint8) * 255).save(buffer, "PNG")
    return Response(buffer.getvalue(), media_type="image/png", headers={"Cache-Control": FOREVER})


def decoded(asked: MaskAsked) -> np.ndarray:
    """Lengths of runs, first of what is outside, to a mask [Y X]."""
    if sum(asked.runs) != asked.width * asked.height:
        said = f"the runs have {sum(asked.runs)} pixels, the mask {asked.width}×{asked.height}"
        raise Problem(422, f"{said}; give the lengths of runs, row by row, first of what is outside")
    inside = np.arange(len(asked.runs)) % 2 == 1
    drawn = np.repeat(inside, asked.runs).reshape(asked.height, asked.width)
    if not drawn.any():
        raise Problem(422, "the region is empty; draw around something")
    return drawn


def runs_of(mask: np.ndarray) -> list[int]:
    """The lengths of runs of a mask, first of what is outside."""
    flat = mask.flatten()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    return [0, *lengths] if flat[0] else lengths


def on_image(drawn: np.ndarray, crop: Crop, name: str) -> np.ndarray:
    """A mask of what the model sees as one of the whole image, at most `LARGEST` pixels a side."""
    (wide, high), seen = crop
    if seen is None:
        said = f"the preprocessing of {name} shows the model no upright rectangle of the image"
        raise Problem(422, f"{said}, so no region can be drawn; give CLASS@predicted")
    scale = min(1.0, LARGEST / max(wide, high))
    rows = inside(max(1, round(high * scale)), high, seen[1], seen[3], drawn.shape[0])
    columns = inside(max(1, round(wide * scale)), wide, seen[0], seen[2], drawn.shape[1])
    padded = np.pad(drawn, ((0, 1), (0, 1)))  # what the model does not see is in the last row and column
    whole: np.ndarray = padded[np.ix_(rows, columns)]
    return whole


def inside(pixels: int, length: float, start: float, stop: float, cells: int) -> np.ndarray:
    """For each pixel along a side the cell of a drawing in which its middle lies; `cells` where it lies in none."""
    middle = (np.arange(pixels) + 0.5) * length / pixels
    found = np.floor((middle - start) / (stop - start) * cells).astype(int)
    place: np.ndarray = np.where((found < 0) | (found >= cells), cells, found)
    return place


# ---------------------------------------------------------------------------------------------------------- detections


@router.get("/detections")
async def detections(
    engine: Served, image: ImageQuery, model: ModelQuery = None, top: Annotated[int, Query(ge=1, le=100)] = 10
) -> list[DetectionFound]:
    """The best detections, best first, with their boxes."""
    served = engine.find(model)
    if served.model.form is not Form.DETECTIONS:
        raise Problem(422, f"{served.name} is no detector")
    trace = await engine.seen(served, image)
    return [
        DetectionFound(
            target=f"{cls}@query:{query}",
            index=cls,
            label=served.model.label(cls),
            query=query,
            probability=finite(share),
            box=(finite(box[1]), finite(box[0]), finite(box[3]), finite(box[2])),
        )
        for cls, query, share, box in best_detections(trace.output[0], served.model, top)
    ]


# -------------------------------------------------------------------------------------------------- where a target is


def places_of(target: Target | None, trace: Trace) -> list[Place]:
    """Where a target fixed on one image is, to be drawn on its maps."""
    if isinstance(target, Contrast):
        return [*places_of(target.one, trace), *places_of(target.other, trace)]
    if isinstance(target, Detected):
        top, left, bottom, right = found_at(target.each[0], trace.output[0].detach().float(), trace.model)[3]
        return [Place(kind="box", sides=[left, top, right, bottom])]
    if isinstance(target, Placed):
        return [drawn_area(spot.area, trace.size) for spot in target.spots if spot.area is not None]
    return []


def drawn_area(area: Area, size: tuple[int, int]) -> Place:
    if isinstance(area, Point):
        return Place(kind="point", sides=[area.across, area.down])
    if isinstance(area, Drawn) and area.pixels.shape == (1, 1):
        left, top, right, bottom = area.seen
        wide, high = right - left, bottom - top
        return Place(kind="box", sides=[-left / wide, -top / high, (1 - left) / wide, (1 - top) / high])
    shape = tuple(area.shares.shape) if isinstance(area, Weighed) else size
    covered = area.coverage(cells(shape[0], shape[1]))
    mask = half_covered(covered)
    return Place(kind="mask", shape=(mask.shape[0], mask.shape[1]), runs=runs_of(mask))


def cells(high: int, wide: int) -> tuple[int, int]:
    """The same shape with at most `FINEST` cells a side."""
    scale = min(1.0, FINEST / max(high, wide))
    return max(1, round(high * scale)), max(1, round(wide * scale))


def half_covered(covered: Tensor) -> np.ndarray:
    return (covered > covered.max() / 2).cpu().numpy()
