"""The front of a team: it has no models, answers for itself what it can, and hands everything else to a worker.

A request goes to the worker that made the ids in it. One without ids goes to the visitor's own worker, which a cookie
names; the visitor moves to another one with an image that lies there, or when the own one is gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from http.cookies import CookieError, SimpleCookie
from typing import Any

import anyio
import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from vitreous.web import ids, problems
from vitreous.web.guard import Guard
from vitreous.web.health import Health
from vitreous.web.limits import MB, Limits
from vitreous.web.logs import event
from vitreous.web.metrics import Made, counter, gauge, resident
from vitreous.web.notes import REQUEST_ID, note_of
from vitreous.web.problems import Problem, described
from vitreous.web.settings import Settings
from vitreous.web.sse import sse
from vitreous.web.statics import Statics
from vitreous.web.tokens import Tokens
from vitreous.web.watch import LEAVING, Watch
from vitreous.web.workers import CLIENT, JOBS, OTHERS, ROUTE, Worker, Workers

COOKIE = "vitreous_worker"
RESTARTS = "the worker that has this is being started again; try again in a moment"
DIED = "the worker of this job has ended and is being started again; ask again"
BEGINS = "the workers are being started; try again in a moment"
LAST = re.compile(rb"^event: (done|cancelled|failed)$", re.MULTILINE)  # after these no event comes
AGAIN = 2  # seconds after which a client may try again
WHOLE = 16 * MB  # answers up to here are held until they are complete, so that none arrives in part
OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
}
OURS = {"cookie", "authorization", "forwarded", REQUEST_ID}  # told to nobody, or anew


def create_front(settings: Settings, tokens: Tokens, limits: Limits | None = None) -> tuple[Guard, Workers]:
    """The application of the front."""
    watch, workers, limits = Watch(), Workers(settings), limits or Limits()

    async def metrics() -> bytes:
        return watch.metrics.text(own_metrics(workers), *await workers.metrics())

    health = Health(lambda: LEAVING if watch.leaving else workers.missing, metrics)
    routes = [*health.routes(), Route("/{path:path}", Doors(Pages(workers), Proxy(workers, limits)))]

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(workers.watch())
        yield
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        await workers.close()

    app = Starlette(routes=routes, lifespan=life, exception_handlers={HTTPException: problems.on_http})
    app.router.redirect_slashes = False
    return Guard(app, limits, settings.hosts, tokens, watch), workers


def own_metrics(workers: Workers) -> bytes:
    from prometheus_client import generate_latest

    each = {str(one.number): one for one in workers.all}
    up = [gauge("vitreous_worker_up", "Whether a worker answers.", n, {"": float(w.alive)}) for n, w in each.items()]
    again = [
        counter("vitreous_worker_restarts", "Times that it was started again.", n, {"": float(w.restarts)})
        for n, w in each.items()
    ]
    for families in (up, again):
        families[0].samples = [sample for family in families for sample in family.samples]
    own = gauge("vitreous_resident_bytes", "Resident memory of a process.", "front", {"": resident()})
    return generate_latest(Made([up[0], again[0], own]))


class Doors:
    """Files of the page are here; everything else is a worker's."""

    def __init__(self, pages: Pages, proxy: Proxy) -> None:
        self.pages, self.proxy = pages, proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self.pages.statics.files and scope["method"] in ("GET", "HEAD"):
            response = await self.pages.get(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self.proxy(scope, receive, send)


class Pages:
    """The page's files; with the first one, a visitor gets a worker."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.statics = workers, Statics()

    async def get(self, request: Request) -> Response:
        response = await self.statics.get(request)
        if request.url.path == "/" and own_worker(request.headers, self.workers) is None:
            freest = self.workers.freest()
            if freest is not None:
                response.headers.append("set-cookie", cookie(freest))
        return response


class Proxy:
    """Hands a request to a worker, and its answer back, as it comes."""

    def __init__(self, workers: Workers, limits: Limits) -> None:
        self.workers, self.limits = workers, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        form = headers.get("content-type", "").lower().startswith("multipart/")
        bodily = "content-length" in headers or "transfer-encoding" in headers
        try:
            content: Any = None if not bodily else parts(receive) if form else await whole(receive)
            told = (
                scope["raw_path"] + b"?" + scope["query_string"] + b"\n" + (content if type(content) is bytes else b"")
            )
            worker, moves = self.choose(told, scope, headers)
            response = await self.exchange(worker, scope, headers, content)
        except ClientDisconnect:
            return
        async with aclosing(response):
            await self.answer(worker, moves, response, receive, send)

    def choose(self, told: bytes, scope: Scope, headers: Headers) -> tuple[Worker, bool]:
        """The worker of a request, and whether the visitor moves there."""
        own, named = own_worker(headers, self.workers), ids.workers_of(told, len(self.workers))
        if named:
            number, image = named[0]
            worker = self.workers.all[number]
            if not worker.alive:
                raise Problem(503, RESTARTS, retry=AGAIN)
            return worker, image and worker is not own
        chosen = own if own is not None and own.alive else self.workers.usual(note_of(scope).client)
        if chosen is None:
            raise Problem(503, BEGINS, retry=AGAIN)
        return chosen, chosen is not own

    async def exchange(self, worker: Worker, scope: Scope, headers: Headers, content: Any) -> httpx.Response:
        """Send the request; a question that changes nothing is asked twice before it is given up."""
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        sent = [*passed(headers.raw, OURS), *self.introduction(worker, scope)]
        note = note_of(scope)
        note.worker = worker.number
        tries = 2 if scope["method"] in ("GET", "HEAD") else 1
        for left in reversed(range(tries)):
            try:
                request = worker.request(scope["method"], target, sent, content)
                response = await worker.transport.handle_async_request(request)
                note.answered_by = response.headers.get(ROUTE)
                if "text/event-stream" not in response.headers.get("content-type", "") and short(response):
                    await response.aread()
                return response
            except httpx.TimeoutException:
                raise Problem(503, "the worker does not answer; try again", retry=AGAIN) from None
            except httpx.TransportError as error:
                if isinstance(error, httpx.ConnectError):
                    worker.lost()
                if not left or not worker.alive:
                    raise Problem(503, RESTARTS, retry=AGAIN) from None
        raise AssertionError("unreachable")

    def introduction(self, worker: Worker, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Who asks, for the worker: it knows nobody but the front."""
        note = note_of(scope)
        others = sum(one.jobs.get(note.client, 0) for one in self.workers.all if one is not worker)
        told = {CLIENT: note.client, JOBS: str(note.jobs or self.limits.own_jobs), OTHERS: str(others)}
        return [(name.encode(), value.encode()) for name, value in {**told, REQUEST_ID: note.request}.items()]

    async def answer(self, worker: Worker, moves: bool, response: httpx.Response, receive: Receive, send: Send) -> None:
        headers = passed(response.headers.raw, {ROUTE})
        if moves:
            headers.append((b"set-cookie", cookie(worker).encode()))
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        if response.is_stream_consumed:
            await send({"type": "http.response.body", "body": response.content})
            return
        async with anyio.create_task_group() as group:
            group.start_soon(leave_with, receive, group.cancel_scope)
            await pump(worker, response, send)
            group.cancel_scope.cancel()


async def pump(worker: Worker, response: httpx.Response, send: Send) -> None:
    """Hand on a stream; events of a worker that died end with one that says so."""
    events = response.headers.get("content-type", "").startswith("text/event-stream")
    body: Message = {"type": "http.response.body", "more_body": True}
    over = not events
    try:
        async for chunk in response.aiter_raw():
            over = over or LAST.search(chunk) is not None
            await send({**body, "body": chunk})
    except httpx.TransportError:
        event("stream", worker=worker.number, state="cut")
        if not events:
            raise
    last = b"" if over else b"\n\n" + sse("failed", described(503, DIED))
    await send({**body, "body": last, "more_body": False})


async def leave_with(receive: Receive, scope: anyio.CancelScope) -> None:
    """A visitor who leaves takes the stream along, so that the worker learns of it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def parts(receive: Receive) -> AsyncIterator[bytes]:
    """A body as it comes; the guard counts it."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def whole(receive: Receive) -> bytes:
    return b"".join([part async for part in parts(receive)])


def short(response: httpx.Response) -> bool:
    length = response.headers.get("content-length", "")
    return response.status_code in (204, 304) or (length.isdigit() and int(length) <= WHOLE)


def passed(headers: Any, without: set[str]) -> list[tuple[bytes, bytes]]:
    """The headers that go on to the other side."""
    dropped = OF_A_CONNECTION | without
    return [
        (name.lower(), value)
        for name, value in headers
        if (known := name.decode("latin-1").lower()) not in dropped and not known.startswith("x-vitreous-")
    ]


def own_worker(headers: Headers, workers: Workers) -> Worker | None:
    """The worker that the cookie names."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    known = {str(one.number): one for one in workers.all}
    return known.get(found.value) if found is not None else None


def cookie(worker: Worker) -> str:
    return f"{COOKIE}={worker.number}; HttpOnly; SameSite=Strict; Path=/"
