"""Messages of a widget to an ASGI application in this process, and its responses back: no port is opened.

A message of a view (one display of the widget) is one of
    ask     {view, number, method, path, headers} and the body: one response comes back, `answer`
    listen  {view, number, path}: server-sent events come back as `event`, after the last one `lost`
    stop    {view, number}: that question is no longer asked
    close   {view}: the view has gone; its questions end and its jobs are cancelled
Everything runs on an event loop in a thread of its own, so that a kernel which runs a cell still sends what is ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

LOG = logging.getLogger("vitreous.notebook")
STARTED = 202  # the status of a response that names a job
App = Callable[[Any, Any, Any], Awaitable[None]]
Message = MutableMapping[str, Any]
Send = Callable[[dict[str, Any], list[bytes]], None]


@cache
def background() -> asyncio.AbstractEventLoop:
    """The event loop of all widgets of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="vitreous views", daemon=True).start()
    return loop


@dataclass
class Asked:
    """A request that is on its way through the application."""

    view: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def scope(self) -> dict[str, Any]:
        path, _, query = self.path.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": (self.view, 0),  # jobs are counted for each view
            "server": ("kernel", 0),
        }


class Bridge:
    """Answers the messages of one widget."""

    def __init__(self, app: App, send: Send) -> None:
        self.app, self.send = app, send
        self.loop = background()
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.jobs: dict[str, set[str]] = {}  # that a view has started
        self.open = True
        self.leaving: asyncio.Task[None] | None = None

    def hear(self, told: Mapping[str, Any], body: bytes = b"") -> None:
        """Take a message, in any thread."""
        if self.open:
            self.loop.call_soon_threadsafe(self._begin, dict(told), body)

    def close(self, end: Callable[[], None]) -> None:
        """Answer nothing more, end all questions and jobs, and then what answered."""
        self.open = False
        asyncio.run_coroutine_threadsafe(self._leave_all(end), self.loop)

    # ----------------------------------------------------------------------------------------------- in the event loop

    def _begin(self, told: dict[str, Any], body: bytes) -> None:
        kind, view = told.get("kind"), str(told.get("view"))
        if kind == "close":
            self.leaving = self.loop.create_task(self._leave(view))
        elif kind == "stop":
            self._end(view, int(told["number"]))
        elif kind == "ask":
            asked = Asked(view, str(told["method"]), str(told["path"]), dict(told["headers"]), body)
            self._start(view, int(told["number"]), self._answer(asked, int(told["number"])))
        elif kind == "listen":
            asked = Asked(view, "GET", str(told["path"]))
            self._start(view, int(told["number"]), self._listen(asked, int(told["number"])))

    def _start(self, view: str, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks[view, number] = task
        task.add_done_callback(lambda _: self.tasks.pop((view, number), None))

    def _end(self, view: str, number: int) -> None:
        task = self.tasks.get((view, number))
        if task is not None:
            task.cancel()

    async def _leave(self, view: str) -> None:
        for other, number in list(self.tasks):
            if other == view:
                self._end(view, number)
        for job in self.jobs.pop(view, set()):
            await self._call(Asked(view, "DELETE", f"/api/jobs/{job}"), ignore, ignore)

    async def _leave_all(self, end: Callable[[], None]) -> None:
        for view in {*self.jobs, *(view for view, _ in self.tasks)}:
            await self._leave(view)
        end()

    async def _answer(self, asked: Asked, number: int) -> None:
        """One response, as a whole."""
        head: list[Message] = []
        parts: list[bytes] = []
        await self._call(asked, head.append, parts.append)
        status, headers = head[0]["status"], {key.decode(): value.decode() for key, value in head[0]["headers"]}
        body = b"".join(parts)
        if status == STARTED:
            self.jobs.setdefault(asked.view, set()).add(json.loads(body)["job"])
        told = {"kind": "answer", "view": asked.view, "number": number, "status": status, "headers": headers}
        self._tell(told, [body])

    async def _listen(self, asked: Asked, number: int) -> None:
        """Events as they come."""
        rest = b""

        def part(held: bytes) -> None:
            nonlocal rest
            *whole, rest = (rest + held).split(b"\n\n")
            for name, data in events(whole):
                self._tell({"kind": "event", "view": asked.view, "number": number, "name": name, "data": data}, [])

        await self._call(asked, ignore, part)
        self._tell({"kind": "lost", "view": asked.view, "number": number}, [])

    async def _call(self, asked: Asked, begin: Callable[[Message], None], part: Callable[[bytes], None]) -> None:
        """Run the application for one request; a view that has gone cancels it."""
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # the view has not gone
            sent = True
            return {"type": "http.request", "body": asked.body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                begin(message)
            elif message.get("body"):
                part(message["body"])

        try:
            await self.app(asked.scope, receive, send)
        except Exception:  # it has sent a problem before
            LOG.exception("%s %s failed", asked.method, asked.path)

    def _tell(self, told: dict[str, Any], body: list[bytes]) -> None:
        if not self.open:
            return
        try:
            self.send(told, body)
        except Exception:
            LOG.exception("a message to the notebook was lost")


def ignore(_: Any) -> None:
    pass


def events(whole: list[bytes]) -> Iterator[tuple[str, Any]]:
    """The names and data of server-sent events; comments and settings are left out."""
    for text in whole:
        lines = dict(line.split(": ", 1) for line in text.decode().split("\n") if ": " in line)
        if "event" in lines:
            yield lines["event"], json.loads(lines["data"])
