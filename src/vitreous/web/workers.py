"""The workers as the front sees them: where they are, whether they answer, and what they do."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import aclosing, suppress
from typing import Any
from zlib import crc32

import httpx

from vitreous.web.logs import event
from vitreous.web.settings import Settings

FRONT = "x-vitreous-front"  # headers between front and worker
CLIENT, JOBS, OTHERS, ROUTE = "x-vitreous-client", "x-vitreous-jobs", "x-vitreous-others", "x-vitreous-route"
STATUS, METRICS = "/worker/status", "/worker/metrics"
OFTEN = 0.5  # seconds between two looks at a worker
QUICK = 5.0  # seconds in which a worker says how it is
PATIENCE = 60.0  # seconds without a byte; a worker itself gives up after 30, and a stream beats every 15
SHORTER = 20  # seconds for which an idle connection is kept: less than a worker keeps it


class Worker:
    def __init__(self, number: int, settings: Settings) -> None:
        self.number, self.secret = number, settings.secret
        self.alive, self.pid, self.restarts = False, 0, 0
        self.models: list[str] = []
        self.jobs: dict[str, int] = {}  # that have not ended, by client
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=SHORTER)
        self.port = settings.ports[number] if settings.ports else None
        uds = None if settings.ports else str(socket_of(settings, number))
        self.transport = httpx.AsyncHTTPTransport(uds=uds, limits=limits)

    def request(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], content: Any) -> httpx.Request:
        url = httpx.URL(scheme="http", host="127.0.0.1", port=self.port, raw_path=target)
        timeout = {"connect": QUICK, "read": PATIENCE, "write": PATIENCE, "pool": QUICK}
        sent = [*headers, (FRONT.encode(), self.secret.encode())]
        return httpx.Request(method, url, headers=sent, content=content, extensions={"timeout": timeout})

    async def ask(self, path: str) -> bytes:
        """A short question of the front itself."""
        async with asyncio.timeout(QUICK):
            response = await self.transport.handle_async_request(self.request("GET", path.encode(), [], None))
            async with aclosing(response):
                held = await response.aread()
        if response.status_code != 200:
            raise httpx.ReadError(f"status {response.status_code}")
        return held

    async def look(self) -> None:
        """See how it is."""
        try:
            told = json.loads(await self.ask(STATUS))
        except (httpx.HTTPError, TimeoutError, ValueError):
            self.lost()
            return
        if self.pid and told["pid"] != self.pid:
            self.restarts += 1
        if not self.alive:
            event("worker", worker=self.number, state="ready", pid=told["pid"])
        self.alive, self.pid, self.models, self.jobs = True, told["pid"], told["models"], told["jobs"]

    def lost(self) -> None:
        if self.alive:
            event("worker", worker=self.number, state="lost", pid=self.pid)
        self.alive, self.jobs = False, {}


class Workers:
    def __init__(self, settings: Settings) -> None:
        self.all = [Worker(number, settings) for number in range(settings.workers)]
        self.turns = itertools.count()
        self.ready = asyncio.Event()  # all have answered once

    def __len__(self) -> int:
        return len(self.all)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.all if worker.alive]

    @property
    def missing(self) -> str | None:
        """What the server waits for, in a sentence."""
        if len(self.alive) == len(self.all):
            return None
        return f"{len(self.alive)} of {len(self.all)} workers are ready; try again in a moment"

    def freest(self) -> Worker | None:
        """The one with the fewest jobs; in turns where several have as few."""
        turn = next(self.turns)
        known = sorted(self.alive, key=lambda one: (sum(one.jobs.values()), (one.number - turn) % len(self.all)))
        return known[0] if known else None

    def usual(self, client: str) -> Worker | None:
        """The same for the same client, while that one is alive."""
        first = crc32(client.encode()) % len(self.all)
        return next((one for one in (*self.all[first:], *self.all[:first]) if one.alive), None)

    async def watch(self) -> None:
        """Look at every worker again and again."""
        async with asyncio.TaskGroup() as group:
            for worker in self.all:
                group.create_task(self.follow(worker))

    async def follow(self, worker: Worker) -> None:
        while True:
            began = time.monotonic()
            await worker.look()
            if self.missing is None:
                self.ready.set()
            await asyncio.sleep(max(0.05, OFTEN - (time.monotonic() - began)))

    async def metrics(self) -> list[bytes]:
        """What the workers measure themselves, of those that answer."""

        async def of(worker: Worker) -> bytes:
            with suppress(httpx.HTTPError, TimeoutError):
                return await worker.ask(METRICS)
            return b""

        return list(await asyncio.gather(*(of(worker) for worker in self.alive)))

    async def close(self) -> None:
        for worker in self.all:
            await worker.transport.aclose()


def socket_of(settings: Settings, number: int) -> Any:
    """The Unix socket of a worker."""
    return settings.folder / f"worker-{number}.sock"
