"""Data sets: images with their class, and where the object is, as far as that is known.

a folder of images · a folder of class folders · images/ and masks/ side by side · a CSV (or a folder with labels.csv)
WebDataset tars (shards/*.tar, shard-{000..146}.tar, their folder) · a Hugging Face data set written by save_to_disk
"""

from __future__ import annotations

import csv
import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from vitreous._support.files import stamp_file
from vitreous.errors import InputError
from vitreous.images import listing, pictures, saved_datasets, tars
from vitreous.images.entries import LABEL, Found, read_label, some
from vitreous.images.listing import LISTED
from vitreous.images.pictures import Stored

Box = tuple[float, float, float, float]  # left, top, right, bottom
TABLE = "labels.csv"
IMAGE = ("image", "file", "filename", "path", "name")
MASK = ("mask",)
SIDES = (("left", "top", "right", "bottom"), ("x0", "y0", "x1", "y1"))


@dataclass(frozen=True)
class Sample:
    """An image with its label and its mask, as far as they are known."""

    image: Path | Stored
    name: str
    label: int | str | None = None  # a class number, or a name that is yet to be found in the model
    mask: Path | Box | Stored | None = None

    def open(self, channels: int = 3) -> pictures.Picture:
        return pictures.read(self.image, channels=channels)

    @property
    def stamp(self) -> str:
        """Cheap to compute; changes when the image may have changed."""
        return stamp_of(self.image)


@dataclass(frozen=True)
class Data:
    """Images in a fixed order."""

    source: str
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # of a data set that numbers them

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def masked(self) -> bool:
        """Has any image a mask or a box?"""
        return any(sample.mask is not None for sample in self.samples)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of images, names, labels, masks and their order; independent of where the folder is."""
        seen = hashlib.blake2b(digest_size=8)
        for sample in self.samples:
            seen.update(repr((sample.name, sample.label, stamp_of(sample.mask), sample.stamp)).encode())
        return seen.hexdigest()

    def take(self, limit: int | None = None, sample: int | None = None, seed: int = 0) -> Data:
        """The first `limit` images, or `sample` random ones; the order stays."""
        chosen: Sequence[int] = range(len(self))
        if sample is not None and sample < len(self):
            chosen = sorted(random.Random(seed).sample(chosen, sample))
        return replace(self, samples=tuple(self.samples[i] for i in chosen)[:limit])


def read_data(data: str | Path | Sequence[str | Path], masks: str | Path | None = None) -> Data:
    """Read what is known without a model: files, labels, masks or boxes.

    `masks`: a folder with a mask for each image, of the same name with the ending of any image format.
    """
    found = read_source(data, masks)
    found = found if masks is None else with_masks(found, Path(masks))
    return replace(found, samples=distinct(found.samples))


def read_source(data: str | Path | Sequence[str | Path], masks: str | Path | None) -> Data:
    """Read a file, folder, table or archive, whichever it is."""
    if not isinstance(data, str | Path):
        return read_files(list(data), f"{len(data)} files")
    if Path(data).suffix.lower() == ".csv":
        return read_table(Path(data))
    if Path(data).is_dir():
        return read_folder(Path(data), masks)
    found = read_files([data], str(data))
    missing = next((s.image for s in found.samples if isinstance(s.image, Path) and not s.image.exists()), None)
    if missing is not None:
        raise InputError(f"{missing}: no such file or folder")
    return found


def read_files(sources: list[str | Path], source: str) -> Data:
    """Read tar files or images."""
    shards = tars.find_tars(sources)
    if shards:
        return stored(source, tars.read_tars(shards))
    found = listing.look(*sources)
    return Data(source, plain_samples(found.files, None), left_out(found))


def stored(source: str, found: Found) -> Data:
    return Data(source, tuple(Sample(*entry) for entry in found.entries), found.notes, found.classes)


def distinct(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Samples with distinct names: a number follows a name that is already taken."""
    taken = {sample.name for sample in samples}
    if len(taken) == len(samples):
        return samples
    count: Counter[str] = Counter()
    made = []
    for sample in samples:
        count[sample.name] += 1
        name = sample.name
        while count[sample.name] > 1 and name in taken:
            name = f"{sample.name} ({count[sample.name]})"
            count[sample.name] += name in taken
        taken.add(name)
        made.append(replace(sample, name=name))
    return tuple(made)


def stamp_of(held: Path | Box | Stored | None) -> str:
    if isinstance(held, Stored):
        return held.stamp
    return stamp_file(held) if isinstance(held, Path) else str(held)


# ------------------------------------------------------------------------------------------------------------ folders


def read_folder(root: Path, masks: str | Path | None) -> Data:
    """Read a folder according to its content."""
    if (root / TABLE).is_file():
        return read_table(root / TABLE)
    if (root / "images").is_dir():
        found = plain_folder(root / "images", None)
        beside = root / "masks"
        found = with_masks(found, beside) if masks is None and beside.is_dir() else found
        return replace(found, samples=tuple(replace(s, name=str(Path("images", s.name))) for s in found.samples))
    if saved_datasets.is_saved(root):
        return stored(str(root), saved_datasets.read_saved(root))
    shards = tars.tars_in(root)
    if shards:
        return stored(str(root), tars.read_tars(shards))
    return plain_folder(root, None if masks is None else Path(masks))


def plain_folder(root: Path, masks: Path | None) -> Data:
    """Images at any depth; if all are in sub-folders, these are their classes."""
    found = listing.look(root)
    files = [file for file in found.files if masks is None or not is_below(file, masks)]
    if not files:
        raise InputError(f"{root}: no images in this folder other than masks")
    classed = all(file.parent != root for file in files)
    samples = plain_samples(files, root)
    if classed:
        samples = tuple(replace(s, label=Path(s.name).parts[0]) for s in samples)
    return Data(str(root), samples, left_out(found))


def left_out(found: listing.Listed) -> tuple[str, ...]:
    """A note on results that were not taken for images."""
    return () if found.note is None else (found.note,)


def plain_samples(files: Iterable[Path], root: Path | None) -> tuple[Sample, ...]:
    return tuple(Sample(file, str(file if root is None else file.relative_to(root))) for file in files)


def is_below(file: Path, folder: Path) -> bool:
    return Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder))


def below(file: Path, folder: Path) -> str:
    """A file's path relative to a folder that contains it."""
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def with_masks(data: Data, folder: Path) -> Data:
    """Add the masks of a folder, matched by name."""
    if not folder.is_dir():
        raise InputError(f"{folder}: {'is a file, not a folder of masks' if folder.exists() else 'no such folder'}")
    known = {file.relative_to(folder).with_suffix(""): file for file in listing.find(folder)}
    by_stem = {stem.name: file for stem, file in known.items()}
    samples = []
    for sample in data.samples:
        stem = Path(sample.name).with_suffix("")
        inner = Path(*stem.parts[1:])  # below images/
        mask = known.get(stem, known.get(inner, by_stem.get(stem.name)))
        samples.append(sample if mask is None else replace(sample, mask=mask))
    without = [sample.name for sample in samples if sample.mask is None]
    if len(without) == len(samples):
        raise InputError(
            f"{folder}: no mask for any image; give them the same names, e.g. {Path(without[0]).with_suffix('.png')} "
            f"(there is {next(iter(known.values())).relative_to(folder)})"
        )
    note = (f"{len(without)} of {len(samples)} images have no mask: {some(without)}",) if without else ()
    return replace(data, samples=tuple(samples), notes=data.notes + note)


# -------------------------------------------------------------------------------------------------------------- tables


def read_table(file: Path) -> Data:
    """Read a CSV file: image (its ending may be left out), label, mask or box."""
    rows, columns = read_rows(file)
    image, label = column(columns, IMAGE), column(columns, LABEL)
    if image is None:
        raise InputError(f"{file}: no column {' or '.join(IMAGE[:2])}; it has {', '.join(columns)}")
    mask, sides = column(columns, MASK), [columns[side] for side in box_columns(columns)]
    places = Places(file.parent)
    samples, missing = [], []
    for number, row in enumerate(rows, 2):
        path = places.image(row[image])
        where: Path | Box | None = read_box(row, sides, columns.get("box"), f"{file}, line {number}")
        if mask is not None and row[mask].strip():
            where = places.root / row[mask].strip()
        missing += [row[image]] if path is None else []
        missing += [str(where)] if isinstance(where, Path) and not where.is_file() else []
        place = path or Path(row[image])
        samples.append(Sample(place, below(place, places.root), read_label(row[label] if label else ""), where))
    if missing:
        raise InputError(f"{file}: {len(missing)} of its files do not exist: {some(missing)}")
    found = Data(str(file), tuple(samples))
    beside = file.parent / "masks"
    return with_masks(found, beside) if not found.masked and beside.is_dir() else found


def read_rows(file: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The rows, and the column names by their lower-case spelling."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened, restval="")
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
            columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: cannot be read as a CSV ({error})") from None
    if not rows:
        raise InputError(f"{file}: has no rows below its header")
    return rows, columns


def column(columns: dict[str, str], wanted: Iterable[str]) -> str | None:
    return next((columns[name] for name in wanted if name in columns), None)


def box_columns(columns: dict[str, str]) -> tuple[str, ...]:
    return next((sides for sides in SIDES if all(side in columns for side in sides)), ())


def read_box(row: dict[str, str], sides: list[str], box: str | None, where: str) -> Box | None:
    """Left, top, right, bottom, in four columns or in one."""
    parts = [row[side] for side in sides]
    if not parts and box is not None:
        parts = re.split(r"[,;\s]+", row[box].strip(" []()"))
    if not any(part.strip() for part in parts):
        return None
    try:
        left, top, right, bottom = map(float, parts)
    except ValueError:
        raise InputError(f"{where}: {' '.join(parts)!r} is not a box; write left,top,right,bottom") from None
    return left, top, right, bottom


class Places:
    """Finds the images of a table: beside it or in images/, with or without their ending."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stems: dict[str, Path] | None = None

    def image(self, name: str) -> Path | None:
        name = name.strip()
        for folder in (self.root, self.root / "images"):
            if name and (folder / name).is_file():
                return folder / name
        return self.stems.get(name)

    @property
    def stems(self) -> dict[str, Path]:
        """Images in the table's folder and in images/, by their name without ending."""
        if self._stems is None:
            self._stems = {}
            for folder in (self.root / "images", self.root):
                for file in sorted(folder.iterdir()) if folder.is_dir() else ():
                    if file.suffix.lower() in LISTED and not listing.is_result(str(folder), file.name):
                        self._stems.setdefault(file.stem, file)
        return self._stems
