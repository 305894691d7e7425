"""Where results are written, so that nothing is lost: under names that are free or hold the same, and reserved.

A result may replace the file of the same identity, or with --overwrite any result of vitreous; a file of anybody else
stays. Two processes that write into one folder at once reserve their names by hidden files.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from vitreous._support import marks
from vitreous.errors import InputError
from vitreous.images import listing

CLAIM = ".claim"  # the suffix of a hidden file that reserves a name
MOVED = " (--overwrite replaces results of vitreous)"
OLD = {"leaderboard.json": {"model", "data", "settings", "table"}, "findings.json": {"study", "finished", "models"}}
RESERVED: set[Path] = set()  # claims of this process


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
def placed_folder(
    out: Path, name: str, files: Sequence[str], identity: str, overwrite: bool
) -> Iterator[tuple[Path, list[str]]]:
    """The folder into which a result of several files is to be written meanwhile, and a note if it is not `out`."""
    folder = place_folder(out, name, files, identity, overwrite)
    note = f"{out / files[0]} is something else and stays; the new result is in {folder}{MOVED}"
    try:
        yield folder, [] if folder == out else [note]
    finally:
        drop(claim_of(folder / files[0]))


@contextmanager
def reserved(file: Path) -> Iterator[None]:
    """Raise if another process is about to write this file."""
    if not reserve([file], identity=""):
        raise InputError(f"{file}: another run is writing this file; wait for it")
    try:
        yield
    finally:
        drop(claim_of(file))


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
    held: list[Path] = []
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
        file = claim.open("x", encoding="utf-8")
        RESERVED.add(claim)  # dropped also if it cannot be written
        with file:
            json.dump(told, file)
    except FileExistsError:
        if not claim.parent.is_dir():
            raise
        return False
    except OSError as error:
        drop(claim)
        place = claim.with_name(claim.name[1:].removesuffix(CLAIM))
        raise OSError(error.errno, error.strerror, str(place)) from None
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
    if same and identity:
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
