"""Hugging Face data sets on disk, written by `save_to_disk`: one image per row."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitreous._support.optional import needs
from vitreous.errors import InputError, one_line
from vitreous.images.entries import LABEL, MASK, Entry, Found, read_label
from vitreous.images.pictures import Stored

INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"


@dataclass(frozen=True, slots=True)
class Row(Stored):
    """One row of a saved data set."""

    folder: Path
    mark: str  # the data set's fingerprint: if it changes, the files are opened again
    column: str
    number: int

    def read_bytes(self) -> bytes:
        held = open_column(self.folder, self.mark, self.column)[self.number][self.column] or {}
        if held.get("bytes") is not None:
            return bytes(held["bytes"])
        if not held.get("path"):
            raise InputError(f"{self}: this row contains no image")
        return Path(held["path"]).read_bytes()

    @property
    def stamp(self) -> str:
        return f"{self.mark} {self.column} {self.number}"

    @property
    def home(self) -> Path:
        return self.folder

    def __str__(self) -> str:
        return f"{self.folder}/row {self.number:06}"


def is_saved(folder: Path) -> bool:
    """Was this folder written by `save_to_disk`?"""
    return (folder / SPLITS).is_file() or ((folder / INFO).is_file() and (folder / STATE).is_file())


def read_saved(folder: Path) -> Found:
    """The rows of a data set, or of its only split."""
    folder = one_split(folder) if (folder / SPLITS).is_file() else folder
    state = read_json(folder / STATE)
    mark = str(state.get("_fingerprint"))
    saved = open_saved(folder, mark) if state.get("_data_files") else ()  # datasets cannot open an empty one
    if not len(saved):
        raise InputError(f"{folder}: this data set has no rows")
    image, mask = image_columns(saved, folder)
    labels, classes = read_labels(saved)
    entries = []
    for row, (name, label) in enumerate(zip(row_names(saved, image), labels)):
        where = None if mask is None else Row(folder, mark, mask, row)
        entries.append(Entry(Row(folder, mark, image, row), name, label, where))
    return Found(entries, classes=classes)


def one_split(folder: Path) -> Path:
    splits = [str(split) for split in read_json(folder / SPLITS).get("splits", ())]
    if len(splits) != 1:
        shown = next((split for split in splits if split.startswith(("val", "test"))), *splits[:1] or ["SPLIT"])
        raise InputError(f"{folder}: has the splits {', '.join(splits) or '(none)'}; name one, e.g. {folder / shown}")
    return folder / splits[0]


def read_json(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({one_line(error, 100)}); save the data set again") from None
    return told if isinstance(told, dict) else {}


@cache
def open_saved(folder: Path, mark: str) -> Any:
    """Open a data set, once per process, without the output format it was saved with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = needs("datasets", "hf")
        try:
            with no_bars(datasets):
                found = datasets.load_from_disk(str(folder)).with_format(None)
            found.data.table.validate(full=True)  # or a damaged file would end the whole process
            return found
        except Exception as error:  # pyarrow and datasets raise all kinds of errors
            raise InputError(f"{folder}: cannot be read as a saved data set ({one_line(error, 100)})") from None


@cache
def open_column(folder: Path, mark: str, column: str) -> Any:
    """One column of images, as encoded bytes."""
    import datasets

    return open_saved(folder, mark).select_columns([column]).cast_column(column, datasets.Image(decode=False))


@contextmanager
def no_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def image_columns(saved: Any, folder: Path) -> tuple[str, str | None]:
    """The first column of images, and the column of masks if there is one."""
    import datasets

    columns = [name for name, feature in saved.features.items() if isinstance(feature, datasets.Image)]
    mask = next((name for name in columns if name.lower() in MASK), None)
    image = next((name for name in columns if name != mask), None)
    if image is None:
        raise InputError(
            f"{folder}: no column of type Image; it has {', '.join(saved.features)} (see datasets' cast_column)"
        )
    return image, mask


def row_names(saved: Any, column: str) -> list[str]:
    """Names of rows: the stored file name if it is unique, else the row number."""
    import pyarrow.compute

    paths = pyarrow.compute.struct_field(saved.data.column(column), "path").to_pylist()
    names = [re.split(r"[/\\]", path or "")[-1] for path in paths]
    count = Counter(names)
    return [name if name and count[name] == 1 else f"row {row:06}" for row, name in enumerate(names)]


def read_labels(saved: Any) -> tuple[list[int | str | None], tuple[str, ...]]:
    """The label of each row (a name if classes have names), and the names of the classes."""
    import datasets

    known = saved.features
    named = [name for name, feature in known.items() if isinstance(feature, datasets.ClassLabel)]
    plain = [
        n for n, f in known.items() if isinstance(f, datasets.Value) and re.match("u?int|(large_)?string", f.dtype)
    ]
    column = first_of(named) or next(iter(named), None) or first_of(plain)
    if column is None:
        return [None] * len(saved), ()
    values = saved.data.column(column).to_pylist()
    if column in plain:
        return [None if value is None else read_label(str(value)) for value in values], ()
    classes = tuple(known[column].names or ())
    return [label_of(value, classes) for value in values], classes


def label_of(value: int | None, classes: Sequence[str]) -> int | str | None:
    """The name of a class, or its number if it has none."""
    if value is None or value < 0:
        return None
    return read_label(classes[value]) if value < len(classes) else value


def first_of(columns: Sequence[str]) -> str | None:
    known = {name.lower(): name for name in columns}
    return next((known[name] for name in LABEL if name in known), None)
