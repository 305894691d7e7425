"""Shared by the commands that read images and write files: finding the images, naming and reporting the results."""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import typer

from vitreous._support import marks
from vitreous._support.files import FIGURES
from vitreous._support.memory import in_batches
from vitreous._support.progress import show_progress, steps
from vitreous.errors import InputError
from vitreous.images import listing, pictures
from vitreous.models.model import Model

BATCH = 8
FILES = {*FIGURES, ".gif", ".npz"}  # endings of single results
SHOWN = 20  # images listed in the summary
CLAIM = ".claim"  # the suffix of a hidden file that reserves a name
MOVED = " (--overwrite replaces results of vitreous)"
OLD = {"leaderboard.json": {"model", "data", "settings", "table"}, "findings.json": {"study", "finished", "models"}}
RESERVED: set[Path] = set()  # claims of this process
Batch = list[tuple[Path, pictures.Picture]]


@dataclass(frozen=True)
class Found:
    """The images that a command reads."""

    files: list[Path]
    named: set[str]  # the paths that were named one by one
    names: dict[Path, str]  # of the results
    notes: list[str]


@dataclass
class Summary:
    """The results of a command, printed as text or as JSON."""

    model: str
    out: Path
    named: set[str]
    methods: dict[str, None] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    channels: int = 3  # that the model takes
    moved: list[tuple[Path, Path]] = field(default_factory=list)  # results whose name was taken, and their new one
    taken: set[str] = field(default_factory=set)  # names that this run has used

    @classmethod
    def of(cls, model: Model, out: Path, found: Found) -> Summary:
        return cls(model.name, out, found.named, notes=dict.fromkeys(found.notes), channels=model.channels)

    def tell_moved(self, wanted: Path, found: Path) -> None:
        """Note that a result has a new name: one note for all of them."""
        self.moved.append((wanted, found))
        self.notes = {note: None for note in self.notes if not note.endswith(MOVED)}
        (first, new), others = self.moved[0], len(self.moved) - 1
        more = f", and {others} more have new names" if others else ""
        self.notes[f"{first} is something else and stays; the new result is {new}{more}{MOVED}"] = None

    def is_named(self, image: str) -> bool:
        """Whether this image was named on the command line, rather than found in a folder."""
        return os.path.abspath(image) in self.named

    @property
    def code(self) -> int:
        return 2 if not self.done or any(self.is_named(entry["image"]) for entry in self.failed) else 0


def check_out(out: Path) -> None:
    """Raise if this path cannot be a folder of results."""
    if out.suffix.lower() in FILES and not out.is_dir() and not out.exists():
        raise InputError(f"--out {out}: is the name of a file; give a folder, as there are several files to write")
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {out}: {folder} is a file, not a folder")


def find_pictures(sources: Sequence[str], limit: int | None = None) -> Found:
    """The images to read, without what vitreous wrote, and how their results are called."""
    listed = listing.look(*sources)
    files = listed.files[:limit]
    named = {os.path.abspath(source) for source in sources}
    return Found(files, named, relative_names(files, sources), [] if listed.note is None else [listed.note])


def read_batches(files: list[Path], summary: Summary, size: int = BATCH) -> Iterator[Batch]:
    """Yield batches of readable images; failures go into the summary."""
    batch: Batch = []
    for file in files:
        try:
            picture = pictures.open_file(file, summary.channels)
        except InputError as error:
            summary.failed.append({"image": str(file), "reason": str(error)})
            continue
        if picture.note:
            summary.notes[picture.note] = None
        batch.append((file, picture))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def work_through(
    files: list[Path],
    summary: Summary,
    size: int,
    work: Callable[[Batch], None],
    report: Callable[[], None],
    quiet: bool,
) -> None:
    """Process the images in batches; on an interrupt, report what was finished."""
    with show_progress(False if quiet else None):
        try:
            for batch in steps(read_batches(files, summary, size), len(files), "images", len):
                in_batches(partial(on_part, work, batch), len(batch), len(batch))
        except KeyboardInterrupt:
            report()
            raise
        finally:
            release_all()


def on_part(work: Callable[[Batch], None], batch: Batch, part: slice) -> None:
    work(batch[part])


def relative_names(files: Sequence[Path], sources: Sequence[str | Path]) -> dict[Path, str]:
    """The name of each image's results: its path below the folder, or the fixed part of the pattern, that was named.

    Without the ending and with / between folders: album/cat. An image that was named itself has its stem. The name
    depends on nothing else, so two images may have the same one: `place` tells them apart.
    """
    named = {os.path.abspath(source) for source in sources}
    roots = {os.path.abspath(fixed_part(source)): number for number, source in reversed([*enumerate(sources)])}
    names = {}
    for file in files:
        place = Path(os.path.abspath(file))
        above = [parent for parent in place.parents if str(parent) in roots and str(place) not in named]
        root = min(above, key=lambda parent: roots[str(parent)], default=place.parent)
        names[file] = "/".join(map(short, place.relative_to(root).with_suffix("").parts))
    return names


def fixed_part(source: str | Path) -> Path:
    """A folder as it is, and of a pattern the folders before its first wildcard."""
    path = Path(source)
    if os.path.lexists(path):
        return path
    parts = [*takewhile(lambda part: not any(c in part for c in "*?["), path.parts)]
    return Path(*parts) if len(parts) < len(path.parts) else path


def place(
    out: Path, name: str, suffixes: Sequence[str], identity: str, overwrite: bool, taken: set[str] | None = None
) -> str:
    """The first of name, name_2, name_3, … under which nothing is lost, reserved for this process.

    That is: each of its files is not there yet, or holds the result of this `identity`, or with `overwrite` any result
    of vitreous. `taken`: the names that the same run has used, to which this one is added. Call `release` when the
    files are written.
    """
    if not suffixes:
        return name
    used = set() if taken is None else taken
    for candidate in numbered(name):
        files = [out / f"{candidate}{suffix}" for suffix in suffixes]
        key = os.path.abspath(files[0]).lower()
        if key in used or not reserve(files, identity):
            continue
        if all(may_be_written(file, identity, overwrite) for file in files):
            used.add(key)
            return candidate
        release(out, candidate, suffixes)
    raise AssertionError  # numbers do not end


@contextmanager
def placed(
    summary: Summary, name: str, suffixes: Sequence[str], identity: str, overwrite: bool
) -> Iterator[str]:
    """The name under which the files of one image are to be written meanwhile; another than `name` is noted."""
    found = place(summary.out, name, suffixes, identity, overwrite, summary.taken)
    if found != name:
        summary.tell_moved(*(summary.out / f"{one}{suffixes[0]}" for one in (name, found)))
    try:
        yield found
    finally:
        release(summary.out, found, suffixes)


def place_folder(out: Path, name: str, files: Sequence[str], identity: str, overwrite: bool) -> Path:
    """Where a result of several files goes: into `out`, or into out/name_2, out/name_3, … if it would replace others.

    `files`: their names; the first is JSON with the mark that tells whose files they are.
    """
    for candidate in numbered(name):
        folder = out if candidate == name else out / candidate
        leader, others = folder / files[0], [folder / file for file in files[1:]]
        if not reserve([leader], identity):
            continue
        if may_be_written(leader, identity, overwrite) and (leader.exists() or not any(map(os.path.lexists, others))):
            return folder
        drop(claim_of(leader))
    raise AssertionError


def numbered(name: str) -> Iterator[str]:
    return chain([name], (f"{name}_{number}" for number in count(2)))


def may_be_written(file: Path, identity: str, overwrite: bool) -> bool:
    """Whether nothing of value is lost with what is at this place."""
    if not os.path.lexists(file):
        return True
    try:
        mark = marks.read_mark(file)
    except InputError:
        mark = None
    if mark is not None and mark.get("identity") == identity:
        return True
    return overwrite and (mark is not None or listing.is_result(os.fspath(file.parent), file.name) or is_old(file))


def is_old(file: Path) -> bool:
    """Whether this is a report of the first release, which has no mark."""
    if file.name not in OLD or not file.is_file():
        return False
    try:
        return set(json.loads(file.read_text(encoding="utf-8"))) >= OLD[file.name]
    except (OSError, ValueError, TypeError):
        return False


# ---------------------------------------------------------------------------------------------------- reserving names


def reserve(files: Sequence[Path], identity: str) -> bool:
    """Reserve files for a result by hidden files beside them, which only one process can create."""
    held = []
    for file in files:
        claim = claim_of(file)
        if not create(claim, identity) and not take_over(claim, identity):
            for one in held:
                drop(one)
            return False
        held.append(claim)
    return True


def claim_of(file: Path) -> Path:
    return Path(os.path.abspath(file)).with_name(f".{file.name}{CLAIM}")


def create(claim: Path, identity: str) -> bool:
    """Write a claim; False if there is one already."""
    told = {"identity": identity, "host": socket.gethostname(), "process": os.getpid()}
    try:
        claim.parent.mkdir(parents=True, exist_ok=True)
        with claim.open("x", encoding="utf-8") as file:
            json.dump(told, file)
    except FileExistsError:
        if not claim.parent.is_dir():
            raise
        return False
    except OSError as error:
        place = claim.with_name(claim.name[1:].removesuffix(CLAIM))
        raise OSError(error.errno, error.strerror, str(place)) from None
    RESERVED.add(claim)
    return True


def take_over(claim: Path, identity: str) -> bool:
    """Whether an existing claim is for the same result, or its process has ended without writing anything."""
    try:
        told = json.loads(claim.read_text(encoding="utf-8"))
        same, process = told["identity"] == identity, int(told["process"])
        here = told["host"] == socket.gethostname()
    except FileNotFoundError:  # released meanwhile
        return create(claim, identity)
    except (OSError, ValueError, KeyError, TypeError):  # just being written
        return False
    if same:
        return True
    if not here or is_running(process):
        return False
    claim.unlink(missing_ok=True)
    return create(claim, identity)


def is_running(process: int) -> bool:
    """Whether a process of this machine has not ended, as far as that can be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def release(out: Path, name: str, suffixes: Sequence[str]) -> None:
    """Give up the reservation of a name, when its files are written."""
    for suffix in suffixes:
        drop(claim_of(out / f"{name}{suffix}"))


def drop(claim: Path) -> None:
    if claim in RESERVED:
        RESERVED.discard(claim)
        claim.unlink(missing_ok=True)


@atexit.register
def release_all() -> None:
    """Give up whatever an error left reserved."""
    for claim in [*RESERVED]:
        drop(claim)


def short(name: str, most: int = 180) -> str:
    """Cut a name to a length that file systems accept, with room for a suffix."""
    return name.encode(errors="replace")[:most].decode(errors="ignore")


def tell_notes(summary: Summary, as_json: bool) -> None:
    """Print notes and failures to standard error; in JSON mode the notes are part of the output."""
    for note in () if as_json else summary.notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    for entry in summary.failed:
        fatal = not summary.done or summary.is_named(entry["image"])
        word, colour = ("error", "red") if fatal else ("skipped", "yellow")
        typer.secho(f"{word}: {entry['reason']}", err=True, fg=colour)
