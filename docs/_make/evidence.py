"""Numbers and limits that are written in documents, each in one place: tables of results, costs, known limits."""

from __future__ import annotations

import re
from functools import cache

from _make.places import DOCS, ROOT

Table = dict[str, dict[str, str]]  # {row: {column: what it says}}
RESULTS = ROOT / "benchmarks" / "results"
MEDIAN = "median (quartiles)"

BOARDS = {  # the headings of the tables in results.md
    "500 ImageNet photos, one for every second class: faithfulness": "500 ImageNet photos",
    "The costly methods, on 244 of these photos": "244 ImageNet photos",
    "192 pets with masks: faithfulness": "192 pets",
    "The same pets: localisation": "192 pets",
    "500 ImageNet photos: pixels hidden instead of tokens removed": "500 ImageNet photos",
    "192 pets: pixels hidden instead of tokens removed": "192 pets",
}


def sections(text: str) -> dict[str, str]:
    """What stands under each heading."""
    parts = re.split(r"^#{2,3} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def tables(text: str) -> list[Table]:
    """All tables of a document."""
    found = re.findall(r"^\|.+\|\n\|[ :|-]+\|\n(?:\|.+\|\n?)+", text, flags=re.MULTILINE)
    return [read_table(one) for one in found]


def read_table(text: str) -> Table:
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in text.strip().splitlines())
    names = [name.rstrip(" ↑↓") for name in head]
    return {row[0].strip("`"): dict(zip(names[1:], map(unbroken, row[1:]))) for row in rows}


def unbroken(cell: str) -> str:
    """A number stays on one line with its interval and its mark."""
    return re.sub(" (?=[±=▼])", "\N{NO-BREAK SPACE}", cell)


@cache
def boards() -> dict[str, Table]:
    """Every method's measurements on DeiT-Tiny, as results.md tells them."""
    found = sections((DOCS / "results.md").read_text(encoding="utf-8"))
    return {heading: tables(found[heading])[0] for heading in BOARDS}


def measured(method: str) -> list[tuple[str, str, str, str]]:
    """Pictures, metric, this method's value and that of the random control."""
    rows: dict[tuple[str, str], tuple[str, str, str, str]] = {}
    for heading, board in boards().items():
        for metric, value in board.get(method, {}).items():
            if metric not in ("rank", "forwards"):
                pictures = BOARDS[heading]
                rows.setdefault((pictures, metric), (pictures, metric, value, board["random"][metric]))
    return list(rows.values())


def standings(metric: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Pictures, and every method's value of this metric, as the tables list them."""
    found = [(BOARDS[heading], [(name, row[metric]) for name, row in board.items() if metric in row])
             for heading, board in boards().items()]  # fmt: skip
    return [(pictures, values) for pictures, values in found if values]


def forwards(method: str) -> str | None:
    """Of one image, in plain forward passes on a GPU."""
    found = [board[method] for board in boards().values() if method in board]
    return next((row["forwards"] for row in found if "forwards" in row), None)


@cache
def cpu_costs() -> dict[str, str]:
    """The same of DeiT-Tiny on a CPU: medians of benchmarks/results, of a batch of eight where there is one."""
    found: dict[str, str] = {}
    for file in sorted(RESULTS.glob("cpu-deit_tiny*-batch*.md")):
        for table in tables(file.read_text(encoding="utf-8")):
            found |= {row.split(",")[0]: cells[MEDIAN].split()[0] for row, cells in reversed(table.items())}
    return found


@cache
def limits() -> dict[str, str]:
    """What is known to be weak in each method and metric."""
    found = sections((DOCS / "limits.md").read_text(encoding="utf-8"))
    return {name.strip("`"): text.strip() for name, text in found.items() if name.startswith("`")}
