"""Pictures within something larger: tar shards as WebDataset writes them, a Hugging Face data set on disk.

Each is kept as its place, so small that any process can be given it and read that one picture.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vitreous.errors import InputError, one_line
from vitreous.images import pictures
from vitreous.images.pictures import Stored as Stored

LABEL = ("imagenet_index", "class_index", "label", "class", "cls", "target")
MASK = ("mask", "seg", "segmentation")
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # as WebDataset: up to the base name's first dot
RANGE = re.compile(r"(\d+)\.\.(\d+)")
BRACES = re.compile(r"\{([^{}]*)\}")
INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
SHOWN = 3  # examples in an error


class Entry(NamedTuple):
    """One picture as it was found."""

    image: Stored
    name: str
    label: int | str | None = None
    mask: Stored | None = None


class Found(NamedTuple):
    """All pictures of a source; its classes' names where they are numbered."""

    entries: list[Entry]
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def stamp_file(path: Path) -> str:
    """A file's size and time: another where it was changed."""
    try:
        seen = path.stat()
    except (OSError, ValueError):
        return "missing"
    return f"{seen.st_size} {seen.st_mtime_ns}"


def read_label(text: str) -> int | str | None:
    """A class number or name; -1 stands for none."""
    text = text.strip()
    return (int(text) if re.fullmatch(r"\d+", text) else text) if text not in ("", "-1") else None


def some(words: Sequence[str]) -> str:
    return ", ".join(words[:SHOWN]) + (" …" if len(words) > SHOWN else "")


# ---------------------------------------------------------------------------------------------------------------- tars


@dataclass(frozen=True, slots=True)
class Member(Stored):
    """One file within a tar that is not compressed."""

    tar: Path
    name: str
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        with self.tar.open("rb") as opened:
            return self.read_from(opened)

    def read_from(self, opened: BinaryIO) -> bytes:
        opened.seek(self.offset)
        held = opened.read(self.size)
        if len(held) < self.size:
            raise InputError(f"{self}: {self.tar.name} has been cut off since it was read")
        return held

    @property
    def stamp(self) -> str:
        return f"{stamp_file(self.tar)} {self.offset} {self.size}"

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"


def is_tar(path: str | Path) -> bool:
    return str(path).lower().endswith((".tar", *PACKED))


def find_tars(sources: Sequence[str | Path]) -> list[Path]:
    """The tars that names, folders, patterns and ranges stand for; none where they stand for pictures."""
    found = [tars_of(source) for source in sources]
    if any(found) and not all(found):
        other = next(source for source, tars in zip(sources, found) if not tars)
        raise InputError(f"{other}: is no tar; give tars or pictures, not both")
    return list({os.path.abspath(tar): tar for tars in found for tar in tars}.values())


def tars_of(source: str | Path) -> list[Path]:
    """The tars that one name stands for."""
    path = Path(source)
    if not str(source).strip():
        return []
    if path.is_dir():
        return tars_in(path)
    texts = braces(str(source)) if is_tar(source) and not os.path.lexists(path) else [str(source)]
    files = [file for text in texts for file in pictures.expand(text)]
    return files if all(is_tar(file) for file in files) else []


def tars_in(folder: Path) -> list[Path]:
    """The tars that lie in a folder without pictures; beside pictures they are what these were unpacked from."""
    tars = sorted(file for file in folder.iterdir() if is_tar(file) and file.name[0] != "." and file.is_file())
    beside = tars and any(file.suffix.lower() in pictures.ENDINGS for file in pictures.visible(folder))
    return [] if beside else tars


def braces(text: str) -> list[str]:
    """`{000..146}` and `{a,b}` written out, as a shell does."""
    pieces = BRACES.split(text)  # every second one stood in braces
    options = [choices(piece) or ["{" + piece + "}"] if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*options)]


def choices(piece: str) -> list[str]:
    """What the inside of braces stands for; nothing where it is plain text."""
    ends = RANGE.fullmatch(piece)
    if ends is None:
        return piece.split(",") if "," in piece else []
    first, last = int(ends[1]), int(ends[2])
    padded = any(end.startswith("0") and len(end) > 1 for end in ends.groups())
    width = max(map(len, ends.groups())) if padded else 0
    step = 1 if first <= last else -1
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def read_tars(tars: Sequence[Path]) -> Found:
    """The pictures of every tar, in order; the tar's own name before theirs where there are several."""
    check_tars(tars)
    entries: list[Entry] = []
    broken, unread = [], []
    for tar, prefix in zip(tars, prefixes(tars)):
        members, trouble = scan(tar)
        if trouble is not None:
            broken.append(f"{tar} after {len(members)} files ({trouble})")
        inside, lost = read_members(tar, members, prefix)
        entries += inside
        unread += lost
    if not entries and broken:
        raise InputError(f"{some(broken)}: cannot be read as a tar; fetch it again")
    if not entries:
        raise InputError(
            f"{some([str(tar) for tar in tars])}: no pictures inside ({', '.join(sorted(pictures.ENDINGS))})"
        )
    notes = []
    if broken:
        notes.append(f"{len(broken)} of {len(tars)} tars cut off or damaged, the rest is used: {some(broken)}")
    if unread:
        notes.append(f"{len(unread)} labels cannot be read: {some(unread)}")
    repeated = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if repeated:
        notes.append(f"{len(repeated)} names come more than once, all are used: {some(repeated)}")
    return Found(entries, tuple(notes))


def check_tars(tars: Sequence[Path]) -> None:
    for tar in tars:
        if str(tar).lower().endswith(PACKED):
            raise packed(tar)
    missing = [str(tar) for tar in tars if not tar.is_file()]
    if missing:
        count = "" if len(tars) == 1 else f" ({len(missing)} of {len(tars)} tars are not there)"
        raise InputError(f"{some(missing)}: no such file{count}")


def packed(tar: Path) -> InputError:
    return InputError(f"{tar}: is compressed, so one picture cannot be read without all before it; unpack it to a .tar")


def prefixes(tars: Sequence[Path]) -> list[str]:
    """`shard-000/`, with as much of the path as differs; nothing for a tar alone."""
    if len(tars) == 1:
        return [""]
    full = [os.path.abspath(tar) for tar in tars]
    shared = os.path.commonpath([os.path.dirname(name) for name in full])
    return [Path(os.path.relpath(name, shared)).with_suffix("").as_posix() + "/" for name in full]


def scan(tar: Path) -> tuple[list[Member], str | None]:
    """The files of a tar from their headers alone, and what ends it too early."""
    members: list[Member] = []
    try:
        with tar.open("rb") as held, tarfile.open(fileobj=held, mode="r:") as opened:
            end = os.fstat(held.fileno()).st_size
            while (header := opened.next()) is not None:
                opened.members = []  # type: ignore[attr-defined]  # it would keep them all
                if header.isreg() and header.offset_data + header.size > end:
                    return members, "it is cut off"
                if header.isreg() and not header.issparse():
                    name = header.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                    members.append(Member(tar, name.removeprefix("./"), header.offset_data, header.size))
            held.seek(opened.offset)
            mark = held.read(tarfile.BLOCKSIZE)
            if mark.strip(tarfile.NUL) or not mark:  # the reader takes a damaged header for the end
                return members, "a header is damaged" if mark else "it has no end mark"
    except Exception as error:  # damaged headers raise all sorts
        if not members and is_packed(tar):
            raise packed(tar) from None
        return members, one_line(error, 100)
    return members, None


def is_packed(tar: Path) -> bool:
    """Does it open only by way of a decompressor?"""
    try:
        return tarfile.is_tarfile(tar)
    except Exception:
        return False


def read_members(tar: Path, members: Sequence[Member], prefix: str) -> tuple[list[Entry], list[str]]:
    """Pictures with what goes by the same key, and the labels that cannot be read."""
    entries: list[Entry] = []
    unread: list[str] = []
    if not members:
        return entries, unread
    with tar.open("rb") as opened:
        for group in by_key(members):
            shown = [member for ending, member in group.items() if is_picture(ending)]
            if not shown:
                continue
            mask = next((member for ending, member in group.items() if is_mask(ending)), None)
            try:
                label = find_label(group, opened)
            except (ValueError, OSError):
                label = None
                unread.append(prefix + shown[0].name)
            entries += [Entry(member, prefix + member.name, label, mask) for member in shown]
    return entries, unread


def by_key(members: Sequence[Member]) -> list[dict[str, Member]]:
    """Members of one key by their endings; an ending that comes again begins another group."""
    groups: list[dict[str, Member]] = []
    current: dict[str, dict[str, Member]] = {}
    for member in members:
        split = KEY.fullmatch(member.name)
        if split is None:
            continue
        key, ending = split[1], split[2].lower()
        if ending in current.setdefault(key, {}):
            current[key] = {}
        if not current[key]:
            groups.append(current[key])
        current[key][ending] = member
    return groups


def is_mask(ending: str) -> bool:
    words = ending.split(".")
    return any(word in MASK for word in words) and (words[-1] in MASK or f".{words[-1]}" in pictures.ENDINGS)


def is_picture(ending: str) -> bool:
    words = ending.split(".")
    return f".{words[-1]}" in pictures.ENDINGS and not is_mask(ending)


def find_label(group: Mapping[str, Member], opened: BinaryIO) -> int | str | None:
    """From `.cls`, else from `.json`."""
    if "cls" in group:
        return read_label(group["cls"].read_from(opened).decode())
    if "json" not in group:
        return None
    told = json.loads(group["json"].read_from(opened))
    values = [told[name] for name in LABEL if name in told] if isinstance(told, dict) else []
    return next((read_label(str(v)) for v in values if isinstance(v, int | str) and not isinstance(v, bool)), None)


# ------------------------------------------------------------------------------------------------ Hugging Face datasets


@dataclass(frozen=True, slots=True)
class Row(Stored):
    """One row of a data set that was saved with `save_to_disk`."""

    folder: Path
    mark: str  # the data set's fingerprint: another one is opened anew
    column: str
    number: int

    def read_bytes(self) -> bytes:
        held = open_column(self.folder, self.mark, self.column)[self.number][self.column] or {}
        if held.get("bytes") is not None:
            return bytes(held["bytes"])
        if not held.get("path"):
            raise InputError(f"{self}: this row holds no picture")
        return Path(held["path"]).read_bytes()

    @property
    def stamp(self) -> str:
        return f"{self.mark} {self.column} {self.number}"

    def __str__(self) -> str:
        return f"{self.folder}/row {self.number:06}"


def is_saved(folder: Path) -> bool:
    """Was it written by `save_to_disk`?"""
    return (folder / SPLITS).is_file() or ((folder / INFO).is_file() and (folder / STATE).is_file())


def read_saved(folder: Path) -> Found:
    """The rows of a data set, or of the only split of several."""
    folder = one_split(folder) if (folder / SPLITS).is_file() else folder
    state = read_json(folder / STATE)
    mark = str(state.get("_fingerprint"))
    saved = open_saved(folder, mark) if state.get("_data_files") else ()  # it cannot open an empty one
    if not len(saved):
        raise InputError(f"{folder}: this data set holds no rows")
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
    """The data set without the format it was saved in; once in a process."""
    from vitreous._support.optional import needs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = needs("datasets", "hf")
        try:
            with no_bars(datasets):
                return datasets.load_from_disk(str(folder)).with_format(None)
        except Exception as error:  # pyarrow and datasets raise all sorts
            raise InputError(f"{folder}: cannot be read as a saved data set ({one_line(error, 100)})") from None


@cache
def open_column(folder: Path, mark: str, column: str) -> Any:
    """One column of pictures as they were stored, not decoded."""
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
    """The first column of pictures, and the one of masks."""
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
    """The stored files' names where they tell rows apart, else the rows' numbers."""
    import pyarrow.compute

    paths = pyarrow.compute.struct_field(saved.data.column(column), "path").to_pylist()
    names = [re.split(r"[/\\]", path or "")[-1] for path in paths]
    count = Counter(names)
    return [name if name and count[name] == 1 else f"row {row:06}" for row, name in enumerate(names)]


def read_labels(saved: Any) -> tuple[list[int | str | None], tuple[str, ...]]:
    """The label of each row, by name where classes have names, and these names."""
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
    """A class's name; its number where it has none."""
    if value is None or value < 0:
        return None
    return read_label(classes[value]) if value < len(classes) else value


def first_of(columns: Sequence[str]) -> str | None:
    known = {name.lower(): name for name in columns}
    return next((known[name] for name in LABEL if name in known), None)
