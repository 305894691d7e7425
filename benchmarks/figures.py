"""The rate of `vitreous explain` beside that of the bare method, and what figures cost: as pixels and by matplotlib.

    python benchmarks/figures.py [--images 100] [--rounds 5] [--photos FOLDER] [--method gae] [--model M --weights W]
    python benchmarks/figures.py --whole [--images 20]

The bare method runs on tensors that are prepared. The command reads, prepares, explains and writes the maps (npz), or
draws the figures too (png,npz). All in one process with the model loaded, in turns, after a first round; the fastest
round of each counts, and CPU time counts the threads that write. --whole times whole commands, which also load torch
and the model, with and without writing.
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

import torch
import typer

import vitreous
from vitreous.cli import explain
from vitreous.cli.arguments import Beside, PlaceOfMaps
from vitreous.cli.results import BATCH
from vitreous.images import pictures
from vitreous.plot.figure import explanation_figure, rendered
from vitreous.plot.sheet import DPI, Sheet

Explains = Callable[[Path, str | None, Path, tuple[str, ...]], None]
PHOTOS = Path(vitreous.__file__).parent / "assets" / "photos"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a folder of JPEG files; the packaged ones")
    parser.add_argument("--method", default=None, help="default: the default method and gae")
    parser.add_argument("--model", default=None, help="default: the embedded model")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--whole", action="store_true", help="time whole commands only")
    asked = parser.parse_args()
    methods = [asked.method] if asked.method else [None, "gae"]
    with tempfile.TemporaryDirectory() as folder:
        photos = copied(asked.photos, asked.images, Path(folder, "in"))
        if asked.whole:
            for method in methods:
                print(share_of_writing(command, method, photos, asked.rounds), flush=True)
            return
        model = vitreous.load(asked.model, weights=asked.weights) if asked.model else vitreous.load()
        for line in figure_costs(model, asked.rounds):
            print(line, flush=True)
        for method in methods:
            for line in rates(model, method, photos, asked.rounds):
                print(line, flush=True)


def copied(photos: Path, count: int, into: Path) -> Path:
    """So many images in a folder; the same ones again where there are fewer."""
    into.mkdir()
    for number, photo in zip(range(count), sorted(photos.glob("*.jpg")) * count):
        shutil.copy(photo, into / f"{number:03}-{photo.name}")
    return into


# --------------------------------------------------------------------------------------------------------------- rates


def rates(model: vitreous.Model, method: str | None, photos: Path, rounds: int) -> list[str]:
    """Images a second: the bare method, the command that writes maps, and the one that draws figures too."""
    files = sorted(photos.glob("*.jpg"))
    ready = torch.stack([model.preprocess(pictures.open_file(file).image) for file in files])
    ways: dict[str, Callable[[Path], None]] = {
        "bare method": lambda out: bare(model, method, ready),
        "--format npz": lambda out: explained_photos(model, photos, method, out, ("npz",)),
        "--format png,npz": lambda out: explained_photos(model, photos, method, out, ("png", "npz")),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as out:
                vars(model.preprocess).pop("_boxes", None)  # what a run finds out about the sizes of the images
                times[name].append(timed(partial(way, Path(out))))
    fastest = {name: [min(column) for column in zip(*each[1:])] for name, each in times.items()}
    (clock, cpu), count = fastest["bare method"], len(files)
    lines = [f"{method or 'the default'} of {model.name}, {count} photos:"]
    for name, (time_, work) in fastest.items():
        rate = f"{count / time_:6.1f} images/s, {clock / time_:4.0%} of the bare method"
        lines.append(f"  {name:<17}{rate}; CPU time {1000 * work / count:.0f} ms an image, {cpu / work:.0%}")
    return lines


def bare(model: vitreous.Model, method: str | None, ready: torch.Tensor) -> None:
    for start in range(0, len(ready), BATCH):
        vitreous.explain(model, ready[start : start + BATCH], method)


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


def share_of_writing(explains: Explains, method: str | None, photos: Path, rounds: int) -> str:
    forms: dict[str, tuple[str, ...]] = {"none": (), "written": ("png", "npz")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(rounds + 1):
        for name, kinds in forms.items():
            with tempfile.TemporaryDirectory() as out:
                times[name].append(timed(partial(explains, photos, method, Path(out), kinds)))
    told = []
    for place, what in enumerate(("time", "CPU time")):
        none, whole = (median(each[place] for each in times[name][1:]) for name in ("none", "written"))
        told.append(
            f"{what} {whole:.2f} s, {none:.2f} s without figures and maps: {max(0.0, 1 - none / whole):.0%} writing"
        )
    return f"{method or 'the default'}, {len([*photos.iterdir()])} photos: {'; '.join(told)}"


def explained_photos(
    model: vitreous.Model, photos: Path, method: str | None, out: Path, kinds: tuple[str, ...]
) -> None:
    with redirect_stdout(io.StringIO()), suppress(typer.Exit):
        explain.run(
            sources=[str(photos)],
            load=lambda: model,
            methods=method,
            target=None,
            settings={},
            beside=Beside(),
            cells=False,
            place=PlaceOfMaps(out=out, format=",".join(kinds) or "none", as_json=True),
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
