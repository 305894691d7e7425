"""Memory limits and batch sizes.

Every method that runs many copies of an image takes its batch size from here. A batch that does not fit is halved and
tried again, so the limit affects the time but never the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import Tensor

from vitreous._support.progress import steps
from vitreous.errors import OptionError

T = TypeVar("T")

SHARE = 0.5  # of the free memory, if no limit is given
MOST = {"cpu": 16, "cuda": 256}  # larger batches are not faster; on a CPU they overflow the caches
SIZE = TypeAdapter(ByteSize)
LARGE = 5 * 2**28  # bytes that one image may keep for its backward pass, if no limit is given
LEAST = 2**26  # bytes that are assumed to be free even in a full container
GROUPS = (  # files of cgroups v2 and v1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_limit: ContextVar[int | None] = ContextVar("vitreous_memory", default=None)


@contextmanager
def limit_memory(limit: int | str | None) -> Iterator[None]:
    """Choose batch sizes within this context to use about this much memory: bytes, "4GB" or "512MiB"."""
    token = _limit.set(parse_memory(limit) if limit is not None else None)
    try:
        yield
    finally:
        _limit.reset(token)


def parse_memory(text: int | str) -> int:
    """Convert 4000000000, "4GB", "3.5 GiB" or "500M" to bytes."""
    try:
        found = int(SIZE.validate_python(text))
    except ValidationError:
        found = 0
    if found < 1 or isinstance(text, bool):
        raise OptionError(f"{text!r} is not an amount of memory; write 4GB, 512MiB or a number of bytes")
    return found


def budget(device: torch.device) -> int:
    """Bytes that a batch may use."""
    given = _limit.get()
    return given if given is not None else int(SHARE * free_memory(device))


def free_memory(device: torch.device) -> int:
    """Free bytes on this device."""
    if device.type == "cuda":
        return free_cuda(device, int(time.monotonic()))
    return int(min(psutil.virtual_memory().available, free_in_group(Path("/sys/fs/cgroup"))))


@lru_cache(maxsize=8)
def free_cuda(device: torch.device, second: int) -> int:
    """Bytes free in the driver and in torch's cache, or left to this process if it may use a part of the GPU only.

    Cached for a second, since a query takes half a millisecond.
    """
    (free, total), used = torch.cuda.mem_get_info(device), torch.cuda.memory_allocated(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return max(0, min(free + torch.cuda.memory_reserved(device) - used, int(share * total) - used))


def free_in_group(group: Path) -> int | float:
    """Bytes left below the limit of a container; infinite if it sets none."""
    for most, used in GROUPS:
        with suppress(OSError, ValueError):
            return max(int((group / most).read_text()) - int((group / used).read_text()), LEAST)
    return math.inf


def batch_size(bytes_each: int, device: torch.device, most: int | None = None) -> int:
    """How many items of `bytes_each` fit into one batch; at least one."""
    most = most or MOST.get(device.type, MOST["cpu"])
    return max(1, min(most, budget(device) // max(1, bytes_each)))


def keeps_too_much(bytes_each: int, count: int, device: torch.device) -> bool:
    """Whether so many images keep more for their backward pass than may be used: then less is kept, at a cost of time.

    Without a limit, one image may keep `LARGE`, and all of them what a batch may use.
    """
    given, needed = _limit.get(), bytes_each * count
    if given is not None:
        return needed > given
    return bytes_each > LARGE or (needed > LARGE and needed > budget(device))


def in_batches(run: Callable[[slice], T], count: int, size: int, what: str | None = None) -> list[T]:
    """Call `run` on consecutive slices of 0…count, of `size` items or fewer if memory runs out.

    `what`: the label of the progress bar.
    """

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
    """The result of `run` in a tuple; None if memory ran out and a smaller slice may fit."""
    try:
        return (run(part),)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) or part.stop - part.start == 1:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether the GPU or the system ran out of memory; on the CPU, torch has no exception class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def capturing(images: Tensor) -> bool:
    """Is a graph being recorded, so that nothing may be asked of the GPU?"""
    return images.is_cuda and torch.cuda.is_current_stream_capturing()


def later(value: Tensor) -> Callable[[], Tensor]:
    """What a GPU computes, to be asked for when it has got more to do: nothing behind it is waited for."""
    copied, there = value.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def ask() -> Tensor:
        there.synchronize()
        return copied

    return ask
