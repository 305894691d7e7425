"""WebDataset tar files: only headers are scanned, and each image is read on its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vitreous._support.files import stamp_file
from vitreous.errors import InputError, one_line
from vitreous.images import listing, pictures
from vitreous.images.entries import LABEL, MASK, Entry, Found, read_label, some
from vitreous.images.pictures import Stored

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)  # as WebDataset: up to the base name's first dot
RANGE = re.compile(r"(\d+)\.\.(\d+)")
BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Member(Stored):
    """One file in an uncompressed tar file."""

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
            raise InputError(f"{self}: {self.tar.name} has been truncated since it was scanned")
        return held

    @property
    def stamp(self) -> str:
        return f"{stamp_file(self.tar)} {self.offset} {self.size}"

    @property
    def home(self) -> Path:
        return self.tar

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"


def is_tar(path: str | Path) -> bool:
    return str(path).lower().endswith((".tar", *PACKED))


def find_tars(sources: Sequence[str | Path]) -> list[Path]:
    """The tar files that names, folders, patterns and ranges stand for; none if they stand for images."""
    found = [tars_of(source) for source in sources]
    if any(found) and not all(found):
        other = next(source for source, tars in zip(sources, found) if not tars)
        raise InputError(f"{other}: is not a tar file; give tar files or images, not both")
    return list({os.path.abspath(tar): tar for tars in found for tar in tars}.values())


def tars_of(source: str | Path) -> list[Path]:
    """The tar files that one name stands for."""
    path = Path(source)
    if not str(source).strip():
        return []
    if path.is_dir():
        return tars_in(path)
    texts = braces(str(source)) if is_tar(source) and not os.path.lexists(path) else [str(source)]
    files = [file for text in texts for file in listing.stands_for(text)]
    return files if all(is_tar(file) for file in files) else []


def tars_in(folder: Path) -> list[Path]:
    """The tar files in a folder; none if it has images too, which were probably unpacked from them."""
    tars = sorted(file for file in folder.iterdir() if is_tar(file) and file.name[0] != "." and file.is_file())
    beside = tars and any(file.suffix.lower() in pictures.ENDINGS for file in listing.below(folder).files)
    return [] if beside else tars


def braces(text: str) -> list[str]:
    """Expand `{000..146}` and `{a,b}` as a shell does."""
    pieces = BRACES.split(text)  # every second one stood in braces
    options = [choices(piece) or ["{" + piece + "}"] if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*options)]


def choices(piece: str) -> list[str]:
    """What a text in braces stands for; an empty list if it is plain text."""
    ends = RANGE.fullmatch(piece)
    if ends is None:
        return piece.split(",") if "," in piece else []
    first, last = int(ends[1]), int(ends[2])
    padded = any(end.startswith("0") and len(end) > 1 for end in ends.groups())
    width = max(map(len, ends.groups())) if padded else 0
    step = 1 if first <= last else -1
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def read_tars(tars: Sequence[Path]) -> Found:
    """The images of all tar files, in order; names begin with the tar file's if there are several."""
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
        raise InputError(f"{some(broken)}: cannot be read as a tar file; download it again")
    if not entries:
        raise InputError(
            f"{some([str(tar) for tar in tars])}: no images inside ({', '.join(sorted(pictures.ENDINGS))})"
        )
    notes = []
    if broken:
        notes.append(f"{len(broken)} of {len(tars)} tar files truncated or damaged, the rest is used: {some(broken)}")
    if unread:
        notes.append(f"{len(unread)} labels cannot be read: {some(unread)}")
    repeated = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if repeated:
        notes.append(f"{len(repeated)} names occur more than once, all are used: {some(repeated)}")
    return Found(entries, tuple(notes))


def check_tars(tars: Sequence[Path]) -> None:
    for tar in tars:
        if str(tar).lower().endswith(PACKED):
            raise packed(tar)
    missing = [str(tar) for tar in tars if not tar.is_file()]
    if missing:
        count = "" if len(tars) == 1 else f" ({len(missing)} of {len(tars)} tar files are missing)"
        raise InputError(f"{some(missing)}: no such file{count}")


def packed(tar: Path) -> InputError:
    return InputError(f"{tar}: is compressed, so single images cannot be read; decompress it to a .tar")


def prefixes(tars: Sequence[Path]) -> list[str]:
    """`shard-000/`, with as much of the path as differs; empty for a single tar file."""
    if len(tars) == 1:
        return [""]
    full = [os.path.abspath(tar) for tar in tars]
    shared = os.path.commonpath([os.path.dirname(name) for name in full])
    return [Path(os.path.relpath(name, shared)).with_suffix("").as_posix() + "/" for name in full]


def scan(tar: Path) -> tuple[list[Member], str | None]:
    """The files in a tar file, from their headers alone, and what is wrong if it ends early."""
    members: list[Member] = []
    try:
        with tar.open("rb") as held, tarfile.open(fileobj=held, mode="r:") as opened:
            end = os.fstat(held.fileno()).st_size
            while (header := opened.next()) is not None:
                opened.members = []  # type: ignore[attr-defined]  # or it would keep them all in memory
                if header.isreg() and header.offset_data + header.size > end:
                    return members, "it is truncated"
                if header.isreg() and not header.issparse():
                    name = header.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                    members.append(Member(tar, name.removeprefix("./"), header.offset_data, header.size))
            held.seek(opened.offset)
            mark = held.read(tarfile.BLOCKSIZE)
            if mark.strip(tarfile.NUL) or not mark:  # tarfile takes a damaged header for the end
                return members, "a header is damaged" if mark else "it has no end mark"
    except Exception as error:  # damaged headers raise all kinds of errors
        if not members and is_packed(tar):
            raise packed(tar) from None
        return members, one_line(error, 100)
    return members, None


def is_packed(tar: Path) -> bool:
    """Is it compressed, whatever its name?"""
    try:
        return tarfile.is_tarfile(tar)
    except Exception:
        return False


def read_members(tar: Path, members: Sequence[Member], prefix: str) -> tuple[list[Entry], list[str]]:
    """Images with the label and mask of the same key, and the names of those whose label cannot be read."""
    entries: list[Entry] = []
    unread: list[str] = []
    if not members:
        return entries, unread
    with tar.open("rb") as opened:
        for group in by_key(members):
            shown = [member for ending, member in group.items() if is_image(ending)]
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
    """Members grouped by key, each by its ending; a repeated ending starts a new group."""
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


def is_image(ending: str) -> bool:
    words = ending.split(".")
    return f".{words[-1]}" in pictures.ENDINGS and not is_mask(ending)


def find_label(group: Mapping[str, Member], opened: BinaryIO) -> int | str | None:
    """The label, from `.cls` or else from `.json`."""
    if "cls" in group:
        return read_label(group["cls"].read_from(opened).decode())
    if "json" not in group:
        return None
    told = json.loads(group["json"].read_from(opened))
    values = [told[name] for name in LABEL if name in told] if isinstance(told, dict) else []
    return next((read_label(str(v)) for v in values if isinstance(v, int | str) and not isinstance(v, bool)), None)
