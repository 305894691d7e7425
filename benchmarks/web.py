"""How quick the page's server is, and what it does under load. Needs the extra `web`, and httpx.

    python benchmarks/web.py latency [--model NAME] [--weights FILE] [--repeats 30]
    python benchmarks/web.py load [--clients 64] [--seconds 600] [--memory 2GB] [--serve "--workers 2"]

latency   The first map of a photo that the server has never seen (from the request to the map's event; and with upload
          and download), in forward passes of the same model on the same machine, interleaved; and how long the server
          itself takes to answer a hover.
load      `vitreous serve` under many visitors: answers, jobs, memory and the time of a hover; benchmarks/web_load.py
          says what must hold, benchmarks/web_visitors.py what the visitors do. Needs Linux.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import torch
import web_load
from PIL import Image

import vitreous
from vitreous.cli.serve import listen

CAT = Path(vitreous.__file__).parent / "assets" / "photos" / "cat.jpg"


# ----------------------------------------------------------------------------------------------------------- the server


def serve(args: argparse.Namespace) -> None:
    """In a process of its own: one model, no limit on rates."""
    import uvicorn

    from vitreous.web.app import create_app
    from vitreous.web.engine import Engine, Source
    from vitreous.web.limits import Limits
    from vitreous.web.server import settings

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["latency", "load", "serve"])
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--memory", default="2GB", help="as for vitreous serve")
    parser.add_argument("--method", default="rollout")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--serve", default="", help="more words for vitreous serve")
    parser.add_argument("--out", type=Path, default=web_load.RESULTS, help="the file for the result of load")
    args = parser.parse_args()
    {"latency": latency, "load": web_load.load, "serve": serve}[args.what](args)


if __name__ == "__main__":
    main()
