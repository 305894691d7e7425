"""A team: a front and workers, as processes that uvicorn's supervisor starts, watches and stops.

The supervisor knows no roles. A process takes one by locking a file in a folder that only this user may enter: `front`,
`worker-0`, … When it dies, the lock is free, and the process that is started instead takes the same role.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from filelock import FileLock, Timeout
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import multiprocess

from vitreous.errors import VitreousError, one_line
from vitreous.version import VERSION
from vitreous.web import logs
from vitreous.web.server import Server, config_of, quietly
from vitreous.web.settings import Settings

LONGEST = 100  # characters in the path of a Unix socket
SILENT = 60  # seconds after which a process that does not respond is ended; a busy machine is slow to start one
PATIENCE = 5.0  # seconds for a process to end
DEATHS = 5  # of each process within a minute, after which it is no use to start it again
FAILED = "failed"  # the file that says why a process could not start
BEHIND = {"proxy_headers": False, "date_header": False}  # which are the front's
FORCED = 128 + signal.SIGTERM


def run(settings: Settings, listening: socket.socket) -> int:
    """Serve until a signal comes; the exit code."""
    logs.configure(settings.log, "supervisor")
    with tempfile.TemporaryDirectory(prefix="vitreous-") as folder:  # only its owner may enter
        settings = replace(settings, folder=Path(folder), ports=ports(settings.workers, Path(folder)))
        config = uvicorn.Config(Role(settings), workers=settings.workers + 1, timeout_worker_healthcheck=SILENT)
        logs.configure(settings.log, "supervisor")
        team = Team(config, [listening])
        logs.event("start", version=VERSION, workers=settings.workers)
        team.run()
        logs.event("stop", forced=team.forced)
        why = settings.folder / FAILED
        if why.exists():
            raise VitreousError(why.read_text("utf-8"))
    if team.interrupted:
        raise KeyboardInterrupt
    return FORCED if team.forced else 0


def ports(workers: int, folder: Path) -> tuple[int, ...]:
    """Ports of the loopback interface, where Unix sockets are missing or the folder's name is too long for them."""
    if hasattr(socket, "AF_UNIX") and len(str(folder / f"worker-{workers}.sock")) <= LONGEST:
        return ()
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    found = tuple(one.getsockname()[1] for one in held)
    for one in held:
        one.close()
    return found


class Member(multiprocess.Process):
    """A process of the team, which takes a role."""

    def pong(self) -> None:
        self.child_conn.recv()
        self.child_conn.send(True)

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        threading.Thread(target=self.always_pong, daemon=True).start()
        threading.Thread(target=end_with_parent, daemon=True).start()
        role: Any = self.config.app
        role.take(sockets or [])


def end_with_parent() -> None:
    """Nobody stops a process whose supervisor was killed, so it stops itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


class Team(multiprocess.Multiprocess):
    """uvicorn's supervisor, which stops the front before the workers and gives up on what dies again and again."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        role: Any = config.app
        self.settings: Settings = role.settings
        self.deaths: list[float] = []
        self.interrupted, self.forced = False, False

    def run(self) -> None:
        kind = multiprocess.Process
        setattr(multiprocess, "Process", Member)  # noqa: B010  uvicorn has no setting for the kind of its processes
        try:
            super().run()
        finally:
            setattr(multiprocess, "Process", kind)  # noqa: B010

    def init_processes(self) -> None:
        with without_interrupts():
            super().init_processes()

    def keep_subprocess_alive(self) -> None:
        before = {one.pid for one in self.processes}
        with without_interrupts():
            super().keep_subprocess_alive()
        now = time.monotonic()
        fresh = [one.pid for one in self.processes if one.pid not in before]
        if fresh:
            logs.event("restart", logging.WARNING, pids=fresh)
        self.deaths = [*(when for when in self.deaths if now - when < 60), *[now] * len(fresh)]
        if len(self.deaths) > DEATHS * len(self.processes):
            failed(self.settings, "its processes end again and again; start it with --workers 1 to see why")
            self.should_exit.set()

    def handle_int(self) -> None:
        self.interrupted = True
        super().handle_int()

    def handle_hup(self) -> None:
        """Only the front reads the tokens."""
        for one in self.fronts():
            os.kill(one.pid or 0, signal.SIGHUP)

    def handle_ttin(self) -> None:
        """The number of workers is fixed: ids depend on it."""

    handle_ttou = handle_ttin

    def fronts(self) -> list[multiprocess.Process]:
        taken = self.settings.folder / "front.pid"
        pid = int(taken.read_text() or 0) if taken.exists() else 0
        return [one for one in self.processes if one.pid == pid and one.process.is_alive()]

    def terminate_all(self) -> None:
        """First the front, which lets its requests end; then the workers, which have none any more."""
        for one in self.sockets:
            one.close()  # or visitors would wait for a front that accepts no more
        if self.interrupted:
            self.stop(self.processes, signal.SIGINT, PATIENCE)
        else:
            self.stop(self.fronts(), signal.SIGTERM, self.settings.grace + PATIENCE)
            self.stop(self.processes, signal.SIGTERM, PATIENCE)

    def stop(self, processes: list[multiprocess.Process], sig: int, seconds: float) -> None:
        """Ask processes to end; after some time, or at another signal, end them."""
        end = time.monotonic() + seconds
        for one in processes:
            if one.process.is_alive() and one.pid:
                one.process.terminate() if os.name == "nt" else os.kill(one.pid, sig)
        while any(one.process.is_alive() for one in processes):
            again = {signal.SIGTERM, signal.SIGINT} & {*self.signal_queue}
            if again or time.monotonic() > end:
                self.forced |= bool(again)
                for one in self.processes:
                    one.process.kill()
                break
            time.sleep(0.05)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started here do not hear Ctrl-C before they serve; the supervisor tells them to end."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def failed(settings: Settings, why: str) -> None:
    """Leave the first reason why the team cannot work, for the supervisor."""
    with (settings.folder / FAILED).open("a", encoding="utf-8") as file:
        if not file.tell():
            file.write(why)


class Role:
    """What a process of the team becomes; uvicorn carries it to the process in place of an application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def take(self, sockets: list[socket.socket]) -> None:
        signal.signal(signal.SIGTERM, ended)
        for number in (None, *range(self.settings.workers)):
            name = "front" if number is None else f"worker-{number}"
            lock = FileLock(self.settings.folder / f"{name}.lock", blocking=False)
            try:
                lock.acquire()
            except Timeout:
                continue
            (self.settings.folder / f"{name}.pid").write_text(str(os.getpid()))
            logs.configure(self.settings.log, name)
            self.play(name, number, sockets)
        time.sleep(1)  # another one is about to end; the supervisor tries again

    def play(self, name: str, number: int | None, sockets: list[socket.socket]) -> None:
        """Serve until the end; one that cannot even begin ends the team, one that fails later is started again."""
        begun = self.settings.folder / f"{name}.begun"
        try:
            if number is None:
                lead(self.settings, sockets, begun)
            else:
                for one in sockets:
                    one.close()  # which is the front's
                work(self.settings, number, begun)
        except Exception as error:
            logs.LOG.error("%s failed", name, exc_info=None if isinstance(error, VitreousError) else error)
            if not begun.exists():
                failed(self.settings, f"{name}: {one_line(error)}")
                os._exit(STARTUP_FAILURE)
            time.sleep(1)
            os._exit(1)
        os._exit(0)  # a thread that does not finish its step ends with the process

    async def __call__(self, *given: Any) -> None:
        raise AssertionError("a role is no application")


def ended(sig: int, frame: FrameType | None) -> None:
    os._exit(0)


def lead(settings: Settings, sockets: list[socket.socket], begun: Path) -> None:
    """Be the front."""
    from vitreous.web.front import create_front
    from vitreous.web.tokens import Tokens

    tokens = Tokens(settings.token, settings.tokens, settings.secret)
    app, workers = create_front(settings, tokens)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: tokens.reload())

    async def announce() -> None:
        if workers.ready.is_set() and not announced:
            announced.append(True)
            models = ", ".join(workers.all[0].models)
            tell(f"vitreous {VERSION} with {models} ({settings.workers} workers)")
            tell(f"{settings.shown}{'?token=…' if tokens else ''}  (press Ctrl-C to stop)")
            if settings.browse:
                webbrowser.open(f"{settings.shown}?token={settings.token}" if settings.token else settings.shown)

    announced: list[bool] = []
    config = config_of(app, callback_notify=announce, timeout_notify=0, log_config=None)
    signal.signal(signal.SIGTERM, quietly)
    begun.touch()
    Server(config, app.watch, settings.grace, lambda: None).run(sockets)


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def work(settings: Settings, number: int, begun: Path) -> None:
    """Be a worker."""
    from vitreous.web import ids
    from vitreous.web.behind import behind

    ids.serve_as(number)
    with behind(settings, number) as (app, engine, listening):
        begun.touch()
        logs.event("start", version=VERSION, models=list(engine.models), pid=os.getpid())
        signal.signal(signal.SIGTERM, quietly)
        config = config_of(app, log_config=None, timeout_keep_alive=75, limit_concurrency=None, **BEHIND)
        Server(config, app.watch, 0, engine.jobs.stop_all).run([listening])
        engine.close()
        engine.ended(PATIENCE / 2)
