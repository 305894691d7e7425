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
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.errors import InputError
from vitreous.images import listing, saved_datasets, tars
from vitreous.images.beside import Arrays, read_inputs, rows_of, told_of
from vitreous.images.entries import LABEL, Found, read_label, some
from vitreous.images.listing import LISTED
from vitreous.images.pictures import Stored
from vitreous.images.samples import Box, Label, Samples
from vitreous.images.samples import Sample as Sample

TABLE = "labels.csv"
IMAGE = ("image", "file", "filename", "path", "name")
MASK = ("mask",)
ODD = re.compile(r"//|\\|(^|/)\.{0,1}(/|$)")  # not as paths are spelled
SIDES = (("left", "top", "right", "bottom"), ("x0", "y0", "x1", "y1"))


@dataclass(frozen=True)
class Data:
    """Images in a fixed order."""

    source: str
    samples: Sequence[Sample]
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # of a data set that numbers them
    inputs: Arrays | None = field(default=None, repr=False, compare=False)  # what a network gets beside each image

    @cached_property
    def columns(self) -> Samples:
        """The samples, column by column."""
        return Samples.of(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def root(self) -> str | None:
        """The folder below which the names of the images are paths; None if they lie in archives."""
        if any(isinstance(sample.image, Stored) for sample in self.samples[:1]):
            return None
        source = Path(self.source)
        place = source if source.is_dir() else source.parent if source.suffix.lower() == ".csv" else Path()
        return os.path.abspath(place)

    @property
    def masked(self) -> bool:
        """Has any image a mask or a box?"""
        return any(mask is not None for mask in self.columns.masks or ())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of images, names, labels, masks and their order; independent of where the folder is."""
        seen = hashlib.blake2b(digest_size=8)
        for told in self.columns.told():
            seen.update(repr(told).encode())
        if self.inputs is not None:
            seen.update(told_of(self.inputs).encode())
        return seen.hexdigest()

    def with_inputs(self, given: str | Path | Mapping[str, Any] | None) -> Data:
        """The same images with arrays that travel with them, from a file .npz or by name; None: as they are."""
        return self if given is None else replace(self, inputs=read_inputs(given, len(self)))

    def beside(self, numbers: Sequence[int]) -> dict[str, np.ndarray] | None:
        """What a network gets beside some of the images."""
        return None if self.inputs is None else rows_of(self.inputs, numbers)

    def stamped(self) -> Data:
        """The same images, which know how they were, so that a change on the way is noticed."""
        return replace(self, samples=self.columns.stamped())

    def take(self, limit: int | None = None, sample: int | None = None, seed: int = 0) -> Data:
        """The first `limit` images, or `sample` random ones; the order stays."""
        samples, numbers = self.columns, list(range(len(self)))
        if sample is not None and sample < len(self):
            numbers = sorted(random.Random(seed).sample(range(len(self)), sample))
            samples = samples.pick(numbers)
        return replace(self, samples=samples[:limit], inputs=self.beside(numbers[:limit]))


def read_data(data: str | Path | Sequence[str | Path], masks: str | Path | None = None) -> Data:
    """Read what is known without a model: files, labels, masks or boxes.

    `masks`: a folder with a mask for each image, of the same name with the ending of any image format.
    """
    found = read_source(data, masks)
    found = found if masks is None else with_masks(found, Path(masks))
    return replace(found, samples=distinct(found.columns))


def read_source(data: str | Path | Sequence[str | Path], masks: str | Path | None) -> Data:
    """Read a file, folder, table or archive, whichever it is."""
    if not isinstance(data, str | Path):
        return read_files(list(data), f"{len(data)} files")
    if Path(data).suffix.lower() == ".csv":
        return read_table(Path(data))
    if Path(data).is_dir():
        return read_folder(Path(data), masks)
    found = read_files([data], str(data))
    files = (sample.image for sample in found.samples)
    missing = next((file for file in files if isinstance(file, Path) and not file.exists()), None)
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
    return Data(source, Samples.of(Sample(*entry) for entry in found.entries), found.notes, found.classes)


def distinct(samples: Samples) -> Samples:
    """Samples with distinct names: a number follows a name that is already taken."""
    taken = set(samples.names)
    if len(taken) == len(samples):
        return samples
    count: Counter[str] = Counter()
    made = []
    for given in samples.names:
        count[given] += 1
        name = given
        while count[given] > 1 and name in taken:
            name = f"{given} ({count[given]})"
            count[given] += name in taken
        taken.add(name)
        made.append(name)
    return samples.named(made)


# ------------------------------------------------------------------------------------------------------------ folders


def read_folder(root: Path, masks: str | Path | None) -> Data:
    """Read a folder according to its content."""
    if (root / TABLE).is_file():
        return read_table(root / TABLE)
    if (root / "images").is_dir():
        found = plain_folder(root / "images", None)
        beside = root / "masks"
        found = with_masks(found, beside) if masks is None and beside.is_dir() else found
        return replace(
            found, samples=found.columns.named([os.path.join("images", name) for name in found.columns.names])
        )
    if saved_datasets.is_saved(root):
        return stored(str(root), saved_datasets.read_saved(root))
    shards = tars.tars_in(root)
    if shards:
        return stored(str(root), tars.read_tars(shards))
    return plain_folder(root, None if masks is None else Path(masks))


def plain_folder(root: Path, masks: Path | None) -> Data:
    """Images at any depth; if all are in sub-folders, these are their classes."""
    found = listing.look(root)
    files = found.files if masks is None else [file for file in found.files if not is_below(file, masks)]
    if not files:
        raise InputError(f"{root}: no images in this folder other than masks")
    samples = plain_samples(files, root)
    if all(os.sep in name for name in samples.names):
        samples = samples.labelled([sys.intern(name.partition(os.sep)[0]) for name in samples.names])
    return Data(str(root), samples, left_out(found))


def left_out(found: listing.Listed) -> tuple[str, ...]:
    """A note on results that were not taken for images."""
    return () if found.note is None else (found.note,)


def plain_samples(files: Iterable[Path], root: Path | None) -> Samples:
    """Files by their names below a folder, or as they are."""
    paths = files.paths if isinstance(files, listing.Paths) else [str(file) for file in files]
    if root is None:
        return Samples(paths)
    start = len(os.path.join(root, ""))
    return Samples([path[start:] if path.startswith(str(root)) else path for path in paths], str(root))


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
    masks = [] if (own := data.columns.masks) is None else list(own)
    masks += [None] * (len(data) - len(masks))
    for i, name in enumerate(data.columns.names):
        stem = Path(name).with_suffix("")
        inner = Path(*stem.parts[1:])  # below images/
        masks[i] = known.get(stem, known.get(inner, by_stem.get(stem.name, masks[i])))
    without = [name for name, mask in zip(data.columns.names, masks) if mask is None]
    if len(without) == len(masks):
        raise InputError(
            f"{folder}: no mask for any image; give them the same names, e.g. {Path(without[0]).with_suffix('.png')} "
            f"(there is {next(iter(known.values())).relative_to(folder)})"
        )
    note = (f"{len(without)} of {len(masks)} images have no mask: {some(without)}",) if without else ()
    return replace(data, samples=data.columns.masked(masks), notes=data.notes + note)


# -------------------------------------------------------------------------------------------------------------- tables


def read_table(file: Path) -> Data:
    """Read a CSV file: image (its ending may be left out), label, mask or box."""
    rows, columns = read_rows(file)
    image, label = column(columns, IMAGE), column(columns, LABEL)
    if image is None:
        raise InputError(f"{file}: no column {' or '.join(IMAGE[:2])}; it has {', '.join(columns)}")
    mask, sides, box = column(columns, MASK), [columns[side] for side in box_columns(columns)], columns.get("box")
    places = Places(file.parent)
    names, missing, known = list[str](), list[str](), dict[str, Label]()
    labels, masks = list[Label](), list[Path | Box | None]()
    for number, row in enumerate(rows, 2):
        name = places.image(row[image])
        where: Path | Box | None = None
        if sides or box is not None:
            where = read_box(row, sides, box, f"{file}, line {number}")
        if mask is not None and row[mask].strip():
            where = places.root / row[mask].strip()
        missing += [row[image]] if name is None else []
        missing += [str(where)] if isinstance(where, Path) and not where.is_file() else []
        text = "" if label is None else row[label]
        names.append(name or row[image])
        labels.append(known[text] if text in known else known.setdefault(text, read_label(text)))
        masks.append(where)
    if missing:
        raise InputError(f"{file}: {len(missing)} of its files do not exist: {some(missing)}")
    found = Data(str(file), Samples(names, str(file.parent), labels=labels, masks=masks))
    beside = file.parent / "masks"
    return with_masks(found, beside) if not found.masked and beside.is_dir() else found


def read_rows(file: Path) -> tuple[list[list[str]], dict[str, int]]:
    """The rows, and where the columns are, by the lower-case spelling of their names."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened)
            head: list[str] = next((row for row in reader if row), [])
            rows = [row if len(row) >= len(head) else row + [""] * (len(head) - len(row)) for row in reader if row]
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: cannot be read as a CSV ({error})") from None
    if not rows:
        raise InputError(f"{file}: has no rows below its header")
    return rows, {name.strip().lower(): i for i, name in enumerate(head)}


def column(columns: dict[str, int], wanted: Iterable[str]) -> int | None:
    return next((columns[name] for name in wanted if name in columns), None)


def box_columns(columns: dict[str, int]) -> tuple[str, ...]:
    return next((sides for sides in SIDES if all(side in columns for side in sides)), ())


def read_box(row: list[str], sides: list[int], box: int | None, where: str) -> Box | None:
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
        self.root, self._start = root, str(root)
        self._stems: dict[str, Path] | None = None

    def image(self, name: str) -> str | None:
        """The path of an image below the table's folder, or as it is."""
        name = name.strip()
        if name and os.path.isfile(os.path.join(self._start, name)):
            return self._below(name)
        if name and os.path.isfile(os.path.join(self._start, "images", name)):
            return self._below(os.path.join("images", name))
        found = self.stems.get(name)
        return None if found is None else below(found, self.root)

    def _below(self, name: str) -> str:
        plain = not os.path.isabs(name) and not ODD.search(name)
        return name if plain else below(self.root / name, self.root)

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
