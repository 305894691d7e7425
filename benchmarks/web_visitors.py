"""Visitors of the page, for benchmarks/web.py load: processes of their own that print what happened to them as JSON.

busy      uploads photos that the server has never seen, predicts, erases, moves the slider of rollout, asks for
          features, explains (heard to the end, cancelled, or left by closing the connection), measures curves and
          heads, draws figures, builds concepts, and now and then sends nonsense. Between two acts it thinks, 5 seconds
          in the mean.
steady    has one long job after another, so that the model computes all the time.
hovering  moves the pointer over the Attention tab: 30 moves, one every 80 ms and never two at a time, as the page does;
          then rests for 1 to 4 seconds. Every fifth time it takes a photo of its own first.

Each visitor comes from an address of its own (127.1.0.0/16), so that the limits for one visitor hold as they do on a
network. A visitor who is told to come back later (429, 503) waits as long as the server says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

THINKS = 5.0  # seconds in the mean between two acts
MOVES, EVERY = 30, 0.08  # moves of the pointer, and seconds between two
LAST = ("done", "cancelled", "failed")
QUICK = ("rollout", "cdam", "gae", "attention", "gradcam")
STEADY = ("integrated_gradients", "occlusion")
PATCHES, LAYERS = 196, 12


class Visitor:
    """One visitor: its connections, its photo, and what happened to it."""

    def __init__(self, home: str, number: int, photos: list[bytes], until: float) -> None:
        address = f"127.1.{number // 250}.{number % 250 + 1}"
        transport = httpx.AsyncHTTPTransport(local_address=address)
        self.client = httpx.AsyncClient(base_url=home, timeout=120, transport=transport)
        self.chance, self.photos, self.until = random.Random(number), photos, until
        self.image, self.maps = "sample:cat", list[str]()
        self.codes: Counter[str] = Counter()
        self.jobs: Counter[str] = Counter()  # how they ended
        self.wrong: list[str] = []  # what was neither answered nor documented
        self.hovers: list[tuple[float, float, float]] = []  # when, ms here, ms on the server

    @property
    def stays(self) -> bool:
        return time.time() < self.until

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """A request; None if no answer came, or if the answer was to come back later."""
        try:
            got = await self.client.request(method, path, **more)
        except httpx.HTTPError as error:
            self.codes["lost"] += 1
            self.wrong.append(f"{method} {path}: {type(error).__name__} {error}")
            return None
        self.codes[str(got.status_code)] += 1
        if got.status_code == 404 and self.image in str(more):  # it was dropped
            self.image = "sample:cat"
        retry = got.headers.get("retry-after")
        if got.status_code >= 500 and (got.status_code != 503 or retry is None):
            self.wrong.append(f"{method} {path}: {got.status_code} {got.text[:200]}")
        if retry is not None:
            await asyncio.sleep(float(retry))
            return None
        return got if got.status_code < 400 else None

    # ----------------------------------------------------------------------------------------------------------- acts

    async def upload(self) -> None:
        """A photo that the server has not seen: bytes after the end of a JPEG change its identity, and nothing else."""
        held = self.chance.choice(self.photos) + self.chance.randbytes(16)
        got = await self.ask("POST", "/api/images", files={"file": ("x.jpg", held)})
        if got is not None:
            self.image = got.json()["id"]
            await self.ask("GET", f"/api/images/{self.image}/view")
            await self.ask("POST", "/api/predict", json={"image": self.image})

    async def job(self, path: str, body: dict[str, Any], leave: str | None = None) -> None:
        """Start a job and hear it to its end; `leave`: cancel it, or close the connection in the middle."""
        got = await self.ask("POST", path, json=body)
        if got is None:
            return
        job = got.json()["job"]
        if leave is not None:
            await self.listen(job, most=1)
            if leave == "cancel":
                await self.ask("DELETE", f"/api/jobs/{job}")
            else:
                await asyncio.sleep(4)  # longer than the grace: it ends unheard
        ended = await self.listen(job)
        self.jobs[ended or "lost"] += 1
        if ended is None:
            self.wrong.append(f"{path}: the stream of job {job} has no end")

    async def listen(self, job: str, most: int | None = None) -> str | None:
        """The last event of a job's stream; stop listening after `most` events."""
        name, heard = None, 0
        try:
            async with self.client.stream("GET", f"/api/jobs/{job}/events") as stream:
                self.codes[str(stream.status_code)] += 1
                async for line in stream.aiter_lines():
                    if line.startswith("event: "):
                        name, heard = line[7:], heard + 1
                    elif name == "map" and line.startswith("data: "):
                        self.maps = [*self.maps[-3:], json.loads(line[6:])["id"]]
                    if most is not None and heard >= most:
                        break
        except httpx.HTTPError as error:
            self.codes["lost"] += 1
            self.wrong.append(f"the stream of a job: {type(error).__name__} {error}")
        return name if name in LAST else None

    async def explain(self, leave: str | None = None) -> None:
        methods = [{"name": name} for name in self.chance.sample(QUICK, 2)]
        await self.job("/api/explain", {"image": self.image, "methods": methods}, leave)
        for one in self.maps[-2:]:
            await self.ask("GET", f"/api/maps/{one}")

    async def leave(self) -> None:
        await self.explain(self.chance.choice(["cancel", "close"]))

    async def erase(self) -> None:
        removed = self.chance.sample(range(PATCHES), PATCHES - 1)
        for count in (5, 20, 60):
            await self.ask("POST", "/api/erase", json={"image": self.image, "removed": removed[:count]})

    async def slide(self) -> None:
        for step in range(5):
            await self.ask("POST", "/api/rollout", json={"image": self.image, "discard": step / 6})

    async def features(self) -> None:
        layer = self.chance.randrange(LAYERS)
        await self.ask("GET", "/api/features", params={"image": self.image, "layer": layer})
        for _ in range(3):
            asked = {"image": self.image, "layer": layer, "patch": self.chance.randrange(PATCHES)}
            await self.ask("GET", "/api/features/similarity", params=asked)

    async def measure(self) -> None:
        if self.maps:
            metric = self.chance.choice(["deletion", "insertion"])
            await self.job("/api/curves", {"maps": self.maps[-1:], "metric": metric, "steps": 8, "random": 1})

    async def heads(self) -> None:
        await self.job("/api/inside", {"image": self.image, "target": "top-1", "samples": 4})

    async def draw(self) -> None:
        if self.maps:
            await self.ask("POST", "/api/figure", json={"maps": self.maps[-1:]})
            await self.ask("POST", "/api/maps.npz", json={"maps": self.maps})

    async def concept(self) -> None:
        files = [("files", (f"{i}.jpg", self.chance.choice(self.photos[:2]))) for i in range(3)]
        got = await self.ask("POST", "/api/concepts", data={"name": "thing"}, files=files)
        if got is not None:
            await self.ask("DELETE", f"/api/concepts/{got.json()['id']}")

    async def nonsense(self) -> None:
        held, some = b"\x89PNG\r\n\x1a\n" + self.chance.randbytes(2000), self.chance.randbytes
        await self.ask("POST", "/api/images", files={"file": ("x.png", held)})
        await self.ask("POST", "/api/explain", content=some(100))
        await self.ask("GET", f"/api/maps/{some(12).hex()}")
        await self.ask("GET", f"/{some(8).hex()}", headers={"Host": self.chance.choice(["evil.example", "localhost"])})

    # ------------------------------------------------------------------------------------------------------- visitors

    async def busy(self) -> None:
        acts: dict[Callable[[], Awaitable[None]], int] = {
            self.upload: 20,
            self.explain: 28,
            self.leave: 8,
            self.erase: 10,
            self.slide: 8,
            self.features: 8,
            self.measure: 4,
            self.heads: 2,
            self.draw: 5,
            self.concept: 2,
            self.nonsense: 5,
        }
        while self.stays:
            await asyncio.sleep(min(self.chance.expovariate(1 / THINKS), 4 * THINKS))
            (act,) = self.chance.choices([*acts], [*acts.values()])
            if self.stays:
                await act()

    async def steady(self) -> None:
        while self.stays:
            method = {"name": self.chance.choice(STEADY)}
            await self.job("/api/explain", {"image": self.image, "methods": [method]})
            await self.upload()

    async def hovering(self) -> None:
        await asyncio.sleep(self.chance.uniform(0, 3))
        turn = 0
        while self.stays:
            if turn % 5 == 0:
                await self.upload()
                await self.ask("POST", "/api/attention", json={"image": self.image})
            turn += 1
            layer, head = self.chance.randrange(LAYERS), self.chance.choice(["mean", "0", "2"])
            for _ in range(MOVES):
                began = time.perf_counter()
                await self.hover(layer, head)
                await asyncio.sleep(max(0.0, EVERY - (time.perf_counter() - began)))
            await asyncio.sleep(self.chance.uniform(1, 4))

    async def hover(self, layer: int, head: str) -> None:
        asked = {"image": self.image, "layer": layer, "head": head, "token": self.chance.randrange(PATCHES)}
        asked["direction"] = self.chance.choice(["reads", "read_by"])
        began = time.perf_counter()
        got = await self.ask("GET", "/api/attention/row", params=asked)
        took = 1000 * (time.perf_counter() - began)
        if got is not None:
            self.hovers.append((time.time(), took, float(got.headers["server-timing"].partition("dur=")[2])))


async def crowd(args: argparse.Namespace, photos: list[bytes]) -> dict[str, Any]:
    all_of_them = [Visitor(args.home, args.first + i, photos, args.until) for i in range(args.count)]
    await asyncio.gather(*(getattr(one, args.kind)() for one in all_of_them))
    for one in all_of_them:
        await one.client.aclose()
    codes: Counter[str] = sum((one.codes for one in all_of_them), Counter())
    jobs: Counter[str] = sum((one.jobs for one in all_of_them), Counter())
    wrong = [said for one in all_of_them for said in one.wrong]
    hovers = [found for one in all_of_them for found in one.hovers]
    return {"codes": codes, "jobs": jobs, "wrong": wrong, "hovers": hovers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["busy", "steady", "hovering"])
    parser.add_argument("home", help="the server's address")
    parser.add_argument("photos", type=Path, help="a folder of photos to upload")
    parser.add_argument("--first", type=int, default=0, help="the number of the first visitor")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--until", type=float, help="when to leave, in seconds since 1970")
    args = parser.parse_args()
    photos = [path.read_bytes() for path in sorted(args.photos.glob("*.jpg"))]
    json.dump(asyncio.run(crowd(args, photos)), sys.stdout)


if __name__ == "__main__":
    main()
