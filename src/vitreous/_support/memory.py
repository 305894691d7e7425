"""How much memory may be used, and how many things at a time fit into it.

Every method that runs many copies of an image asks here. A batch that does not fit all the same is halved and tried
again, so results never depend on the limit, only the time does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from vitreous._support.progress import steps
from vitreous.errors import OptionError

T = TypeVar("T")

SHARE = 0.5  # of what is free, where no limit is given
MOST = {"cpu": 16, "cuda": 256}  # more at a time gains nothing: a CPU's caches overflow before
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
GROUPS = (  # files of a container, newer and older
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_limit: ContextVar[int | None] = ContextVar("vitreous_memory", default=None)


@contextmanager
def limit_memory(limit: int | str | None) -> Iterator[None]:
    """Within this context, batches are chosen to take about so much memory: bytes, "4GB" or "512MiB"."""
    token = _limit.set(parse_memory(limit) if limit is not None else None)
    try:
        yield
    finally:
        _limit.reset(token)


def parse_memory(text: int | str) -> int:
    """4000000000, "4GB", "3.5 GiB" or "500M" to bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if found is None or found[2] == "i" or float(found[1]) == 0:
        raise OptionError(f"{text!r} is not an amount of memory; write 4GB, 512MiB or a number of bytes")
    return int(float(found[1]) * UNITS[found[2]])


def budget(device: torch.device) -> int:
    """Bytes that may be used at a time."""
    given = _limit.get()
    return given if given is not None else int(SHARE * free_memory(device))


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses on this device."""
    if device.type == "cuda":
        return free_cuda(device, int(time.monotonic()))
    return min(free_ram(Path("/proc/meminfo")), *free_in_group(Path("/sys/fs/cgroup")))


@lru_cache(maxsize=8)
def free_cuda(device: torch.device, second: int) -> int:
    """What the driver and torch's own store have left; asked once a second, since it takes half a millisecond."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_ram(table: Path) -> int:
    """What the system says is available; 2 GB where it does not say."""
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text())
        if found is not None:
            return int(found[1]) * 1024
    return 2 * 10**9


def free_in_group(group: Path) -> list[int]:
    """What a container leaves us, where it sets a limit."""
    for most, used in GROUPS:
        with suppress(OSError, ValueError):
            return [max(int((group / most).read_text()) - int((group / used).read_text()), 2**26)]
    return [2**62]


def batch_size(bytes_each: int, device: torch.device, most: int | None = None) -> int:
    """How many things of this size to run at a time: at least one."""
    most = most or MOST.get(device.type, MOST["cpu"])
    return max(1, min(most, budget(device) // max(1, bytes_each)))


def in_batches(run: Callable[[slice], T], count: int, size: int, what: str | None = None) -> list[T]:
    """`run` on slices of 0…count, `size` long, shorter where memory runs out. `what`: the name of a progress bar."""

    def parts() -> Iterator[tuple[int, T]]:
        start, most = 0, size
        while start < count:
            part = slice(start, min(start + most, count))
            done = attempt(run, part)
            if done is None:
                most = (part.stop - start) // 2
                continue
            yield part.stop - start, done[0]
            start = part.stop

    counted = steps(parts(), count, what, lambda part: part[0])
    return [done for _, done in counted]


def attempt(run: Callable[[slice], T], part: slice) -> tuple[T] | None:
    """What `run` gives; None where memory ran out and a smaller part may fit."""
    try:
        return (run(part),)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) or part.stop - part.start == 1:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def out_of_memory(error: BaseException) -> bool:
    """Did a GPU or the system have too little memory?"""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
