"""How far a long computation is. The library itself prints nothing: whoever wants to see it listens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
PATIENCE = 2.0  # seconds without a bar


@runtime_checkable
class Listener(Protocol):
    """Is told what begins, how far it is, and when it ends."""

    def begin(self, what: str, total: int) -> Any: ...

    def move(self, task: Any, done: int) -> None: ...

    def end(self, task: Any) -> None: ...


_listener: ContextVar[Listener | None] = ContextVar("vitreous_progress", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Within this context, `listener` is told."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def one(item: Any) -> int:
    return 1


def steps(items: Iterable[T], total: int, what: str | None, size: Callable[[T], int] = one) -> Iterator[T]:
    """The items, and whoever listens is told how many of `total` are done (`size`: how much one item counts)."""
    if what is None:
        yield from items
        return
    with counting(total, what) as tick:
        for item in items:
            yield item
            tick(size(item))


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A function that is told how many more are done, for work that is no plain loop."""
    listener = _listener.get()
    if listener is None:
        yield lambda more: None
        return
    task, done = listener.begin(what, total), 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        listener.move(task, done)

    try:
        yield add
    finally:
        listener.end(task)


class Bars:
    """Bars on the terminal with the time left, for whatever takes longer than two seconds."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress, self.clock = progress, clock
        self.began: dict[Any, float] = {}

    def begin(self, what: str, total: int) -> Any:
        task = self.progress.add_task(what, total=total, visible=False)
        self.began[task] = self.clock()
        return task

    def move(self, task: Any, done: int) -> None:
        late = self.clock() - self.began[task] > PATIENCE
        if late and not self.progress.live.is_started:
            self.progress.start()
        self.progress.update(task, completed=done, visible=late)

    def end(self, task: Any) -> None:
        self.progress.remove_task(task)
        del self.began[task]
        if not self.began:
            stop(self.progress)


def stop(progress: Progress) -> None:
    if progress.live.is_started:
        progress.stop()


@contextmanager
def show_progress(shown: bool | None = None) -> Iterator[None]:
    """Within this context, bars on the standard error output show how far long computations are.

    `shown`: yes or no; None: where it is a terminal.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text("" if not task.speed else f"{task.speed:.3g}/s", style="dim")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    try:
        with listening(Bars(progress)):
            yield
    finally:
        stop(progress)
