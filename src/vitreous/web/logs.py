"""Logs as one JSON object a line, or as plain text: requests, jobs, start, stop and errors; no tokens, no images."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

LOG, UVICORN = logging.getLogger("vitreous.web"), logging.getLogger("uvicorn.error")
KINDS = ("text", "json")


class Lines(logging.Formatter):
    """One JSON object for each record; its own fields come as extra={"said": {…}}."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        said = getattr(record, "said", None)
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage() if said is not None else "error" if record.levelno >= 40 else "note",
            "process": self.process,
            **(said if said is not None else {"message": record.getMessage()}),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


class Text(logging.Formatter):
    """A line for people."""

    def format(self, record: logging.LogRecord) -> str:
        said = " ".join(f"{name}={value}" for name, value in getattr(record, "said", {}).items())
        return f"{record.levelname}: {super().format(record)} {said}".rstrip()


def configure(kind: str, process: str) -> None:
    """Send the logs of this process to stderr: as JSON every event, as text only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(process) if kind == "json" else Text())
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(logging.INFO if kind == "json" else logging.WARNING)
    UVICORN.handlers, UVICORN.propagate = [handler], False
    UVICORN.setLevel(logging.WARNING)


@contextmanager
def configured(kind: str, process: str) -> Iterator[None]:
    """The same for a while, for a process that does something else afterwards."""
    loggers = (LOG, UVICORN)
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    configure(kind, process)
    try:
        yield
    finally:
        for one, (handlers, propagate, level) in zip(loggers, before):
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)


def event(name: str, level: int = logging.INFO, **said: Any) -> None:
    LOG.log(level, name, extra={"said": said})
