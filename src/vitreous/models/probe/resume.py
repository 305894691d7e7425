"""What an interrupted training leaves on disk, so that it can be resumed."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import torch

from vitreous._support.files import write_whole
from vitreous.errors import InputError, OptionError, one_line

SAVE_EVERY = 60.0  # seconds of work that an interruption may cost in a long epoch


class Files:
    """Files beside the result while training runs: its state, and the embeddings that are computed only once."""

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.identity = identity
        self.state = out.with_name(f"{out.name}.resume")
        self.embeddings = out.with_name(f"{out.name}.embeddings")
        self.saved = time.monotonic()

    def write(self, file: Path, content: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save({"identity": self.identity, **content}, buffer)
        write_whole(file, buffer.getvalue())
        self.saved = time.monotonic()

    def due(self) -> bool:
        """Is it time to save again?"""
        return time.monotonic() - self.saved >= SAVE_EVERY

    def read(self, file: Path) -> dict[str, Any] | None:
        """What an interrupted run left, or None; raises if that run had other data or options."""
        if not file.is_file():
            return None
        again = "to begin anew: --fresh (resume=False)"
        try:
            found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
            before = found.pop("identity")
        except Exception as error:
            raise InputError(f"{file}: cannot be resumed from ({one_line(error, 80)}); {again}") from None
        other = [name for name, value in self.identity.items() if before.get(name) != value]
        if other:
            raise OptionError(f"{file}: is from an interrupted run with another {' and '.join(other)}; {again}")
        return found

    def clear(self) -> None:
        for file in (self.state, self.embeddings):
            file.unlink(missing_ok=True)


def unfinished(out: str | Path) -> bool:
    """Is there an interrupted run to resume?"""
    files = Files(Path(out), {})
    return files.state.is_file() or files.embeddings.is_file()
