"""A leaderboard's files: rows for programs, a table for spreadsheets, settings, curves, and the page."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._support.arrays import plain
from vitreous._support.files import write_whole
from vitreous._support.marks import FORMAT, KEY, identity_of
from vitreous._support.statistics import LEVEL, TIMES, Summary
from vitreous._support.words import finite
from vitreous.version import VERSION

if TYPE_CHECKING:
    import pyarrow

    from vitreous.evaluation.results import Board

PARTIAL = "leaderboard.partial.csv"
WRITTEN = ("leaderboard.json", "leaderboard.parquet", "leaderboard.csv", "curves.parquet", "report.html", PARTIAL)
OF_METHODS = ("mean_rank", "seconds", "forwards", "verdict")  # columns that are the same for every metric
LIBRARIES = ("torch", "timm", "transformers", "numpy")
FIELDS = ("image", "label", "target", "method", "metric", "value", "seconds", "note")


class Log:
    """Appends rows to a file during a run, so that finished work survives any interruption."""

    def __init__(self, board: Board, folder: Path) -> None:
        self.board, self.path = board, folder / PARTIAL
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(csv_text([], FIELDS), encoding="utf-8")
        self.written = board.measured.copy()

    def __call__(self, numbers: list[int]) -> None:
        new = self.board.measured & ~self.written
        rows = [row for m, which in enumerate(new) for row in self.board.rows_of(m, which.nonzero()[0].tolist())]
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(csv_text(rows, FIELDS, head=False))
        self.written |= new

    def drop(self) -> None:
        """Remove the file: its rows are not wanted."""
        self.path.unlink(missing_ok=True)


def write_all(board: Board, folder: Path) -> list[Path]:
    """Write every file atomically, the page last."""
    from vitreous.evaluation.report.leaderboard import page

    summary = board.summary()
    written = {
        "leaderboard.parquet": parquet(rows_table(board)),
        "leaderboard.csv": csv_text(summary_rows(board, summary)).encode(),
        "curves.parquet": parquet(curves_table(board)),
        "leaderboard.json": json.dumps(told(board, summary), indent=2, ensure_ascii=False).encode(),
        "report.html": page(board, summary).encode(),
    }
    for name, content in written.items():
        write_whole(folder / name, content)
    (folder / PARTIAL).unlink(missing_ok=True)
    return [folder / name for name in written]


def csv_text(rows: Iterable[Mapping[str, Any]], fields: Iterable[str] | None = None, head: bool = True) -> str:
    """Rows as CSV; columns are named as in the first row unless given."""
    listed = list(rows)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(fields or (listed[0] if listed else ())), lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(listed)
    return buffer.getvalue()


def parquet(table: pyarrow.Table) -> bytes:
    from pyarrow import parquet as written

    buffer = io.BytesIO()
    written.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def rows_table(board: Board) -> pyarrow.Table:
    """One row for each image, method and metric."""
    import pyarrow as pa

    word = pa.dictionary(pa.int32(), pa.string())
    kinds = {"label": pa.int64(), "value": pa.float64(), "seconds": pa.float64()}
    schema = pa.schema([(name, kinds.get(name, word)) for name in FIELDS])
    columns: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for row in board.rows():
        for name in FIELDS:
            columns[name].append(row[name])
    return pa.table({name: pa.array(columns[name], schema.field(name).type) for name in FIELDS}, schema)


def curves_table(board: Board) -> pyarrow.Table:
    """The mean curve of every method and metric, point by point."""
    import pyarrow as pa

    points = [
        (method, metric, *point)
        for (method, metric), kept in board.curves.items()
        for point in zip(kept.at, kept.mean.tolist(), *kept.interval.tolist(), kept.count.tolist())
    ]
    names = ("method", "metric", "at", "mean", "low", "high", "images")
    kinds = (*[pa.dictionary(pa.int32(), pa.string())] * 2, *[pa.float32()] * 4, pa.int32())
    columns = list(zip(*points)) or [()] * len(names)
    return pa.table({name: pa.array(column, kind) for name, column, kind in zip(names, columns, kinds)})


def summary_rows(board: Board, summary: Summary) -> list[dict[str, Any]]:
    """One for each method and metric, best mean rank first."""
    return [
        {
            **about,
            "metric": metric,
            "better": summary.better[k],
            "mean": finite(summary.mean[m, k]),
            "low": finite(summary.low[m, k]),
            "high": finite(summary.high[m, k]),
            "images": int(summary.count[m, k]),
            "gain_over_random": finite(summary.gain[m, k]),
            "gain_low": finite(summary.gain_low[m, k]),
            "gain_high": finite(summary.gain_high[m, k]),
            "pairs": int(summary.pairs[m, k]),
            "rank": finite(summary.rank[m, k]),
        }
        for m, about in zip(summary.order, method_rows(board, summary))
        for k, metric in enumerate(summary.metrics)
    ]


def method_rows(board: Board, summary: Summary) -> list[dict[str, Any]]:
    """One for each method, best mean rank first."""
    costs = board.costs()
    return [
        {
            "method": name,
            "mean_rank": finite(summary.mean_rank[m]),
            "seconds": finite(costs[name].seconds) if name in costs else None,
            "forwards": finite(costs[name].ratio) if name in costs else None,
            "verdict": summary.verdict(m),
        }
        for m in summary.order
        for name in [summary.methods[m]]
    ]


def told(board: Board, summary: Summary) -> dict[str, Any]:
    """Everything needed to run it again, and what came out, as JSON."""
    about = board.about
    return {
        KEY: FORMAT,
        "identity": identity(board),
        "model": {
            "name": about.name,
            "fingerprint": about.fingerprint,
            "device": about.device,
            "dtype": about.dtype,
            "image_size": list(about.size),
            "accuracy": board.accuracy,
        },
        "data": {
            "source": board.data.source,
            "images": len(board.data),
            "done": int(board.done.sum()),
            "masks": sum(sample.mask is not None for sample in board.data.samples),
            "labels": sum(sample.label is not None for sample in board.data.samples),
        },
        "settings": settings(board),
        "finished": board.finished,
        "forward_seconds": finite(board.forward),
        "judged": [metric for metric, judged in zip(summary.metrics, summary.judged) if judged],
        "methods": method_rows(board, summary),
        "table": [{key: row[key] for key in row if key not in OF_METHODS} for row in summary_rows(board, summary)],
        "notes": board.notes(),
        "failures": board.failures(),
        "versions": {"vitreous": VERSION, "python": platform.python_version(), **versions()},
    }


def settings(board: Board) -> dict[str, Any]:
    plan = board.plan
    return {
        "target": str(plan.target) if plan.target is not None else "label, else top-1",
        "seed": plan.seed,
        "resamples": TIMES,
        "level": LEVEL,
        "methods": {name: plain(asked.values) for name, asked in plan.methods.items()},
        "metrics": {name: plain(asked.values) for name, asked in plan.metrics.items()},
    }


def identity(board: Board) -> str:
    """A short hash of what the values follow from: model, images, labels, masks and settings."""
    about = board.about
    model = {"fingerprint": about.fingerprint, "dtype": about.dtype, "size": about.size}
    return identity_of({"model": model, "data": board.data.fingerprint, "version": VERSION, **settings(board)})


def versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version_of(library)
        except PackageNotFoundError:
            continue
    return found
