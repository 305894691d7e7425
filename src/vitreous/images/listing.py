"""Which images a name stands for: a file, a folder or a pattern. What vitreous itself wrote is left out, and counted.

A result is known by the mark in the file, which is read without decoding anything; results of the first release, which
have no mark, by the raw maps or the study beside them. A file that is named itself is taken, whatever it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from vitreous._support import marks
from vitreous.errors import InputError, one_line
from vitreous.images.bands import ARRAYS

ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
LISTED = ENDINGS | ARRAYS
MARKED = frozenset({".gif", ".jpeg", ".jpg", ".npz", ".png", ".webp"})  # endings of results
WORD = marks.KEY.encode()
WILD = "*?["
READ = os.O_RDONLY | getattr(os, "O_BINARY", 0)
STUDY, SHARDS, FINDINGS, CHARTS = "study.json", "shards", "findings.json", "figures"
SHOWN = 3  # folders named in the note


@dataclass(frozen=True)
class Listed:
    """The images that names stand for, in order, and the results that were left out."""

    files: Sequence[Path]
    results: Sequence[Path] = field(default_factory=list)

    @property
    def note(self) -> str | None:
        """One sentence on what was left out."""
        if not self.results:
            return None
        count = len(self.results)
        return f"skipped {count} file{'s' if count > 1 else ''} that vitreous wrote ({folders_of(self.results)})"


def find(*sources: str | Path) -> list[Path]:
    """List the images that paths, folders (searched at any depth, sorted) and patterns stand for, each once."""
    return list(look(*sources).files)


def look(*sources: str | Path) -> Listed:
    """As `find`, and what was left out."""
    listed = [expand(source) for source in sources]
    if len(listed) == 1:
        return listed[0]
    files: dict[str, Path] = {}
    results: dict[str, Path] = {}
    for one in listed:
        for file in one.files:
            files.setdefault(os.path.abspath(file), file)
        results |= {os.path.abspath(file): file for file in one.results}
    return Listed([*files.values()], [file for path, file in results.items() if path not in files])


def expand(source: str | Path) -> Listed:
    """The images that one name stands for; the name of a missing file stands for itself."""
    if not str(source).strip():
        raise InputError("an empty name is not an image; give a file, a folder or a pattern")
    path = Path(source)
    if os.path.isdir(path):
        found, where = below(path), "no images in this folder"
    elif is_pattern(source):
        found, where = told_apart(match(path)), "this pattern matches no images"
    else:
        return Listed([path])
    if not found.files and found.results:
        count = f"{len(found.results)} that vitreous wrote"
        raise InputError(f"{path}: {where} other than {count}; name the file to use one of these")
    if not found.files:
        raise InputError(f"{path}: {where} ({', '.join(sorted(LISTED))})")
    return found


def is_pattern(source: str | Path) -> bool:
    return any(c in str(source) for c in WILD) and not os.path.lexists(source)


def stands_for(source: str | Path) -> list[Path]:
    """The files of a pattern, or the one that is named, whatever they are."""
    return match(Path(source)) if is_pattern(source) else [Path(source)]


def match(pattern: Path) -> list[Path]:
    """The files that a pattern stands for, whatever they are."""
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    try:
        matches = sorted(p for p in anchor.glob(str(pattern.relative_to(pattern.anchor))) if p.is_file())
    except ValueError as error:
        raise InputError(f"{pattern}: is not a pattern ({one_line(error)})") from None
    if not matches:
        raise InputError(f"{pattern}: nothing matches this pattern")
    return matches


def below(folder: Path) -> Listed:
    """The images below a folder, sorted; arrays count where no other images lie beside them (results have maps)."""
    photos: list[str] = []
    results: list[str] = []
    for root, names, ours in walk(os.fspath(folder)):
        start, beside, arrays = os.path.join(root, ""), set(names), list[str]()
        before = len(photos)
        for name in names:
            kind = ending(name)
            if kind not in LISTED:
                continue
            if ours or is_result(start, name, beside):
                results.append(start + name)
            else:
                (photos if kind in ENDINGS else arrays).append(start + name)
        photos += arrays if len(photos) == before else []
    return Listed(in_order(photos), in_order(results))


def walk(folder: str) -> Iterator[tuple[str, Sequence[str], bool]]:
    """The folders below one with the names of their files, without hidden ones (thumbnails, resource forks).

    And whether a study wrote them: its store and all below it, and the charts of a report.
    """
    ours: set[str] = set()
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = root in ours or (STUDY in files and SHARDS in folders)
        if inside:
            ours.update(os.path.join(root, name) for name in folders)
        elif FINDINGS in files and CHARTS in folders:
            ours.add(os.path.join(root, CHARTS))
        yield root, [name for name in files if not name.startswith(".")], inside


def told_apart(files: Sequence[Path]) -> Listed:
    """Files that a pattern stands for, without results."""
    results = [file for file in files if is_result(os.fspath(file.parent), file.name)]
    left_out = set(results)
    return Listed([file for file in files if file not in left_out], results)


def is_result(root: str, name: str, beside: Collection[str] | None = None) -> bool:
    """Whether vitreous wrote this file; `beside`: the names in its folder, where they are known."""
    kind = ending(name)
    if kind not in MARKED:
        return False
    path = root + name if root.endswith(os.sep) else os.path.join(root, name)
    if may_be_marked(path, kind) and marks.is_ours(Path(path)):
        return True
    return kind in (".png", ".gif") and is_old_figure(name, root, beside)


def may_be_marked(path: str, kind: str) -> bool:
    """Whether the mark's word is in the start of a file: quick enough for millions of files."""
    if kind in (".npz", ".webp"):  # whose mark is at their end
        return True
    try:
        handle = os.open(path, READ)
    except OSError:
        return False
    try:
        return WORD in os.read(handle, marks.HEAD)
    except OSError:
        return False
    finally:
        os.close(handle)


def is_old_figure(name: str, root: str, beside: Collection[str] | None = None) -> bool:
    """Whether this is a figure of the first release: raw maps of that release with the same stem lie beside it."""
    stem = os.path.splitext(name)[0]
    for maps in dict.fromkeys((f"{stem}.npz", f"{stem.removesuffix('.image')}.npz")):
        there = os.path.isfile(os.path.join(root, maps)) if beside is None else maps in beside
        if there and is_old(Path(root, maps)):
            return True
    return False


def is_old(maps: Path) -> bool:
    """Whether this is an .npz file of the first release, whose provenance has no format."""
    if not marks.is_ours(maps):
        return False
    try:
        mark = marks.read_mark(maps)
    except InputError:
        return False
    return mark is not None and mark.get(marks.KEY) != marks.FORMAT


def ending(name: str) -> str:
    """The suffix of a file's name in lower case, as `Path.suffix`, which takes three times as long."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


class Paths(Sequence[Path]):
    """Paths that are made when they are asked for: a million of them would take a gigabyte."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Paths: ...
    def __getitem__(self, index: int | slice) -> Path | Paths:
        return Paths(self.paths[index]) if isinstance(index, slice) else Path(self.paths[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self.paths))


def in_order(paths: list[str]) -> Paths:
    """Sorted folder by folder, as paths are: the end of a name comes before any letter."""
    if paths and paths[0].startswith(os.curdir + os.sep):  # as a path is spelled, below the folder that one is in
        paths = [path[2:] for path in paths]
    return Paths(sorted(paths, key=lambda path: os.path.normcase(path).replace(os.sep, "\0")))


def folders_of(files: Sequence[Path]) -> str:
    """The topmost of the folders that hold these files."""
    parents = {file.parent for file in files}
    topmost = sorted(str(one) for one in parents if not parents.intersection(one.parents))
    return ", ".join(topmost[:SHOWN]) + (" …" if len(topmost) > SHOWN else "")
