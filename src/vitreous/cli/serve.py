"""`vitreous serve`: serve the web page on this computer or for a team."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from vitreous._support.optional import needs
from vitreous.cli.arguments import load_model
from vitreous.cli.values import parse_bands
from vitreous.errors import OptionError, one_line
from vitreous.version import VERSION

if TYPE_CHECKING:
    from vitreous.web.engine import Engine

PATIENCE = 2.0  # seconds that a job has to finish its current step
INTERRUPTED = 130
SHORTEST = 16  # minimum length of a token


@dataclass(frozen=True)
class Place:
    """The address to listen on, and who may connect."""

    host: str
    port: int
    token: str | None
    names: Sequence[str]  # host names that others may use for this server


def run(
    models: Sequence[str | None],
    weights: Sequence[str],
    bands: str | None,
    device: str | None,
    place: Place,
    browse: bool,
) -> None:
    check(models, weights, place)
    uvicorn = needs("uvicorn", "web")
    needs("fastapi", "web")
    needs("python_multipart", "web")
    from vitreous.web.app import create_app
    from vitreous.web.engine import Engine, Source

    with listen(place.host, place.port) as listening:
        files: list[str | None] = [*weights, *[None] * (len(models) - len(weights))]
        chosen = parse_bands(bands)
        loaded = [
            (load_model(spec, file, device, None, bands=bands), Source(spec, file, bands=chosen))
            for spec, file in zip(models, files)
        ]
        engine = Engine(loaded)
        engine.warm()
        config = uvicorn.Config(create_app(engine, hosts=allowed(place), token=place.token), **settings())
        shown = f"http://{bracketed(place.host)}:{listening.getsockname()[1]}/"
        typer.echo(f"vitreous {VERSION} with {', '.join(engine.models)}")
        typer.echo(f"{shown}{'?token=…' if place.token else ''}  (press Ctrl-C to stop)")
        if browse:
            webbrowser.open(f"{shown}?token={place.token}" if place.token else shown)
        server = uvicorn.Server(config)
        shutdown = server.shutdown

        async def leave(sockets: list[socket.socket] | None = None) -> None:
            engine.jobs.stop_all()  # a page that waits for a job would delay the shutdown
            await shutdown(sockets)

        server.shutdown = leave
        try:
            server.run(sockets=[listening])
        finally:
            finish(engine)


def settings() -> dict[str, Any]:
    """The settings of uvicorn."""
    return {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "ws": "none",
        "proxy_headers": "FORWARDED_ALLOW_IPS" in os.environ,  # a proxy that forwards the client's address
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": 1,
        "limit_concurrency": 1000,
    }


def finish(engine: Engine) -> None:
    """Stop all jobs; a thread that does not finish its step ends with the process."""
    engine.close()
    if not engine.ended(PATIENCE):
        typer.secho("interrupted", err=True)
        sys.stdout.flush()
        os._exit(INTERRUPTED)


def check(models: Sequence[str | None], weights: Sequence[str], place: Place) -> None:
    """Raise for settings that are unsafe or contradictory."""
    if len(weights) > len(models):
        raise OptionError(f"{len(weights)} --weights for {len(models)} --model; give one for each, in the same order")
    if place.token is None and not is_loopback(place.host):
        said = f"--host {place.host} is reachable by others, so it needs --token (or the variable VITREOUS_TOKEN)"
        raise OptionError(f"{said}, e.g. from: python -c 'import secrets; print(secrets.token_urlsafe())'")
    if place.token is not None and (len(place.token) < SHORTEST or not place.token.isascii()):
        raise OptionError(f"--token is too easy to guess; give at least {SHORTEST} ASCII letters and digits")


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
