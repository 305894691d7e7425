"""Run parts of a computation at the same time, each in a thread of its own with its share of torch's threads.

Two threads that each run a network on half of a batch take less time than one whose operations are each divided among
two: they need not wait for each other after every operation, nor while Python is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
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
    """The result of each job. How many threads torch uses elsewhere is left as it is, also after an error."""
    threads = torch.get_num_threads()
    ready = Barrier(len(jobs) + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread takes over the usual number when it is first asked, and no more
        torch.set_num_threads(max(1, threads // len(jobs)))  # of this thread, and the usual number
        ready.wait()

    with ThreadPoolExecutor(len(jobs), "vitreous", begin) as pool:
        waiting = [pool.submit(copy_context().run, job) for job in jobs]
        ready.wait()
        torch.set_num_threads(threads)
        return [one.result() for one in waiting]
