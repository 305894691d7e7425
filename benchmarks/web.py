"""How quick the page's server is, and what it does under load. Needs the extra `web`, and httpx.

    python benchmarks/web.py latency [--model NAME] [--weights FILE] [--repeats 30]
    python benchmarks/web.py load [--clients 64] [--seconds 60] [--memory 2GB]

latency   The first map of a photo that the server has never seen (from the request to the map's event; and with upload
          and download), in forward passes of the same model on the same machine, interleaved; and how long the server
          itself takes to answer a hover.
load      Clients that upload, hover, predict, erase, explain, cancel and send nonsense, as fast as they can, without
          the limit on each client's rate; the server's memory, threads and open files before, meanwhile and after.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

import vitreous
from vitreous.cli.serve import listen, settings

CAT = Path(vitreous.__file__).parent / "assets" / "photos" / "cat.jpg"


# ----------------------------------------------------------------------------------------------------------- the server


def serve(args: argparse.Namespace) -> None:
    """In a process of its own: one model, no limit on rates."""
    import uvicorn

    from vitreous.web.app import create_app
    from vitreous.web.engine import Engine, Source
    from vitreous.web.limits import Limits

    with vitreous.limit_memory(args.memory), listen("127.0.0.1", 0) as listening:
        model = vitreous.load(args.model, args.weights)
        engine = Engine([(model, Source())], Limits(rate=1e9, burst=10**9, own_jobs=8))
        engine.warm()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(create_app(engine), **settings())).run(sockets=[listening])


@contextmanager
def running(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """The server's address and process."""
    words = [sys.executable, __file__, "serve", *(["--model", args.model] if args.model else [])]
    words += ["--weights", args.weights] if args.weights else []
    words += ["--memory", args.memory]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def photo(seed: int) -> bytes:
    """The cat, a little different each time."""
    image = np.array(Image.open(CAT).convert("RGB"))
    image[:8, :8] = np.random.default_rng(seed).integers(0, 256, (8, 8, 3))
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------------------------- latency


def latency(args: argparse.Namespace) -> None:
    model = vitreous.load(args.model, args.weights)
    x = model.prepare([CAT])
    times: dict[str, list[float]] = {"forward": [], "photo sent": [], "first map": [], "whole": []}
    with running(args) as (home, _), httpx.Client(base_url=home, timeout=60) as client:
        for seed in range(args.repeats + 3):
            held = photo(seed)
            began = time.perf_counter()
            with torch.no_grad(), model.still():
                model.run(x)
            times["forward"].append(time.perf_counter() - began)
            for name, seconds in first_map(client, held, args.method).items():
                times[name].append(seconds)
        times = {name: found[3:] for name, found in times.items()}  # without the first few
        forward = statistics.median(times["forward"])
        print(f"{model.name}, {args.method}: one forward {1000 * forward:.1f} ms (median of {args.repeats})")
        for name in ("photo sent", "first map", "whole"):
            found = statistics.median(times[name])
            print(f"  {name:<12} {1000 * found:6.1f} ms = {found / forward:.2f} forwards")
        hover(client)


def first_map(client: httpx.Client, held: bytes, method: str) -> dict[str, float]:
    """Seconds to send a photo, from the question to the map's event, and from the photo to the map's numbers."""
    began = time.perf_counter()
    number = client.post("/api/images", files={"file": ("x.jpg", held)}).json()["id"]
    sent = time.perf_counter()
    job = client.post("/api/explain", json={"image": number, "methods": [{"name": method}]}).json()["job"]
    with client.stream("GET", f"/api/jobs/{job}/events") as response:
        told = next(line for line in response.iter_lines() if '"id"' in line)
    known = time.perf_counter()
    client.get(f"/api/maps/{json.loads(told[6:])['id']}").raise_for_status()
    return {"photo sent": sent - began, "first map": known - sent, "whole": time.perf_counter() - began}


def hover(client: httpx.Client) -> None:
    """What the server says it took, for every layer, some patches, both directions."""
    told = client.get("/api/info").json()["models"][0]
    patches = told["grid"][0] * told["grid"][1]
    for direction in ("reads", "read_by"):
        for head in ("0", "mean"):
            found = []
            for layer in range(told["layers"]):
                for token in range(0, patches, max(1, patches // 20)):
                    asked = {
                        "image": "sample:cat",
                        "layer": layer,
                        "head": head,
                        "token": token,
                        "direction": direction,
                    }
                    found.append(server_time(client.get("/api/attention/row", params=asked)))
            worst = sorted(found)[int(0.99 * len(found))]
            print(
                f"  hover {direction:<8} head {head:<5} median {statistics.median(found):.1f} ms, 99 % {worst:.1f} ms"
            )
    found = []
    for discard in np.linspace(0, 0.95, 20):
        got = client.post("/api/rollout", json={"image": "sample:cat", "discard": float(discard)})
        found.append(server_time(got))
    print(f"  rollout slider           median {statistics.median(found):.1f} ms, most {max(found):.1f} ms")


def server_time(response: httpx.Response) -> float:
    return float(response.raise_for_status().headers["server-timing"].partition("dur=")[2])


# ----------------------------------------------------------------------------------------------------------------- load


def load(args: argparse.Namespace) -> None:
    with running(args) as (home, pid):
        httpx.get(f"{home}/api/info").raise_for_status()
        print(f"before     {state(pid)}")
        codes, peak = asyncio.run(crowd(home, pid, args.clients, args.seconds))
        time.sleep(5)
        print(f"after      {state(pid)}")
        print(f"most       {peak}")
        total = sum(codes.values())
        print(f"{total} answers, {total / args.seconds:.0f} a second: {dict(sorted(codes.items(), key=str))}")
        bad = {code: count for code, count in codes.items() if code == "lost" or (int(code) >= 500 and code != "503")}
        print(f"other than documented: {bad or 'none'}")
        alive = httpx.post(f"{home}/api/predict", json={"image": "sample:cat"}, timeout=60)
        print(f"a question afterwards: {alive.status_code}")


def state(pid: int) -> dict[str, int]:
    """Memory in MB, threads and open files of a process."""
    told = Path(f"/proc/{pid}/status").read_text()
    return {
        "MB": int(re.findall(r"VmRSS:\s+(\d+)", told)[0]) // 1024,
        "threads": int(re.findall(r"Threads:\s+(\d+)", told)[0]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


async def crowd(home: str, pid: int, clients: int, seconds: float) -> tuple[Counter[str], dict[str, int]]:
    codes: Counter[str] = Counter()
    until = time.monotonic() + seconds
    peak = state(pid)

    async def watch() -> None:
        last = 0.0
        while time.monotonic() < until:
            now = state(pid)
            peak.update({key: max(value, peak[key]) for key, value in now.items()})
            if time.monotonic() - last > seconds / 6:
                last = time.monotonic()
                print(f"meanwhile  {now}", flush=True)
            await asyncio.sleep(0.5)

    async def visit(number: int) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=home, timeout=120) as client:
            own = "sample:cat"
            while time.monotonic() < until:
                try:
                    got = await ask(client, chance, own)
                    codes[str(got.status_code)] += 1
                    own = got.json()["id"] if got.status_code == 201 else own
                except httpx.HTTPError:
                    codes["lost"] += 1

    await asyncio.gather(watch(), *(visit(i) for i in range(clients)))
    return codes, peak


async def ask(client: httpx.AsyncClient, chance: random.Random, own: str) -> httpx.Response:
    """One request of a restless visitor."""
    kind = chance.random()
    if kind < 0.15:
        return await client.post("/api/images", files={"file": ("x.jpg", photo(chance.randrange(300)))})
    if kind < 0.55:
        asked: dict[str, Any] = {"image": own, "layer": chance.randrange(12), "token": chance.randrange(196)}
        asked |= {"head": chance.choice(["mean", "0", "2"]), "direction": chance.choice(["reads", "read_by"])}
        return await client.get("/api/attention/row", params=asked)
    if kind < 0.65:
        return await client.post("/api/predict", json={"image": own})
    if kind < 0.72:
        return await client.post("/api/erase", json={"image": own, "removed": chance.sample(range(196), 50)})
    if kind < 0.8:
        return await explain(client, chance, own)
    if kind < 0.85:
        return await client.post(
            "/api/images", files={"file": ("x.png", b"\x89PNG\r\n\x1a\n" + chance.randbytes(2000))}
        )
    if kind < 0.9:
        return await client.post("/api/explain", content=chance.randbytes(100))
    if kind < 0.95:
        return await client.get(f"/api/maps/{chance.randbytes(12).hex()}")
    return await client.get(
        f"/{chance.randbytes(8).hex()}", headers={"Host": chance.choice(["evil.example", "localhost"])}
    )


async def explain(client: httpx.AsyncClient, chance: random.Random, own: str) -> httpx.Response:
    """A job, heard to its end or cancelled."""
    names = chance.sample(["rollout", "cdam", "gae", "attention", "gradcam"], 2)
    got = await client.post("/api/explain", json={"image": own, "methods": [{"name": name} for name in names]})
    if got.status_code != 202:
        return got
    job = got.json()["job"]
    if chance.random() < 0.3:
        return await client.delete(f"/api/jobs/{job}")
    return await client.get(f"/api/jobs/{job}/events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["latency", "load", "serve"])
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--memory", default="2GB", help="as for vitreous serve")
    parser.add_argument("--method", default="rollout")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    {"latency": latency, "load": load, "serve": serve}[args.what](args)


if __name__ == "__main__":
    main()
