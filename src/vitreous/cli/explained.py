"""Writing explanations while the next ones are computed: the files of each image, then the index of the folder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitreous._support.arrays import plain, save_arrays
from vitreous._support.spread import pooled
from vitreous.attribution import Attribution, mark_of
from vitreous.cli.results import Summary, placed
from vitreous.cli.values import NUMBERS
from vitreous.evaluation.report.folder import SIDE, Row, failed_row, rows_of, thumbnail, write_folder
from vitreous.metrics.correlation import correlation, ranks
from vitreous.plot.colour import is_control
from vitreous.plot.figure import explanation_figure, save_figure
from vitreous.plot.panel import Panel
from vitreous.plot.sheet import Picture, Sheet
from vitreous.plot.strip import is_video, save_film

Grid = list[list[Attribution | None]]  # targets × methods
THREADS = 4  # that draw and write, or as many as there are cores
WAITING = 16  # images whose maps wait for a thread


@dataclass(frozen=True)
class Explanation:
    """The maps of one image, and what its figure says."""

    file: Path
    rows: Grid
    heads: list[str]
    top: list[dict[str, Any]]

    @property
    def maps(self) -> dict[str, Attribution]:
        return {key(one): one for row in self.rows for one in row if one is not None}

    def sheet(self, cells: bool) -> Sheet:
        values = any("value" in entry for entry in self.top)
        bars = [(called(entry), share_of(entry)) for entry in self.top]
        return explanation_figure(self.rows, top=bars, rows=self.heads, cells=cells, values=values)

    def shown(self, cells: bool) -> Image.Image | None:
        """The first map on its image as a figure shows it, of the size of a thumbnail."""
        first = next(iter(self.maps.values()))
        if is_video(first):
            return first_map(explanation_figure([[first]], cells=cells))
        photo = first.seen()
        photo.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
        return Panel.of(first, 0, photo, cells, least=SIDE).picture


@dataclass(frozen=True)
class Form:
    """What is written of explanations, and how."""

    kinds: tuple[str, ...]  # endings of the figures, npz for the maps
    overwrite: bool = False
    cells: bool = False
    indexed: bool = True  # whether the folder gets an index and summaries


@dataclass(frozen=True)
class Written:
    """What was written for one image, for the report and for the summary of the folder."""

    entry: dict[str, Any]
    rows: list[Row]


class Writer:
    """Writes explanations in threads of its own; what it has written comes in the order in which it was given."""

    def __init__(self, summary: Summary, form: Form, threads: int | None = None) -> None:
        self.summary, self.form = summary, form
        self.threads = threads or min(THREADS, os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self.threads, "vitreous-writer")
        self.room = BoundedSemaphore(WAITING)
        self.jobs: dict[Path, Future[Written]] = {}
        self.open: list[Future[Written]] = []  # those whose end has not been looked at, so that each is looked at once
        self.claims: list[ExitStack] = []  # that reserve names
        self.files: list[Path] = []  # the index and the summaries
        self.held = 0  # results in the folder, with those of earlier runs

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for what is given; after an interrupt only for files that are being written."""
        self.pool.shutdown(wait=True, cancel_futures=kind is not None and not issubclass(kind, Exception))
        for held in self.claims:  # of what was never begun
            held.close()

    def add(self, one: Explanation, name: str) -> None:
        """Reserve the names of the files now, write them soon; raises if an earlier one could not be written."""
        self.check()
        mark, held = mark_of(one.maps), ExitStack()
        self.claims.append(held)
        endings = [f".{kind}" for kind in sorted(self.form.kinds, key=NUMBERS.__ne__)]  # the maps first
        name = held.enter_context(placed(self.summary, name, endings, mark["identity"], self.form.overwrite))
        names = [f"{name}{ending}" for ending in endings]
        self.submit(one.file, lambda: write(one, mark, self.summary.out, names, self.form.cells, held))

    def make_way(self, device: torch.device) -> None:
        """Before a model computes on all cores of a CPU: wait for the figures.

        Torch's threads wait for one another after every operation, so a core that draws holds all of them up.
        """
        computing = torch.get_num_threads() if device.type == "cpu" else 0
        draws = any(kind != NUMBERS for kind in self.form.kinds)
        if draws and computing > 1 and computing + self.threads > (os.cpu_count() or 1):
            wait(self.open)

    def check(self) -> None:
        """Raise if something could not be written."""
        for job in [job for job in self.open if job.done()]:
            if not job.cancelled() and (error := job.exception()) is not None:
                raise error
            self.open.remove(job)

    def submit(self, file: Path, job: Callable[[], Written]) -> None:
        self.room.acquire()
        try:
            self.jobs[file] = self.pool.submit(job)
        except RuntimeError:  # nothing is begun any more, because something could not be written
            self.check()
            raise
        self.open.append(self.jobs[file])
        self.jobs[file].add_done_callback(self.ended)

    def ended(self, job: Future[Written]) -> None:
        """Make room for another; after an error nothing more is begun."""
        self.room.release()
        if not job.cancelled() and job.exception() is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> None:
        """Wait for everything, then write the index and the summaries."""
        self.collect([job.result() for job in self.jobs.values()])

    def stop(self) -> None:
        """After an interrupt: what is being written is finished, what waits is not written."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        ended = [job for job in self.jobs.values() if not job.cancelled() and job.exception() is None]
        self.collect([job.result() for job in ended])

    def collect(self, written: Sequence[Written]) -> None:
        self.summary.done = [one.entry for one in written]
        rows = [row for one in written for row in one.rows]
        rows += [failed_row(failed["image"], failed["reason"]) for failed in self.summary.failed]
        if written and self.form.indexed:
            self.files, self.held = write_folder(self.summary.out, rows, indexed=bool(self.form.kinds))


def write(
    one: Explanation,
    mark: dict[str, Any],
    folder: Path,
    names: Sequence[str],
    cells: bool,
    held: AbstractContextManager[Any],
) -> Written:
    """Write the files of one image, each atomically; `held` reserves their names."""
    with held:
        maps = one.maps
        arrays = {name: each.map[0].cpu().numpy() for name, each in maps.items()}
        span = {name: {"min": number(values.min()), "max": number(values.max())} for name, values in arrays.items()}
        mark |= {"top": one.top, "range": span, "agreement": agreement(maps)}
        sheet = one.sheet(cells) if any(map(is_figure, names)) else None
        for name in names:
            if is_numbers(name):
                save_arrays(folder / name, arrays, mark)
            elif name.endswith(".gif"):
                save_film(list(maps.values()), folder / name, mark, cells=cells)
            elif sheet is not None:
                save_figure(sheet, folder / name, mark)
        shown = None if not names else one.shown(cells) if sheet is None else first_map(sheet)
    notes = {name: words for name, each in maps.items() if (words := told(each))}
    files = {kind_of(name): str(folder / name) for name in reversed(names)}
    entry = {"image": str(one.file), **files, "top": one.top, "range": span, "notes": notes}
    return Written(entry, rows_of(mark, names, None if shown is None else thumbnail(shown)))


def kind_of(name: str) -> str:
    return "maps" if is_numbers(name) else "film" if name.endswith(".gif") else "figure"


def is_numbers(name: str) -> bool:
    return name.endswith(f".{NUMBERS}")


def is_figure(name: str) -> bool:
    return kind_of(name) == "figure"


def first_map(sheet: Sheet) -> Image.Image | None:
    """The first map on its image, which follows the image."""
    shown = [piece.pixels for piece in sheet.pieces if isinstance(piece, Picture)]
    return shown[1] if len(shown) > 1 and isinstance(shown[1], Image.Image) else None


def key(one: Attribution) -> str:
    """The name of a map in the .npz file: the method, with its target if it has one."""
    return one.method if one.target is None else f"{one.method}@{one.target}"


# ----------------------------------------------------------------------------------------------------------- agreement


def agreement(maps: Mapping[str, Attribution]) -> dict[str, float | None]:
    """The mean rank correlation of all pairs of maps of one image and target, for each map; None if it is alone.

    A method that does not depend on a target belongs to each; controls belong to none. Maps of different sizes are
    compared on the coarser grid.
    """
    judged = {name: one for name, one in maps.items() if not is_control(one.method)}
    first = next((one.target for one in judged.values() if one.target is not None), None)
    means: dict[str | None, float | None] = {}
    for target in dict.fromkeys(one.target or first for one in judged.values()):
        means[target] = mean_correlation([one.map for one in judged.values() if one.target in (target, None)])
    return {name: means[maps[name].target or first] if name in judged else None for name in maps}


def mean_correlation(maps: Sequence[Tensor]) -> float | None:
    least = tuple(min((map.shape[1:] for map in maps), key=math.prod))
    fits = [tuple(map.shape[1:]) == least for map in maps]
    ranked = [ranks(map if fit else pooled(map.float(), least)) for map, fit in zip(maps, fits)]
    pairs = [float(correlation(one, other)) for i, one in enumerate(ranked) for other in ranked[:i]]
    known = [pair for pair in pairs if math.isfinite(pair)]
    return sum(known) / len(known) if known else None


# --------------------------------------------------------------------------------------------------------------- notes


def told(one: Attribution) -> dict[str, Any]:
    """The notes of a method for one image, as far as they are words or numbers, or a list of numbers."""
    notes = {name: values[0] for name, values in plain(one.notes).items() if isinstance(values, list) and values}
    return {name: finite(value) for name, value in notes.items() if is_short(value)}


def is_short(value: Any) -> bool:
    """Whether this is a word, a number or a list of numbers."""
    if isinstance(value, list):
        return all(isinstance(item, int | float) for item in value)
    return isinstance(value, bool | int | float | str)


def finite(value: Any) -> Any:
    """The same with None in place of NaN."""
    if isinstance(value, list):
        return list(map(finite, value))
    return number(value) if isinstance(value, float) else value


def number(value: Any) -> float | None:
    """None in place of NaN, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


def share_of(entry: dict[str, Any]) -> float:
    """The value, the probability or the share of the image of one of the best classes."""
    return float(next(entry[key] for key in ("value", "probability", "area") if key in entry))


def called(entry: Mapping[str, Any]) -> str:
    """The name of a class, and of a detection also its query."""
    return f"{entry['label']} (query {entry['query']})" if "query" in entry else str(entry["label"])
