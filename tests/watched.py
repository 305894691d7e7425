"""What the threads of a server open, list and connect to, seen through Python's audit events."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vitreous

HERE = Path(__file__).parent
READABLE = [  # folders: the package, its tests, the Python installation; and what the system says of itself
    Path(vitreous.__file__).parent,
    HERE,
    *map(Path, {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)}),
    *map(Path, ("/proc", "/sys", "/dev/null", "/dev/urandom", "/etc/mime.types")),
]
LISTED = ("os.listdir", "os.scandir", "glob.glob", "os.walk")
CHANGED = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
NEVER = (
    "socket.connect",
    "socket.getaddrinfo",
    "socket.sendto",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.spawn",
)
NEVER = (*NEVER, "os.posix_spawn", "pickle.find_class", "urllib.Request", "ctypes.dlopen")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


@dataclass
class Watched:
    """What was seen; the thread that watches (the test's own) does not count."""

    watcher: int
    read: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def see(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            self.opened(*given[:3])
        elif event in LISTED:
            self.looked(given[0])
        elif event in CHANGED or event in NEVER:
            self.wrong.append(f"{event}{given!r}"[:300])

    def opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int):  # open already
            return
        name = os.path.abspath(os.fsdecode(path))
        writes = (isinstance(flags, int) and flags & WRITING) or any(c in (mode or "") for c in "wax+")
        if writes and "__pycache__" not in name:
            self.wrong.append(f"written: {name}")
        self.looked(path)

    def looked(self, path: Any) -> None:
        if isinstance(path, int):
            return
        name = os.path.abspath(os.fsdecode(path if path is not None else "."))
        self.read.add(name)
        if not any(Path(name).is_relative_to(folder) for folder in READABLE):
            self.wrong.append(f"read: {name}")


_watched: list[Watched] = []  # the hook stays for ever; it sees nothing while this is empty


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if _watched and threading.get_ident() != _watched[0].watcher:
        _watched[0].see(event, given)


sys.addaudithook(_hook)


@contextmanager
def watching() -> Iterator[Watched]:
    """See what other threads do within this context."""
    found = Watched(threading.get_ident())
    _watched.append(found)
    try:
        yield found
    finally:
        _watched.remove(found)
