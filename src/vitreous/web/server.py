"""uvicorn's server, which says goodbye: what runs has some time to end, and streams end with an event that says why."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from vitreous.web.watch import Watch

TICK = 0.05  # seconds between two looks at what still runs
KEEP_ALIVE = 30  # seconds that an idle connection stays open


class Server(uvicorn.Server):
    """SIGTERM gives `grace` seconds to requests and jobs that run; SIGINT none; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, watch: Watch, grace: float, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.watch, self.grace, self.stop = watch, grace, stop
        self.interrupted, self.forced = False, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        self.forced |= self.should_exit
        super().handle_exit(sig, frame)
        self.force_exit = False  # with which uvicorn leaves the application without a goodbye

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.watch.leaving = True
        for server in self.servers:
            server.close()
        end = time.monotonic() + self.grace
        while self.watch.open and time.monotonic() < end and not (self.interrupted or self.forced):
            await asyncio.sleep(TICK)
        self.watch.end_streams()
        self.stop()
        await super().shutdown(sockets)


def config_of(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """The settings of uvicorn."""
    return uvicorn.Config(app, **{**settings(), **more})


def settings() -> dict[str, Any]:
    return {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "ws": "none",
        "proxy_headers": "FORWARDED_ALLOW_IPS" in os.environ,  # a proxy that forwards the client's address
        "timeout_keep_alive": KEEP_ALIVE,
        "timeout_graceful_shutdown": 1,
        "limit_concurrency": 1000,
    }


def quietly(sig: int, frame: FrameType | None) -> None:
    """A signal that was handled; uvicorn raises it again at its end."""
