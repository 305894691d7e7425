"""The load of benchmarks/web.py: the server, its visitors in processes of their own, its memory, and what must hold.

A quarter of the visitors hover, two have long jobs without a pause, the others do all that the page offers with pauses
to think (benchmarks/web_visitors.py says what exactly). The server is `vitreous serve` with its usual limits.

What must hold, else the exit status is 1:

    answers   every request gets one, and no 5xx but a 503 with Retry-After
    jobs      every stream of a job ends with done, cancelled or failed
    memory    resident, of the server and all its child processes: eleven times in the last half (five of ten minutes)
              the visitors rest until all jobs have ended, for their batches of hundreds of megabytes would hide what
              stays (a rest in which a job goes on for 20 seconds does not count); the least squares line through what
              is resident at the end of the rests rises by at most 1 MB a minute. The line through all samples of the
              last half, one a second, is told beside it
    hover     95 of 100 answers come within 100 ms, as the visitor's process sees it, while others compute
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

import vitreous

CAT = Path(vitreous.__file__).parent / "assets" / "photos" / "cat.jpg"
RESULTS = Path(__file__).parent / "results" / "web.json"
SIZES = ((640, 480), (1024, 768), (800, 1200), (1600, 1200))  # of the photos that are uploaded
SLOPE, HOVER = 1.0, 100.0  # MB a minute, ms
WARM = 10.0  # seconds before the hovers count
RESTS, REST = 11, 20.0  # in the last half, and at most so many seconds each
QUIET, IDLE = 4, 0.1  # seconds of quiet that end a rest, with less than so many seconds of a processor in each


# ------------------------------------------------------------------------------------------------------------ processes


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """`vitreous serve`: its address and process."""
    words = [sys.executable, "-m", "vitreous", "serve", "--port", "0", "--memory", args.memory]
    words += ["--model", args.model] if args.model else []
    words += ["--weights", args.weights] if args.weights else []
    words += args.serve.split()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(filter(None, (re.search(r"http://[^/]+", line) for line in process.stdout)))
            yield found[0], process.pid
        finally:
            process.terminate()


def visitors(kind: str, home: str, photos: str, first: int, count: int, until: float) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("web_visitors.py"))
    words = [sys.executable, script, kind, home, photos, "--first", str(first), "--count", str(count)]
    return subprocess.Popen([*words, "--until", str(until)], stdout=subprocess.PIPE, text=True)


def write_photos(folder: Path) -> None:
    image = Image.open(CAT).convert("RGB")
    for number, size in enumerate(SIZES):
        held = io.BytesIO()
        image.resize(size).save(held, "JPEG", quality=85)
        (folder / f"{number}.jpg").write_bytes(held.getvalue())


# --------------------------------------------------------------------------------------------------------------- memory


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found, parents = [pid], dict[int, int]()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def state(pid: int) -> dict[str, float]:
    """Memory in MB, threads and open files of a process and its descendants."""
    total: Counter[str] = Counter()
    for one in family(pid):
        try:
            told = Path(f"/proc/{one}/status").read_text()
            total["files"] += len(os.listdir(f"/proc/{one}/fd"))
        except OSError:
            continue
        total["kB"] += int((re.findall(r"VmRSS:\s+(\d+)", told) or ["0"])[0])
        total["threads"] += int(re.findall(r"Threads:\s+(\d+)", told)[0])
    return {"MB": round(total["kB"] / 1024, 1), "threads": total["threads"], "files": total["files"]}


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Of the least squares line, for a minute, with its standard error (of independent samples)."""
    x, y = (times - times.mean()) / 60, values - values.mean()
    rise = float(x @ y / (x @ x))
    return rise, float(np.sqrt(((y - rise * x) ** 2).sum() / (len(x) - 2) / (x @ x)))


# ----------------------------------------------------------------------------------------------------------------- load


def load(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as photos, server(args) as (home, pid):
        write_photos(Path(photos))
        httpx.get(f"{home}/api/info").raise_for_status()
        before = state(pid)
        samples, rests, told = run(args, home, pid, photos)
        time.sleep(5)
        after = state(pid)
        alive = httpx.post(f"{home}/api/predict", json={"image": "sample:cat"}, timeout=60).status_code
    found = summary(args, samples, rests, told) | {"before": before, "after": after, "afterwards": alive}
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if all(found["holds"].values()) else 1)


Sample = tuple[float, dict[str, float]]


def run(
    args: argparse.Namespace, home: str, pid: int, photos: str
) -> tuple[list[Sample], list[Sample], list[dict[str, Any]]]:
    """The memory at every second and at every rest, and what each process of visitors tells."""
    until = time.time() + args.seconds
    hovering = max(1, args.clients // 4)
    kinds = {"hovering": hovering, "steady": 2, "busy": max(0, args.clients - hovering - 2)}
    first, started = 0, []
    for kind, count in kinds.items():
        started.append(visitors(kind, home, photos, first, count, until))
        first += count
    samples, rests, began, tried = list[Sample](), list[Sample](), time.time(), 0
    while time.time() < until:
        samples.append((time.time() - began, state(pid)))
        if len(samples) % max(1, int(args.seconds / 10)) == 1:
            print(f"{samples[-1][0]:5.0f} s  {samples[-1][1]}", flush=True)
        half = args.seconds / 2
        if samples[-1][0] >= half * (1 + tried / RESTS):
            tried += 1
            rested = resting(started, pid, began, min(REST, args.seconds / 30))
            rests += [] if rested is None else [rested]
        time.sleep(min(1.0, max(0.0, samples[-1][0] + 1 - (time.time() - began))))
    return samples, rests, [json.loads(process.communicate(timeout=300)[0]) for process in started]


def resting(visitors: list[subprocess.Popen[str]], pid: int, began: float, most: float) -> Sample | None:
    """What is resident when nobody asks and nothing has been computed for four seconds; None if a job runs longer."""
    for process in visitors:
        process.send_signal(signal.SIGSTOP)
    until, used, quiet = time.time() + most, worked(pid), 0
    while time.time() < until and quiet < QUIET:
        time.sleep(1)
        before, used = used, worked(pid)
        quiet = quiet + 1 if used - before < IDLE else 0
    found = time.time() - began, state(pid)
    for process in visitors:
        process.send_signal(signal.SIGCONT)
    return found if quiet == QUIET else None


def worked(pid: int) -> float:
    """Seconds of a processor that a process and its descendants have used."""
    total = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def summary(
    args: argparse.Namespace, samples: list[Sample], rests: list[Sample], told: list[dict[str, Any]]
) -> dict[str, Any]:
    codes: Counter[str] = sum((Counter(one["codes"]) for one in told), Counter())
    jobs: Counter[str] = sum((Counter(one["jobs"]) for one in told), Counter())
    wrong = [said for one in told for said in one["wrong"]]
    hovers = np.array([found for one in told for found in one["hovers"]]).reshape(-1, 3)
    hovers = hovers[hovers[:, 0] > hovers[:, 0].min(initial=np.inf) + min(WARM, args.seconds / 4)]
    times, memory = np.array([(when, now["MB"]) for when, now in samples]).T
    late = times >= args.seconds / 2
    rise, error = slope(times[late], memory[late])
    rest, rest_error = (
        slope(*np.array([(when, now["MB"]) for when, now in rests]).T) if len(rests) > 2 else (math.inf, math.inf)
    )
    here, there = (percentiles(hovers[:, column]) for column in (1, 2))
    return {
        "clients": args.clients,
        "seconds": args.seconds,
        "memory limit": args.memory,
        "cores": os.cpu_count(),
        "answers": dict(sorted(codes.items())),
        "jobs": dict(sorted(jobs.items())),
        "wrong": wrong[:20],
        "hovers": len(hovers),
        "hover ms, client": here,
        "hover ms, server": there,
        "MB": [now["MB"] for _, now in samples],
        "slope MB/min": round(rise, 3),
        "its standard error": round(error, 3),
        "MB at rest": [now["MB"] for _, now in rests],
        "slope at rest": round(rest, 3),
        "standard error at rest": round(rest_error, 3),
        "most": {key: max(now[key] for _, now in samples) for key in ("MB", "threads", "files")},
        "holds": {
            "answers": not wrong and codes["lost"] == 0,
            "jobs": jobs["lost"] == 0 and jobs["done"] > 0,
            "memory": rest <= SLOPE,
            "hover": here["95 %"] <= HOVER,
        },
    }


def percentiles(found: np.ndarray) -> dict[str, float]:
    return {f"{share} %": round(float(np.percentile(found, share)), 1) for share in (50, 95, 99)}


def show(found: dict[str, Any]) -> None:
    total, holds = sum(found["answers"].values()), found["holds"]
    said = {
        "answers": f"{total}, {total / found['seconds']:.0f} a second: {found['answers']}",
        "jobs": f"{found['jobs']}",
        "memory": f"{found['slope at rest']:+.2f} ± {found['standard error at rest']:.2f} MB/min at rest "
        f"(all samples: {found['slope MB/min']:+.2f} ± {found['its standard error']:.2f}) over the last half; "
        f"{found['before']['MB']:.0f} MB before, {found['most']['MB']:.0f} most, {found['after']['MB']:.0f} after",
        "hover": f"{found['hovers']} times, ms: {found['hover ms, client']}, on the server {found['hover ms, server']}",
    }
    for name, words in said.items():
        print(f"{name:<8} {'holds' if holds[name] else 'FAILS'}  {words}")
    print(f"threads, files: {found['before']} before, {found['most']} most, {found['after']} after")
    for line in found["wrong"]:
        print(f"  wrong: {line}")
