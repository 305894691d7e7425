"""Progress of long computations. The library itself prints nothing; a listener can be set to follow the progress."""

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
PATIENCE = 2.0  # seconds before a bar appears


@runtime_checkable
class Listener(Protocol):
    """Receives the start, the progress and the end of each task."""

    def begin(self, what: str, total: int) -> Any: ...

    def move(self, task: Any, done: int) -> None: ...

    def end(self, task: Any) -> None: ...


_listener: ContextVar[Listener | None] = ContextVar("vitreous_progress", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Report progress to `listener` within this context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def one(item: Any) -> int:
    return 1


def steps(items: Iterable[T], total: int, what: str | None, size: Callable[[T], int] = one) -> Iterator[T]:
    """Yield the items and report how many of `total` are done; `size` gives the count of one item."""
    if what is None:
        yield from items
        return
    with counting(total, what) as tick:
        for item in items:
            yield item
            tick(size(item))


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports how many more are done, for work that is not a plain loop."""
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
    """Progress bars on the terminal with the time left, for tasks that take longer than two seconds."""

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
    """Show progress bars for long computations on standard error within this context.

    `shown`: whether to show them; None: only if standard error is a terminal.
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
