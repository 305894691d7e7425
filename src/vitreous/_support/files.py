"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

FIGURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")  # endings of figures
DRAFT = ".part"  # the ending of a file that is not whole yet


def write_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Write beside the file and move over it in one step: an interrupt or a full disk leaves no half of it.

    `lasting`: wait until it is on the disk, so that a power cut leaves no half of it either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}{DRAFT}")
    try:
        draft.write_bytes(content)
        if lasting:
            sync(draft, os.O_RDWR)
        os.replace(draft, path)
        if lasting and os.name == "posix":
            sync(path.parent, os.O_RDONLY)  # the new name as well
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path, how: int) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, how)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
