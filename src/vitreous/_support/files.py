"""Files: written atomically (complete, or not there), hashed, and told from later versions of themselves."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

FIGURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")  # suffixes of figures
MISSING = "missing"  # the stamp of a file that is not there
DRAFT = ".part"  # the suffix of a file that is not complete yet


def write_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Write a temporary file and move it into place, so that an interrupt or a full disk leaves no partial file.

    `lasting`: also flush it to the disk, so that a power cut leaves no partial file either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}{DRAFT}")
    try:
        draft.write_bytes(content)
        if lasting:
            sync(draft, os.O_RDWR)
        os.replace(draft, path)
        if lasting and os.name == "posix":
            sync(path.parent, os.O_RDONLY)  # the directory entry as well
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None  # not the draft, which nobody knows
        raise
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path, how: int) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, how)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stamp_file(path: str | Path) -> str:
    """A file's size and time of change."""
    try:
        seen = os.stat(path)
    except (OSError, ValueError):
        return MISSING
    return f"{seen.st_size} {seen.st_mtime_ns}"


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
