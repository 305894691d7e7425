"""Free memory goes back to the system.

Runs of a model leave holes in the heap of the C library, between what the stores keep: under 64 visitors, what was in
use stayed at 550 MB while the heap grew by 60 MB a minute. Two measures keep it level: few arenas (each thread would
get one of its own, with holes of its own), and `malloc_trim` every few seconds, which returns the pages in all holes.
Mapping each large tensor by itself would do so too, but a forward pass would take half as long again.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from vitreous.web.worker import Lane

ARENA_MAX = -8  # of mallopt
ARENAS = 2
EVERY = 3.0  # seconds


def few_arenas() -> None:
    """Threads share the heap's arenas; nothing where the C library is not glibc."""
    mallopt = found("mallopt")
    if mallopt is not None:
        mallopt(ARENA_MAX, ARENAS)


def found(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # Windows
        return None
    return function


class Trim:
    """A thread that returns free memory while the lanes work, and once after."""

    def __init__(self, lanes: Callable[[], Sequence[Lane]], every: float = EVERY) -> None:
        self.lanes, self.every, self.trim = lanes, every, found("malloc_trim")
        self.count = 0  # how often it did
        self._closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="free memory", daemon=True)
        if self.trim is not None:
            self.thread.start()

    def _run(self) -> None:
        assert self.trim is not None
        before = 0
        while not self._closed.wait(self.every):
            tasks = sum(lane.tasks for lane in self.lanes())
            if tasks != before or any(lane.busy for lane in self.lanes()):
                before = tasks
                self.trim(0)
                self.count += 1

    def close(self) -> None:
        self._closed.set()
