"""What figures cost: drawn as pixels and by matplotlib, in turns, and the share of writing in `vitreous explain`.

    python benchmarks/figures.py [--images 20] [--rounds 5] [--method gae] [--whole]

The share is 1 − (time with --format none) / (time with png and npz), both in this process, in turns, after a first run;
in CPU time it does not depend on what else the machine does, and counts what the threads of the writer do meanwhile.
With --whole, it is that of whole commands, which also load torch and the model.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from statistics import median

import typer

import vitreous
from vitreous.cli import explain
from vitreous.plot.figure import explanation_figure, rendered
from vitreous.plot.sheet import DPI, Sheet

Explains = Callable[[Path, str | None, Path, tuple[str, ...]], None]
PHOTOS = Path(vitreous.__file__).parent / "assets" / "photos"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default=None, help="default: the default method and gae")
    parser.add_argument("--whole", action="store_true", help="time whole commands only")
    asked = parser.parse_args()
    if asked.whole:
        for method in [asked.method] if asked.method else [None, "gae"]:
            print(share_of_writing(command, method, asked.images, asked.rounds), flush=True)
        return
    model = vitreous.load()
    for line in figure_costs(model, asked.rounds):
        print(line, flush=True)
    for method in [asked.method] if asked.method else [None, "gae"]:
        print(share_of_writing(partial(explained_photos, model), method, asked.images, asked.rounds), flush=True)


def figure_costs(model: vitreous.Model, rounds: int) -> list[str]:
    """A figure of one map from numbers to the bytes of a PNG file."""
    one = vitreous.explain(model, PHOTOS / "cat.jpg", "gae")
    top = [(model.label(number), 0.1) for number in range(5)]

    def sheet() -> Sheet:
        return explanation_figure([[one]], top=top, rows=["tabby 0.62"])

    def by_matplotlib() -> bytes:
        buffer = io.BytesIO()
        figure = sheet().figure
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", bbox_inches=figure.bbox_inches)
        return buffer.getvalue()

    ways: dict[str, Callable[[], bytes]] = {
        "matplotlib": by_matplotlib,
        "pixels": lambda: rendered(sheet(), "png"),
        "svg": lambda: rendered(sheet(), "svg"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(timed(way)[0])
    costs = {name: median(each[1:]) for name, each in times.items()}
    lines = [
        f"{name:<12}{1000 * cost:7.1f} ms a figure, {len(ways[name]()) // 1000} kB" for name, cost in costs.items()
    ]
    return [*lines, f"pixels are {costs['matplotlib'] / costs['pixels']:.1f} times as quick as matplotlib"]


def share_of_writing(explains: Explains, method: str | None, images: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "in")
        photos.mkdir()
        for number, photo in zip(range(images), sorted(PHOTOS.glob("*.jpg")) * images):
            shutil.copy(photo, photos / f"{number:03}-{photo.name}")
        forms: dict[str, tuple[str, ...]] = {"none": (), "written": ("png", "npz")}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
        for turn in range(rounds + 1):
            for name, kinds in forms.items():
                out = Path(folder, f"{name}{turn}")
                times[name].append(timed(lambda out=out, kinds=kinds: explains(photos, method, out, kinds)))
    told = []
    for place, what in enumerate(("time", "CPU time")):
        none, whole = (median(each[place] for each in times[name][1:]) for name in ("none", "written"))
        told.append(
            f"{what} {whole:.2f} s, {none:.2f} s without figures and maps: {max(0.0, 1 - none / whole):.0%} writing"
        )
    return f"{method or 'the default'}, {images} photos: {'; '.join(told)}"


def explained_photos(
    model: vitreous.Model, photos: Path, method: str | None, out: Path, kinds: tuple[str, ...]
) -> None:
    with redirect_stdout(io.StringIO()), suppress(typer.Exit):
        explain.run(
            **{"sources": [str(photos)], "load": lambda: model, "methods": method, "target": None, "settings": {}},
            **{"limit": None, "out": out, "formats": kinds, "overwrite": False, "cells": False, "as_json": True},
        )


def command(photos: Path, method: str | None, out: Path, kinds: tuple[str, ...]) -> None:
    options = ["--format", ",".join(kinds) or "none", *(["--method", method] if method else [])]
    line = [sys.executable, "-m", "vitreous", "explain", str(photos), "--out", str(out), *options]
    subprocess.run(line, check=True, capture_output=True)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of all threads and finished processes together."""
    begun = time.perf_counter(), sum(os.times()[:4])
    call()
    return time.perf_counter() - begun[0], sum(os.times()[:4]) - begun[1]


if __name__ == "__main__":
    main()
