"""`vitreous serve`: serve the web page on this computer or for a team."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vitreous._support.optional import needs
from vitreous.cli.arguments import load_model
from vitreous.cli.values import parse_bands
from vitreous.errors import OptionError, one_line
from vitreous.version import VERSION

if TYPE_CHECKING:
    from vitreous.web.engine import Engine
    from vitreous.web.server import Server
    from vitreous.web.settings import Settings

PATIENCE = 2.0  # seconds that a job has to finish its current step
INTERRUPTED = 130
FORCED = 143  # a second SIGTERM
LOGS = ("text", "json")
SHORTEST = 16  # minimum length of a token


@dataclass(frozen=True)
class Place:
    """The address to listen on, and who may connect."""

    host: str
    port: int
    token: str | None
    names: Sequence[str]  # host names that others may use for this server
    tokens: Path | None = None  # a file of tokens, each with its limits


@dataclass(frozen=True)
class Loading:
    """What each worker loads; it is called in the worker's process."""

    models: Sequence[str | None]
    weights: Sequence[str]
    bands: str | None
    devices: Sequence[str | None]
    latents: Sequence[Path] = ()  # files and folders
    addable: Sequence[tuple[str, str, str | None]] = ()  # models that visitors may add: name, model, weights

    def __call__(self, worker: int) -> Engine:
        """The engine of a worker, on the device that is its turn."""
        from vitreous.web.engine import Allowed, Engine, Source
        from vitreous.web.latents import load_all

        device = self.devices[worker % len(self.devices)]
        files: list[str | None] = [*self.weights, *[None] * (len(self.models) - len(self.weights))]
        chosen = parse_bands(self.bands)
        loaded = [
            (load_model(spec, file, device, None, bands=self.bands), Source(spec, file, bands=chosen))
            for spec, file in zip(self.models, files)
        ]
        allowed = [
            Allowed(
                title,
                Source(spec, file, bands=chosen),
                partial(load_model, spec, file, device, None, bands=self.bands),
            )
            for title, spec, file in self.addable
        ]
        return Engine(loaded, latents=load_all(self.latents), allowed=allowed)


@dataclass(frozen=True)
class Running:
    """How many processes there are, what they log, and how they end."""

    workers: int | None = None  # None: one for each device
    memory: str | None = None
    grace: float = 5.0
    log: str = "text"
    browse: bool = False


def run(loading: Loading, place: Place, running: Running) -> None:
    check(loading.models, loading.weights, place, running)
    needs("uvicorn", "web")
    needs("fastapi", "web")
    needs("python_multipart", "web")
    needs("httpx", "web")
    needs("prometheus_client", "web")
    from vitreous.web.settings import Settings
    from vitreous.web.tokens import Tokens

    Tokens(place.token, place.tokens)  # raises where the file is wrong
    with listen(place.host, place.port) as listening:
        settings = Settings(
            make=loading,
            hosts=tuple(allowed(place)),
            shown=f"http://{bracketed(place.host)}:{listening.getsockname()[1]}/",
            workers=running.workers or len(loading.devices),
            memory=running.memory,
            token=place.token,
            tokens=place.tokens,
            grace=running.grace,
            log=running.log,
            browse=running.browse,
        )
        if settings.workers == 1:
            alone(settings, listening)
            return
        from vitreous.web import team

        raise typer.Exit(team.run(settings, listening))


def named_latents(given: Sequence[Path] | None) -> Sequence[Path]:
    """The files and folders that were given, or else the folder in which latents are stored, if there is one."""
    from vitreous.trace.concept import FOLDER

    return given or ([FOLDER] if FOLDER.is_dir() else [])


def alone(settings: Settings, listening: socket.socket) -> None:
    """Serve in this process."""
    from vitreous._support.memory import limit_memory
    from vitreous.web import logs
    from vitreous.web.app import create_app
    from vitreous.web.server import Server, config_of
    from vitreous.web.tokens import Tokens

    with limit_memory(settings.memory), logs.configured(settings.log, "server"):
        engine = settings.make(0)
        engine.warm()
        tokens = Tokens(settings.token, settings.tokens)
        app = create_app(engine, hosts=settings.hosts, tokens=tokens)
        server = Server(config_of(app, log_config=None), app.watch, settings.grace, engine.jobs.stop_all)
        greet(settings, engine.models, bool(tokens))
        logs.event("start", version=VERSION, models=list(engine.models))
        with hearing(tokens.reload):
            try:
                server.run(sockets=[listening])
            finally:
                logs.event("stop", forced=server.forced)
                finish(engine, server)


@contextmanager
def hearing(reload: Callable[[], None]) -> Iterator[None]:
    """SIGTERM is the server's own affair, which leaves with code 0; SIGHUP reads the tokens again."""
    from vitreous.web.server import quietly

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted: dict[str, Callable[..., None]] = {"SIGTERM": quietly, "SIGHUP": lambda *_: reload()}
    known = {getattr(signal, name): do for name, do in wanted.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, do) for number, do in known.items()}
    try:
        yield
    finally:
        for number, do in before.items():
            signal.signal(number, do)


def greet(settings: Settings, models: Iterable[str], guarded: bool) -> None:
    """Say where the page is, and open it."""
    typer.echo(f"vitreous {VERSION} with {', '.join(models)}")
    typer.echo(f"{settings.shown}{'?token=…' if guarded else ''}  (press Ctrl-C to stop)")
    if settings.browse:
        webbrowser.open(f"{settings.shown}?token={settings.token}" if settings.token else settings.shown)


def finish(engine: Engine, server: Server) -> None:
    """Stop all jobs; a thread that does not finish its step ends with the process."""
    engine.close()
    if server.forced or not engine.ended(PATIENCE):
        if server.interrupted:
            typer.secho("interrupted", err=True)
        sys.stdout.flush()
        os._exit(INTERRUPTED if server.interrupted else FORCED if server.forced else 0)


def check(models: Sequence[str | None], weights: Sequence[str], place: Place, running: Running) -> None:
    """Raise for settings that are unsafe or contradictory."""
    if len(weights) > len(models):
        raise OptionError(f"{len(weights)} --weights for {len(models)} --model; give one for each, in the same order")
    if running.log not in LOGS:
        raise OptionError(f"--log is one of {', '.join(LOGS)}, not {running.log!r}")
    if place.token is None and place.tokens is None and not is_loopback(place.host):
        said = f"--host {place.host} is reachable by others, so it needs --token (or the variable VITREOUS_TOKEN)"
        raise OptionError(f"{said}, e.g. from: python -c 'import secrets; print(secrets.token_urlsafe())'")
    if place.token is not None and (len(place.token) < SHORTEST or not place.token.isascii()):
        raise OptionError(f"--token is too easy to guess; give at least {SHORTEST} ASCII letters and digits")


def named(text: str) -> tuple[str, str, str | None]:
    """NAME or NAME=WEIGHTS of --allow-model: what visitors call it (no folder), the model and its weights."""
    spec, equals, weights = text.partition("=")
    if not spec or (equals and not weights):
        raise OptionError(f"--allow-model {text}: give NAME or NAME=WEIGHTS")
    if weights and not Path(weights).expanduser().is_file():
        raise OptionError(f"--allow-model {text}: there is no file {weights}")
    path = spec.startswith((".", "~")) or Path(spec).is_absolute()
    title = Path(spec).name if path else spec
    return (f"{title}={Path(weights).name}" if weights else title), spec, weights or None


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Open the port before models are loaded, so that a port in use is reported at once."""
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY for this protocol
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((name, port))
        opened.listen(512)
    except OSError as error:
        opened.close()
        said = f"cannot listen on {bracketed(name)}:{port} ({error.strerror or one_line(error)})"
        raise OptionError(f"{said}; choose another --port or --host") from None
    return opened


def allowed(place: Place) -> list[str]:
    """The host names that a browser may use for this server."""
    from vitreous.web.guard import LOOPBACK

    return [*LOOPBACK, place.host.strip("[]"), *place.names]


def bracketed(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host
