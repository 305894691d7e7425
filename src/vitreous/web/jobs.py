"""Long-running jobs: queued, with progress events, cancellable at every step."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from vitreous._support.progress import listening
from vitreous.errors import VitreousError
from vitreous.web import ids
from vitreous.web.limits import Limits
from vitreous.web.metrics import Outcomes
from vitreous.web.problems import Problem, of_error
from vitreous.web.sse import sse
from vitreous.web.store import Store
from vitreous.web.worker import Lane

T = TypeVar("T")
LOG = logging.getLogger("vitreous.web")
OFTEN = 0.1  # seconds between two reports of progress
BEAT = 15.0  # seconds after which a silent stream says that it lives
AGAIN = 2.0  # seconds after which a job that waits is told how long
RETRY = b"retry: 300\n\n"  # milliseconds after which a browser that lost the stream asks for it again
GIVES_WAY = 2.0  # seconds, at every step, to short questions and brief jobs
LATELY = 16  # jobs whose time tells how long others may take
LAST = ("done", "cancelled", "failed")  # events after which none comes


class Cancelled(Exception):
    """The job was cancelled."""


class Job:
    """A job with its events in order and its present progress."""

    def __init__(self, client: str, limits: Limits) -> None:
        self.id, self.client, self.limits = ids.fresh(), client, limits
        self.outcomes: Outcomes | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.progress: dict[str, Any] | None = None
        self.place: int | None = None
        self.wait: Callable[[], float | None] = lambda: None  # seconds until its turn, if the jobs before it tell
        self.stopped = threading.Event()
        self.left = threading.Event()  # the server ends, and tells nobody any more
        self.step, self.steps = 0, 1
        self.took: list[float] = []  # seconds of the steps so far
        self.future: Future[None] | None = None
        self.heard: float | None = None  # when the last listener left
        self.began: float | None = None
        self.listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------------ told by a thread

    def tell(self, name: str, data: dict[str, Any]) -> None:
        """Add an event; every listener gets all events in this order."""
        self.events.append((name, data))
        self.progress = None
        self.wake()

    def wake(self) -> None:
        with self._lock:
            listeners = list(self.listeners)
        for loop, event in listeners:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(event.set)

    def report(self, progress: dict[str, Any]) -> None:
        self.progress = {**progress, "step": self.step, "steps": self.steps}
        self.progress["seconds_left"] = self.estimate(progress["seconds_left"])
        self.wake()

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """The steps of the job, counted and timed; a job that was cancelled ends here."""
        self.steps = len(items)
        for self.step, item in enumerate(items, 1):
            self.check()
            began = time.monotonic()
            yield item
            self.took.append(time.monotonic() - began)

    def estimate(self, now: float | None) -> float | None:
        """Seconds until the whole job is done; `now`: those of this step. Later steps take as long as the mean."""
        mean = sum(self.took) / len(self.took) if self.took else now
        here = mean if now is None else now
        later = max(0, self.steps - max(1, self.step))
        return None if here is None or mean is None else round(here + later * mean, 2)

    def check(self) -> None:
        """Raise if the job was cancelled."""
        if self.stopped.is_set() or self.abandoned:
            raise Cancelled
        if self.began is not None and time.monotonic() - self.began > self.limits.job_seconds:
            said = f"this took more than {self.limits.job_seconds:.0f} seconds, which is all that this server gives"
            raise Problem(503, f"{said}; ask for less at a time")

    @property
    def abandoned(self) -> bool:
        """Whether those who listened have left, or nobody came while it ran."""
        with self._lock:
            if self.listeners:
                return False
            since, most = (self.began, self.limits.patience) if self.heard is None else (self.heard, self.limits.grace)
        return since is not None and time.monotonic() - since > most

    def run(self, work: Callable[[Job], None], ahead: Sequence[Lane]) -> None:
        """Run the job, in the worker's thread."""
        self.began, self.place = time.monotonic(), None
        try:
            with listening(Steps(self, ahead)):
                self.check()
                work(self)
            self.end("done", {"seconds": round(time.monotonic() - self.began, 3)})
        except Cancelled:
            self.end("cancelled", {})
        except Exception as error:
            note(error)
            self.end("failed", of_error(error))

    def end(self, name: str, data: dict[str, Any]) -> None:
        """The last event."""
        self.place = None
        if self.outcomes is not None:
            self.outcomes.ended(name, self.id, self.began)
        self.tell(name, data)

    @property
    def ended(self) -> bool:
        """Whether the last event was sent: a client that hears of it may start its next job at once."""
        return bool(self.events) and self.events[-1][0] in LAST

    def over(self, after: int) -> bool:
        """Whether the job has ended and has no event after this number."""
        return self.ended and after >= len(self.events)

    # ---------------------------------------------------------------------------------------------- heard by a stream

    async def stream(self, after: int) -> AsyncIterator[bytes]:
        """Events as they come, from number `after` on, until the last."""
        mine = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self.listeners.add(mine)
        shown: tuple[Any, Any] = None, None
        try:
            yield RETRY
            while True:
                mine[1].clear()
                while after < len(self.events):
                    name, data = self.events[after]
                    after += 1
                    yield sse(name, data, after)
                    if name in LAST:
                        return
                if self.left.is_set():
                    return
                place, progress = self.place, self.progress
                if place is not None and place != shown[0]:
                    yield sse("queued", {"place": place, "seconds_left": self.wait()})
                if progress is not None and progress is not shown[1]:
                    yield sse("progress", progress)
                shown = place, progress
                try:
                    await asyncio.wait_for(mine[1].wait(), BEAT if place is None else AGAIN)
                except TimeoutError:
                    shown = None, progress  # a job that waits is told again how long
                    yield b": still here\n\n"
        finally:
            with self._lock:
                self.listeners.discard(mine)
                self.heard = time.monotonic()


def note(error: BaseException) -> None:
    """Log an internal error with its traceback."""
    if not isinstance(error, VitreousError | Problem):
        LOG.error("a job failed", exc_info=error)


class Steps:
    """Listens to a computation: reports the outermost task, stops a cancelled job, lets short tasks run in between."""

    def __init__(self, job: Job, ahead: Sequence[Lane]) -> None:
        self.job, self.ahead = job, ahead
        self.tasks: list[tuple[str, int, float]] = []  # what, total, when it began
        self.told = 0.0

    def begin(self, what: str, total: int) -> int:
        self.job.check()
        self.tasks.append((what, total, time.monotonic()))
        self._tell(0)
        return len(self.tasks) - 1

    def move(self, task: int, done: int) -> None:
        self.job.check()
        for lane in self.ahead:
            lane.give_way(GIVES_WAY)
        if task == 0 and time.monotonic() - self.told > OFTEN:
            self._tell(done)

    def end(self, task: int) -> None:
        del self.tasks[task:]

    def _tell(self, done: int) -> None:
        what, total, began = self.tasks[0]
        self.told = time.monotonic()
        left = (self.told - began) / done * (total - done) if done else None
        self.job.report({"what": what, "done": done, "total": total, "seconds_left": left and round(left, 2)})


class Jobs:
    """All jobs of a server; ended ones are kept for a while."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.outcomes = limits, Outcomes()
        self.known: Store[str, Job] = Store(limits.jobs_kept)
        self._lock = threading.Lock()
        self._queues: dict[Lane, list[Job]] = {}  # the first one runs
        self._lately: dict[Lane, deque[float]] = {}  # seconds of jobs

    def start(self, client: str, lane: Lane, ahead: Sequence[Lane], work: Callable[[Job], None]) -> Job:
        """Queue a job; a problem if the queue is full. Jobs that were left while they waited make room for it.

        `ahead`: the lanes whose work passes before each of its steps.
        """
        for job in self.known.values():
            if not job.ended and job.abandoned:
                self.cancel(job)
        mine = [job for job in self.known.values() if job.client == client and not job.ended]
        unfinished = len(mine) + getattr(client, "others", 0)
        if unfinished >= (getattr(client, "jobs", None) or self.limits.own_jobs):
            raise Problem(429, f"{unfinished} of your jobs are not done yet; wait for one, or cancel it", retry=2)
        job = Job(client, self.limits)
        job.outcomes = self.outcomes

        def run() -> None:
            try:
                job.run(work, ahead)
            finally:
                self._leave(lane, job)

        with self._lock:
            queue = self._queues.setdefault(lane, [])
            job.place, job.wait = len(queue), partial(self._wait, lane, job)
            job.future = lane.submit(run)
            queue.append(job)
        self.known.put(job.id, job)
        return job

    def _leave(self, lane: Lane, job: Job) -> None:
        """Update the places of the waiting jobs."""
        with self._lock:
            queue = self._queues[lane]
            queue.remove(job)
            if job.began is not None:
                self._lately.setdefault(lane, deque(maxlen=LATELY)).append(time.monotonic() - job.began)
            waiting = [other for other in queue if other.place is not None]
            for other in waiting:
                other.place = queue.index(other)
        for other in waiting:
            other.wake()

    def _wait(self, lane: Lane, job: Job) -> float | None:
        """Seconds until its turn: the job that runs says how long, others take as long as jobs of this lane lately."""
        with self._lock:
            before, lately = self._queues[lane][: job.place], [*self._lately.get(lane, ())]
        mean = sum(lately) / len(lately) if lately else None
        told = [(one.progress or {}).get("seconds_left", mean) for one in before[:1]] + [mean] * len(before[1:])
        known = [seconds for seconds in told if seconds is not None]
        return round(float(sum(known)), 1) if len(known) == len(told) else None

    def find(self, job: str) -> Job:
        found = self.known.get(job)
        if found is None:
            raise Problem(404, "there is no such job; it may have ended long ago")
        return found

    def cancel(self, job: Job) -> None:
        """Stop a job within one step; one that still waits ends at once."""
        job.stopped.set()
        for lane, queue in list(self._queues.items()):
            if job in queue and job.future is not None and lane.withdraw(job.future):
                self._leave(lane, job)
                job.end("cancelled", {})

    def stop_all(self) -> None:
        """Shut down: jobs stop within one step, their event streams at once."""
        for job in self.known.values():
            job.stopped.set()
            job.left.set()
            job.wake()
