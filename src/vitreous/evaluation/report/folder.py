"""A folder of explanations as one result: `index.html` to look through, `summary.csv` and `.parquet` to compute with.

One row for each image, method and target. Every row follows from the mark of the files that it names, so a second run
into the same folder adds to what is there, and a lost summary is made again from the figures and maps.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from vitreous._support import marks
from vitreous._support.files import FIGURES, write_whole
from vitreous._support.words import finite
from vitreous.errors import InputError
from vitreous.evaluation.report.files import csv_text
from vitreous.evaluation.report.folder_page import page

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]

INDEX, CSV, PARQUET = "index.html", "summary.csv", "summary.parquet"
WORDS = ("image", "image_sha256", "figure", "maps", "key", "method", "options", "target", "target_label")
NUMBERS = ("target_probability", "min", "max", "agreement", "predicted_probability", "predicted_value")
ABOUT = ("predicted", "notes", "model", "weights", "identity", "vitreous", "error")
FIELDS = (*WORDS, *NUMBERS[:4], "predicted", *NUMBERS[4:], *ABOUT[1:])
THUMBNAIL = "thumbnail"  # in the Parquet file only, and once for each image
SIDE = 144  # pixels of a thumbnail
MARK = b"vitreous"  # in the metadata of the Parquet file
KINDS = (".npz", *FIGURES)


# ---------------------------------------------------------------------------------------------------------------- rows


def rows_of(mark: Mapping[str, Any], files: Sequence[str], thumbnail: bytes | None = None) -> list[Row]:
    """A row for each map of one result. `files`: their names in the folder, maps (.npz) and figures."""
    top = (mark.get("top") or [{}])[0]
    figure = next((file for file in files if not file.endswith(".npz")), None)
    maps = next((file for file in files if file.endswith(".npz")), None)
    rows: list[Row] = []
    for key, told in mark["maps"].items():
        source = (told.get("sources") or [{"name": told["images"][0]}])[0]
        span = mark.get("range", {}).get(key, {})
        row = dict.fromkeys(FIELDS) | {
            "image": source.get("path") or source["name"],
            "image_sha256": source.get("sha256") or source.get("pixels_sha256"),
            **{"figure": figure, "maps": maps, "key": key, "method": told["method"], "target": told["target"]},
            "options": json.dumps(told["options"], ensure_ascii=False),
            "target_label": next(iter(told.get("labels", ())), None),
            "target_probability": next(iter(told.get("probabilities", ())), None),
            **{"min": span.get("min"), "max": span.get("max"), "agreement": mark.get("agreement", {}).get(key)},
            **{"predicted": top.get("label"), "predicted_probability": top.get("probability")},
            "predicted_value": top.get("value"),
            "notes": json.dumps(short_notes(told["notes"]), ensure_ascii=False),
            **{"model": told["model"], "weights": (told.get("weights") or {}).get("digest")},
            **{"identity": mark.get("identity"), "vitreous": str(told.get("vitreous"))},
        }
        rows.append({**row, THUMBNAIL: None if rows else thumbnail})
    return rows


def short_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """What a method says of one image in words or numbers, without its long lists."""
    first = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in notes.items()}
    kept = {name: value for name, value in first.items() if isinstance(value, bool | int | float | str)}
    return {name: finite(value) if isinstance(value, float) else value for name, value in kept.items()}


def failed_row(image: str, reason: str) -> Row:
    return dict.fromkeys((*FIELDS, THUMBNAIL)) | {"image": os.path.abspath(image), "error": reason}


def thumbnail(image: Image.Image) -> bytes:
    """A small image for the index."""
    buffer, small = io.BytesIO(), image.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    small.save(buffer, "WEBP", quality=75, method=1)
    return buffer.getvalue()


def result_of(row: Row) -> str:
    """The name that the files of a result share, without their endings; for one without files, its image."""
    file = row["figure"] or row["maps"]
    return os.path.splitext(file)[0] if file else f"{row['image']}\n{row['identity']}"


# ------------------------------------------------------------------------------------------------------------- merging


def merged(folder: Path, new: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of all results in a folder: those of this run, those of earlier ones, and those found in files."""
    known = {result_of(row) for row in new}
    images = {row["image"] for row in new}
    earlier = [row for row in read_rows(folder / names[2]) if is_kept(folder, row, known, images)]
    known |= {result_of(row) for row in earlier}
    found = [row for files in unknown_results(folder, known) for row in read_result(folder, files)]
    rows = [*earlier, *found, *new]
    return [row for _, row in sorted(enumerate(rows), key=lambda pair: (result_of(pair[1]).lower(), pair[0]))]


def is_kept(folder: Path, row: Row, known: set[str], images: set[str]) -> bool:
    """Whether a row of an earlier run still says something true that this run does not say."""
    if row["error"]:
        return row["image"] not in images
    files = [row[kind] for kind in ("figure", "maps") if row[kind]]
    return result_of(row) not in known and (not files or any((folder / file).is_file() for file in files))


def unknown_results(folder: Path, known: set[str]) -> Iterator[list[str]]:
    """The files of results without a row, by result."""
    files: dict[str, list[str]] = {}
    for above, folders, held in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in held:
            path = Path(above, name).relative_to(folder).as_posix()
            stem, ending = os.path.splitext(path)
            if ending.lower() in KINDS and stem not in known and not name.startswith("."):
                files.setdefault(stem, []).append(path)
    return (sorted(each, key=lambda file: not file.endswith(".npz")) for each in files.values())


def read_result(folder: Path, files: Sequence[str]) -> list[Row]:
    """The rows of one result from its mark; none if it is not an explanation of one image."""
    for file in files:
        try:
            mark = marks.read_mark(folder / file)
        except InputError:
            continue
        maps = (mark or {}).get("maps", {})
        if mark is not None and maps and "explained" not in mark and all(len(m["images"]) == 1 for m in maps.values()):
            return rows_of(mark, files)
    return []


def read_rows(file: Path) -> list[Row]:
    """The rows of a summary that an earlier run wrote; none if there is none."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(file.read_bytes()))
    except (OSError, pa.ArrowException):
        return []
    empty = dict.fromkeys((*FIELDS, THUMBNAIL))
    return [{**empty, **row} for row in table.to_pylist()] if is_ours(table.schema) else []


# ------------------------------------------------------------------------------------------------------------- writing


def write_folder(folder: Path, new: Sequence[Row], *, indexed: bool = True) -> tuple[list[Path], int]:
    """Write the summaries, and the index if there is something to look at; the files, and the results in the folder."""
    names = free_names(folder)
    rows = merged(folder, new, names)
    results = [list(each) for _, each in groupby((row for row in rows if row["figure"] or row["maps"]), result_of)]
    content = {
        names[2]: parquet_bytes(rows),
        names[1]: csv_text(({key: row[key] for key in FIELDS} for row in rows), FIELDS).encode(),
    }
    if indexed:
        content[names[0]] = page(results, [row for row in rows if row["error"]]).encode()
    for name, held in content.items():
        write_whole(folder / name, held)
    return [folder / name for name in reversed(content)], len(results)


def free_names(folder: Path) -> tuple[str, str, str]:
    """What index and summaries are called: other names where somebody else's files have these."""
    usual = (INDEX, CSV, PARQUET)
    if all(may_replace(folder / name) for name in usual):
        return usual
    return f"vitreous-{INDEX}", f"vitreous-{CSV}", f"vitreous-{PARQUET}"


def may_replace(file: Path) -> bool:
    """Whether there is no such file, or vitreous wrote it."""
    if not os.path.lexists(file):
        return True
    if file.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            return is_ours(parquet.read_schema(file))
        except (OSError, ArrowException):
            return False
    head = b'<meta name="generator" content="vitreous' if file.suffix == ".html" else ",".join(FIELDS[:8]).encode()
    try:
        with file.open("rb") as opened:
            return head in opened.read(1000)
    except OSError:
        return False


def is_ours(schema: pyarrow.Schema) -> bool:
    return MARK in (schema.metadata or {})


def parquet_bytes(rows: Iterable[Row]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {**dict.fromkeys(FIELDS, pa.string()), **dict.fromkeys(NUMBERS, pa.float64()), THUMBNAIL: pa.binary()}
    schema = pa.schema(kinds.items(), metadata={MARK: str(marks.FORMAT)})
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows), schema), buffer, compression="zstd")
    return buffer.getvalue()
