"""What a server was started with; it travels to the processes of a team, so everything in it can be pickled."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitreous.web.engine import Engine


@dataclass(frozen=True)
class Settings:
    make: Callable[[int], Engine]  # the engine of a worker, by its number
    hosts: tuple[str, ...]  # names that browsers may use for this server
    shown: str = ""  # its address for people
    workers: int = 1
    memory: str | None = None  # of all workers together
    token: str | None = field(default=None, repr=False)
    tokens: Path | None = None  # a file of them
    grace: float = 5.0  # seconds for what runs when the server is stopped
    log: str = "text"
    browse: bool = False
    folder: Path = Path()  # where the processes of a team meet
    ports: tuple[int, ...] = ()  # of the workers, where there are no Unix sockets
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)  # by which workers know the front
