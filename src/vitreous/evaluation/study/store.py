"""A study on disk: a manifest, and one Parquet file for each finished shard, written atomically.

OUT/latest.json                  which study was worked on last
OUT/KIND-ID/study.json           what it is: kind, options, models, data; other options are another ID
OUT/KIND-ID/shards/00017.parquet
OUT/KIND-ID/report.html, figures/
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vitreous._support.files import DRAFT, write_whole
from vitreous.errors import InputError, one_line
from vitreous.evaluation.study.plan import FORMAT
from vitreous.evaluation.study.shard import encode

if TYPE_CHECKING:
    import pyarrow

MANIFEST, LATEST, SHARDS, LOCK = "study.json", "latest.json", "shards", "lock"
HOUR = 3600


class Store:
    """One study's folder."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    @property
    def shards(self) -> Path:
        return self.folder / SHARDS

    def file(self, number: int) -> Path:
        return self.shards / f"{number:05d}.parquet"

    def write(self, number: int, table: pyarrow.Table) -> None:
        """Write a shard atomically and durably."""
        self.write_bytes(number, self.encode(number, table))

    def encode(self, number: int, table: pyarrow.Table) -> bytes:
        return encode(table, {"study": self.manifest["id"], "shard": number})

    def write_bytes(self, number: int, content: bytes) -> None:
        """Write a shard, unless the folder has vanished: one that is made anew would lack the other shards."""
        self.check_there()
        try:
            write_whole(self.file(number), content, lasting=True)
        except FileNotFoundError:
            self.check_there()
            raise
        self.check_there()

    def check_there(self) -> None:
        """Raise if the study's folder is not what it was when the run began."""
        if not (self.folder / MANIFEST).is_file():
            remedy = "bring it back to resume, or run the same command again to begin anew"
            raise InputError(f"{self.folder}: has vanished during the run, with what was stored in it; {remedy}")

    def done(self) -> list[int]:
        """The complete shards; partial or foreign files are ignored."""
        found = []
        for file in sorted(self.shards.glob("*.parquet")):
            if self.is_whole(file):
                found.append(int(file.stem))
        return found

    def is_whole(self, file: Path) -> bool:
        """Whether a file is complete Parquet and belongs to this study."""
        from pyarrow import ArrowInvalid, parquet

        try:
            told = json.loads(parquet.read_schema(file).metadata[b"vitreous"])
        except (OSError, ArrowInvalid, KeyError, TypeError, ValueError):
            return False
        return bool(told.get("study") == self.manifest["id"] and file.stem == f"{told.get('shard'):05d}")

    def clean(self) -> None:
        """Remove files that a killed run left half-written; beside the study only old ones, as others write there."""
        old = time.time() - HOUR
        for folder in (self.shards, self.folder, self.folder.parent):
            for file in folder.glob(f".*{DRAFT}"):
                with suppress(FileNotFoundError):
                    if folder != self.folder.parent or file.stat().st_mtime < old:
                        file.unlink()

    def locked(self) -> AbstractContextManager[None]:
        return locked(self.folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a study's lock: one run at a time; the lock of a killed process is released."""
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)  # closed in forked readers
    try:
        lock.acquire()
    except Timeout:
        raise InputError(f"{folder}: another run is working on this study; wait for it") from None
    except OSError:  # a file system without locks: two runs would do the same work twice, and store it once
        pass
    try:
        yield
    finally:
        lock.release()


def open_store(out: Path, manifest: dict[str, Any], about: dict[str, Any]) -> Store:
    """The store of this study below `out`, created if missing."""
    folder = out / f"{manifest['study']}-{manifest['id']}"
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).is_file():
        with locked(folder):  # of two runs at once, one decides how the study is cut
            if not (folder / MANIFEST).is_file():
                write_json(folder / MANIFEST, {**manifest, **about})
    write_json(out / LATEST, {"study": folder.name})
    return find_store(folder)


def find_store(path: str | Path) -> Store:
    """Find a study by its own folder, or the last one in the folder given as --out."""
    given = Path(path)
    if not given.is_dir():
        raise InputError(f"{given}: {'is a file, not a study' if given.exists() else 'no such folder'}")
    folder = given
    if not (given / MANIFEST).is_file():
        if not (given / LATEST).is_file():
            raise InputError(f"{given}: holds no study; make one: vitreous study cass DATA --out {given}")
        folder = given / str(read_json(given / LATEST).get("study"))
    manifest = read_json(folder / MANIFEST)
    if not {"id", "study", "options", "models"} <= set(manifest):
        raise InputError(f"{folder / MANIFEST}: is not the manifest of a study")
    if manifest.get("format", 1) > FORMAT:
        raise InputError(f"{folder}: was written by a newer version of vitreous; install that one to read it")
    return Store(folder, manifest)


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; the study is not there or was moved in part") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({one_line(error, 80)})") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: is not the manifest of a study")
    return found


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, json.dumps(content, indent=2, ensure_ascii=False).encode(), lasting=True)


def circumstances() -> dict[str, Any]:
    """When and with which versions a study was begun."""
    import datetime

    from vitreous.evaluation.report.files import versions

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"begun": now, "versions": {"python": platform.python_version(), **versions()}, "cores": os.cpu_count()}
