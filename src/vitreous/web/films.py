"""What is asked of clips alone: which frames a model takes, one frame as it sees it, and films of maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel

from vitreous._support.marks import identity_of, identity_of_result
from vitreous.errors import OptionError
from vitreous.images.videos import Video
from vitreous.plot.strip import film_bytes
from vitreous.trace.views import Views
from vitreous.web import schema
from vitreous.web.common import ImagePath, ModelQuery, Served
from vitreous.web.problems import Problem

router = APIRouter()
Frame = Annotated[int | None, Query(ge=0, le=10_000)]
MOST = 8  # maps side by side in one film
GIF: dict[int | str, dict[str, Any]] = {200: {"content": {"image/gif": {}}}}


class ClipInfo(BaseModel):
    """The frames that a model takes of a clip."""

    name: str
    count: int  # frames of the clip
    picked: list[int]  # those that the model takes
    times: list[tuple[int, int]]  # of them, the ones of each tubelet, the end not included


class FilmAsked(schema.FigureAsked):
    """Maps of one clip."""


@router.get("/images/{image}/clip")
async def clip(engine: Served, image: ImagePath, model: ModelQuery = None) -> ClipInfo:
    """Which frames of a clip a model takes, and which of them make each tubelet."""
    served = engine.find(model)
    if served.model.frames is None:
        raise Problem(422, f"{served.name} takes images, which have no frames")
    trace = await engine.seen(served, image)  # raises unless it is a clip
    found = engine.clips.get(image, served.name, served.model.frames)
    return ClipInfo(
        name=found.video.name, count=found.count, picked=list(found.video.picked), times=list(trace.layout.times)
    )


def seen_frame(views: Views, frame: int | None) -> Image.Image:
    """What the model sees: an image, or a frame of a clip."""
    if views.count is None or frame is None:
        return views[0]
    if frame >= views.count:
        raise OptionError(f"frame {frame} is out of range: the model takes frames 0 to {views.count - 1}")
    video = views.sources[0]
    assert isinstance(video, Video)
    return views.preprocess.view(video.frames[frame])


@router.post("/film", response_class=Response, responses=GIF)
async def film(engine: Served, asked: FilmAsked) -> Response:
    """An animated GIF: every frame that the model saw under the map of its tubelet, several maps side by side."""
    kept = [engine.map(one) for one in dict.fromkeys(asked.maps)]
    if len({(one.model, one.image) for one in kept}) > 1:
        raise Problem(422, "these maps explain several clips or models; a film shows one")
    if len(kept) > MOST:
        raise Problem(422, f"{len(kept)} maps are too many for one film; choose at most {MOST}")
    served = engine.find(kept[0].model)
    if served.model.frames is None:
        raise Problem(422, f"{served.name} takes images; a film shows the maps of a clip")
    views = engine.views(kept[0].image, served)
    told = {one.meta["id"]: one.provenance for one in kept}
    mark = {"identity": identity_of({key: identity_of_result(one) for key, one in told.items()}), "maps": told}

    def draw() -> bytes:
        return film_bytes([replace(one.attribution, views=views) for one in kept], mark, cells=asked.cells)

    made = await engine.draw(draw)
    return Response(made, media_type="image/gif", headers={"Cache-Control": "no-store"})
