"""Run parts of a computation at the same time, each in a thread of its own with its share of torch's threads.

Two threads that each run a network on half of a batch take less time than one whose operations are each divided among
two: they need not wait for each other after every operation, nor while Python is at work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
IMAGES = 4  # the fewest for which a thread of its own pays off


def threads_for(images: int) -> int:
    """Into how many threads the images of a batch are best divided; 1 where it is not possible.

    The settings of torch that belong to a thread, such as its modes, would not reach the other threads.
    """
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    alone = modes > 0 or torch.is_autocast_enabled("cpu") or not torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    return 1 if alone else max(1, min(torch.get_num_threads(), images // IMAGES))


def at_once(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The result of each job. How many threads torch uses in other threads, such as the caller's, does not change."""
    found = workers(os.getpid(), len(jobs), torch.get_num_threads())
    return [one.result() for one in [found.submit(copy_context().run, job) for job in jobs]]


@cache
def workers(process: int, count: int, threads: int) -> ThreadPoolExecutor:
    """Threads that share so many threads of torch; they are kept, because the memory of a new one is new as well.

    They belong to a process: one that is forked has to begin its own.
    """
    ready = Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread takes over the usual number when it is first asked, and no more
        torch.set_num_threads(max(1, threads // count))  # of this thread, and the usual number

    pool = ThreadPoolExecutor(count, "vitreous", begin)
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)  # the usual number again
    return pool
