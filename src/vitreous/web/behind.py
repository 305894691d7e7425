"""A worker of a team: the application and its models, for the front alone."""

from __future__ import annotations

import hmac
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitreous._support.memory import limit_memory, parse_memory
from vitreous.web.app import inner_app
from vitreous.web.engine import Engine
from vitreous.web.guard import LOOPBACK
from vitreous.web.measured import engine_metrics
from vitreous.web.metrics import TYPE
from vitreous.web.notes import note_of, route_of
from vitreous.web.problems import answer
from vitreous.web.settings import Settings
from vitreous.web.watch import Watch
from vitreous.web.workers import CLIENT, FRONT, JOBS, METRICS, OTHERS, ROUTE, STATUS, socket_of


@contextmanager
def behind(settings: Settings, number: int) -> Iterator[tuple[Behind, Engine, socket.socket]]:
    """Load the models of a worker, and listen for the front."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.workers))
    share = None if settings.memory is None else parse_memory(settings.memory) // settings.workers
    with limit_memory(share):
        engine = settings.make(number)
        engine.warm()
        alone = settings.token is None and settings.tokens is None and {*settings.hosts} <= {*LOOPBACK}
        app = inner_app(engine, Own(engine, number).routes(), alone=alone)
        with listen(settings, number) as listening:
            yield Behind(app, settings.secret), engine, listening


def listen(settings: Settings, number: int) -> socket.socket:
    if settings.ports:
        return socket.create_server(("127.0.0.1", settings.ports[number]), backlog=512)
    path = socket_of(settings, number)
    path.unlink(missing_ok=True)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.bind(str(path))
    opened.listen(512)
    return opened


class Own:
    """What a worker tells the front about itself."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number = engine, number

    def routes(self) -> list[Route]:
        return [
            Route(STATUS, self.status, include_in_schema=False),
            Route(METRICS, self.metrics, include_in_schema=False),
        ]

    async def status(self, request: Request) -> Response:
        jobs = Counter(job.client for job in self.engine.jobs.known.values() if not job.ended)
        return JSONResponse({"pid": os.getpid(), "models": list(self.engine.models), "jobs": jobs})

    async def metrics(self, request: Request) -> Response:
        return Response(engine_metrics(self.engine, self.number), media_type=TYPE)


class Behind:
    """Lets only the front in, and learns from it who asks."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self.app, self.secret, self.watch = app, secret, Watch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not hmac.compare_digest(headers.get(FRONT, "").encode(), self.secret.encode()):
            await answer(403, "this is a worker; ask its front")(scope, receive, send)
            return
        note = note_of(scope)
        note.client = headers.get(CLIENT, "?")
        note.jobs, note.others = int(headers.get(JOBS, 0)) or None, int(headers.get(OTHERS, 0))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ROUTE] = route_of(scope)
            await send(message)

        await self.app(scope, receive, sending)
