"""A thread that runs tasks one after another, with a bounded queue."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vitreous.web.problems import Problem

T = TypeVar("T")


class Lane:
    def __init__(self, name: str, room: int, full: str) -> None:
        self.room, self.full = room, full
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.open, self.busy, self.tasks = True, False, 0  # tasks: how many it has begun
        self._change = threading.Condition()
        context = contextvars.copy_context()  # the memory limit, say
        self.thread = threading.Thread(target=context.run, args=(self._work,), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future; a problem if the queue is full."""
        future: Future[T] = Future()
        with self._change:
            if not self.open or len(self.waiting) >= self.room:
                raise Problem(503, self.full, retry=2)
            self.waiting.append((future, work))
            self._change.notify_all()
        return future

    def _work(self) -> None:
        while True:
            with self._change:
                self.busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self.waiting or not self.open)
                if not self.open:
                    return
                future, work = self.waiting.popleft()
                self.busy, self.tasks = True, self.tasks + 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work  # nothing of it is kept while the thread waits

    def withdraw(self, future: Future[Any]) -> bool:
        """Cancel work that still waits; False if it has begun."""
        with self._change:
            kept = [item for item in self.waiting if item[0] is not future]
            found = len(kept) < len(self.waiting)
            self.waiting = deque(kept)
            return found

    def give_way(self, seconds: float) -> None:
        """Wait until the queue is empty, at most the given number of seconds."""
        with self._change:
            self._change.wait_for(lambda: not (self.busy or self.waiting), seconds)

    def close(self) -> None:
        with self._change:
            self.open = False
            for future, _ in self.waiting:
                future.cancel()
            self.waiting.clear()
            self._change.notify_all()
