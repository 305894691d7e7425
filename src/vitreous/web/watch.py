"""Watches every request from beginning to end: headers, metrics, logs, and the last word when a server stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from anyio import CancelScope
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

from vitreous.web.metrics import Metrics
from vitreous.web.notes import REQUEST_ID, note_of, route_of
from vitreous.web.problems import described
from vitreous.web.sse import sse

LEAVING = "the server is being stopped; try again when it is back"
CLOSED = 499  # the status of a request whose client left before there was an answer
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Sending:
    """The response of one request as it is sent."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self.send, self.scope, self.began = send, scope, time.perf_counter()
        self.status, self.started, self.ended, self.events = CLOSED, False, False, False
        self.scopes = CancelScope()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            headers = MutableHeaders(scope=message)
            self.events = headers.get("content-type", "").startswith("text/event-stream")
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers["Server-Timing"] = f"total;dur={1000 * self.seconds:.2f}"
            headers[REQUEST_ID] = note_of(self.scope).request
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        await self.send(message)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    async def finish(self) -> None:
        """Say why, where a stream of events is cut off because the server stops."""
        if self.scopes.cancelled_caught and self.started and not self.ended:
            last = sse("failed", described(503, LEAVING))
            await self({"type": "http.response.body", "body": last, "more_body": False})


class Watch:
    """All requests that are being answered."""

    def __init__(self) -> None:
        self.metrics, self.leaving = Metrics(), False
        self.open: set[Sending] = set()

    @contextmanager
    def over(self, sending: Sending) -> Iterator[None]:
        self.open.add(sending)
        self.metrics.open.inc()
        try:
            with sending.scopes:
                yield
        finally:
            self.open.discard(sending)
            self.metrics.open.dec()
            scope = sending.scope
            self.metrics.answered(scope["method"], route_of(scope), sending.status, sending.seconds, note_of(scope))

    def end_streams(self) -> None:
        """Cut off streams of events, each with a last one."""
        for sending in list(self.open):
            if sending.events:
                sending.scopes.cancel()
