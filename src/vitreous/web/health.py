"""Is the server alive, is it ready, and what does it do: /healthz, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitreous.web.metrics import TYPE
from vitreous.web.problems import answer

READY = ("GET", "HEAD")


@dataclass(frozen=True)
class Health:
    """The three routes; `missing` says what the server waits for, if anything."""

    missing: Callable[[], str | None]
    metrics: Callable[[], Awaitable[bytes]]

    def routes(self) -> list[Route]:
        ends = {"/healthz": self.alive, "/readyz": self.ready, "/metrics": self.measured}
        return [Route(path, end, methods=READY, include_in_schema=False) for path, end in ends.items()]

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"}, headers={"Cache-Control": "no-store"})

    async def ready(self, request: Request) -> Response:
        said = self.missing()
        if said is not None:
            return answer(503, said, {"Retry-After": "2", "Cache-Control": "no-store"})
        return JSONResponse({"status": "ready"}, headers={"Cache-Control": "no-store"})

    async def measured(self, request: Request) -> Response:
        return Response(await self.metrics(), media_type=TYPE, headers={"Cache-Control": "no-store"})
