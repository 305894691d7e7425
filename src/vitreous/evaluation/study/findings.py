"""The findings of a study: a leading sentence, more sentences, tables and charts, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitreous.errors import InputError, nearest

if TYPE_CHECKING:
    import pyarrow
    from markupsafe import Markup
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure that is drawn on demand and saved under its name as PNG and SVG."""

    name: str  # of the files: similarity-by-layer
    title: str
    about: str  # what is seen, in a sentence or two
    draw: Callable[[], Figure]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of formatted words and numbers; the first column names the row."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: str = ""


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything that can be said about the rows of a study."""

    lead: str
    told: Sequence[str] = ()  # one statement each, with its statistics
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    numbers: dict[str, Any] = field(default_factory=dict)  # the same for programs, as JSON can hold it
    body: Callable[[], Markup] | None = None  # a page of its own, where tables and charts are not enough
    frames: dict[str, pyarrow.Table] = field(default_factory=dict)  # further tables, written as NAME.parquet


def joined_frames(found: Mapping[str, Findings], name: str) -> pyarrow.Table:
    """One of the further tables, of all models that have it."""
    import pyarrow as pa

    known = dict.fromkeys(table for one in found.values() for table in one.frames)
    if name not in known:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise InputError(f"this study has no table {name!r}{nearest(name, known)}; {has}")
    return pa.concat_tables([one.frames[name] for one in found.values() if name in one.frames])
