"""The application: routes, errors, the page, and the guard before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from vitreous.errors import VitreousError
from vitreous.version import VERSION
from vitreous.web import (
    about,
    additions,
    answers,
    attention,
    compare,
    concepts,
    counterfactual,
    explain,
    exports,
    faithfulness,
    features,
    films,
    heads,
    info,
    latents,
    problems,
    recipes,
    regions,
    session,
)
from vitreous.web.common import PROBLEMS
from vitreous.web.docs import page
from vitreous.web.engine import Engine
from vitreous.web.guard import LOOPBACK, Guard
from vitreous.web.health import Health
from vitreous.web.measured import engine_metrics
from vitreous.web.statics import Statics
from vitreous.web.tokens import Tokens
from vitreous.web.watch import LEAVING, Watch

PARTS = (
    *(info, about, exports, explain, attention, concepts, faithfulness, counterfactual, heads, features),
    *(regions, latents, answers, films, compare, additions, recipes, session),
)


def create_app(
    engine: Engine,
    *,
    hosts: Iterable[str] = LOOPBACK,
    token: str | None = None,
    tokens: Tokens | None = None,
) -> Guard:
    """Everything that `vitreous serve` serves in one process, as an ASGI application."""
    names, tokens, watch = list(hosts), tokens or Tokens(token), Watch()
    alone = not tokens and {*names} <= {*LOOPBACK}

    async def metrics() -> bytes:
        return watch.metrics.text(engine_metrics(engine))

    health = Health(lambda: LEAVING if watch.leaving else None, metrics)
    return Guard(inner_app(engine, health.routes(), alone=alone), engine.limits, names, tokens, watch)


def inner_app(engine: Engine, more: Sequence[BaseRoute] = (), *, alone: bool = False) -> FastAPI:
    """The routes themselves, and `more`. `alone`: nobody but this computer reaches the server."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(
        title="vitreous",
        version=VERSION,
        summary="See what a Vision Transformer looks at, and why.",
        openapi_url="/api/openapi.json",
        docs_url=None,  # they load scripts from elsewhere; /api/docs does not
        redoc_url=None,
        lifespan=life,
        redirect_slashes=False,
    )
    app.state.engine, app.state.alone = engine, alone
    api = APIRouter(prefix="/api", responses=PROBLEMS)
    for part in PARTS:
        api.include_router(part.router)
    app.include_router(api)
    app.include_router(about.pages)
    app.add_exception_handler(HTTPException, problems.on_http)
    app.add_exception_handler(RequestValidationError, problems.on_invalid)
    app.add_exception_handler(VitreousError, problems.on_ours)
    app.add_exception_handler(Exception, problems.on_anything)

    @app.get("/api/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))

    app.router.routes.extend(more)
    app.add_route("/{path:path}", Statics().get, methods=["GET", "HEAD"], include_in_schema=False)
    app.openapi()  # builds all routes now; FastAPI would do so at the first request, beside those of others
    return app
