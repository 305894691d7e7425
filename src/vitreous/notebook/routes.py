"""The routes of the page's server that maps alone can answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from vitreous.errors import VitreousError
from vitreous.notebook.recorded import NO_MODEL, Recorded
from vitreous.web import problems, schema
from vitreous.web.common import HexPath, ImagePath, numbers
from vitreous.web.exports import archive, stored
from vitreous.web.problems import Problem
from vitreous.web.sse import sse


def application(maps: Recorded) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in (of_images(maps), of_maps(maps), of_the_rest()):
        app.include_router(router, prefix="/api")
    app.add_exception_handler(HTTPException, problems.on_http)
    app.add_exception_handler(VitreousError, problems.on_ours)
    return app


def of_images(maps: Recorded) -> APIRouter:
    """What there is, and what is said of an image."""
    router = APIRouter()

    @router.get("/info")
    async def info() -> schema.Info:
        return maps.info()

    @router.get("/concepts")
    async def concepts() -> list[Any]:
        return []

    @router.post("/predict")
    async def predict(asked: schema.PredictAsked) -> schema.Prediction:
        maps.index(asked.image)
        return schema.Prediction(classes=[], why=maps.said())

    @router.get("/target")
    async def target(q: str) -> schema.TargetMeaning:
        if q not in maps.rows:
            raise Problem(404, NO_MODEL)
        return schema.TargetMeaning(target=q, title=q)

    @router.get("/images/{image}/view")
    def view(image: ImagePath) -> Response:
        return Response(maps.seen(image), media_type="image/webp")

    return router


def of_maps(maps: Recorded) -> APIRouter:
    """Maps as the jobs of the page, as numbers, as files."""
    router = APIRouter()

    @router.post("/explain", status_code=202)
    async def explain(asked: schema.ExplainAsked) -> schema.Started:
        return schema.Started(job=maps.explain(asked))

    @router.get("/jobs/{job}/events")
    async def events(job: HexPath) -> Response:
        told = maps.jobs.get(job, [])
        return Response(b"".join(sse(name, data) for name, data in told), media_type="text/event-stream")

    @router.delete("/jobs/{job}", status_code=204)
    async def cancel(job: HexPath) -> Response:
        return Response(status_code=204)

    @router.get("/maps/{map}")
    async def grid(map: HexPath) -> Response:
        values = maps.one(map).attribution.map[0]
        return numbers(values, shape=tuple(values.shape))

    @router.post("/maps.npz")
    def several(asked: schema.MapsAsked) -> Response:
        return archive(stored([maps.one(number) for number in dict.fromkeys(asked.maps)]), "maps")

    @router.post("/figure")
    def figure(asked: schema.FigureAsked) -> Response:
        return Response(maps.figure(asked), media_type="image/png")

    return router


def of_the_rest() -> APIRouter:
    """All that needs the model."""
    router = APIRouter()

    @router.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def rest(path: str) -> None:
        raise Problem(404, NO_MODEL)

    return router
