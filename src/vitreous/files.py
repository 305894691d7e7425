"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

DRAFT = ".part"  # the ending of a file that is not whole yet


def write_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Write beside the file and move over it in one step: an interrupt or a full disk leaves no half of it.

    `lasting`: wait until it is on the disk, so that a power cut leaves no half of it either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}{DRAFT}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
        if lasting:
            sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """The new name is on the disk as well, where the system can promise it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
