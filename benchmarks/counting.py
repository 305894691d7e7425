"""What a piece of work costs, whatever else the machine does: operations, passes through the network, memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

import vitreous

Work = Callable[[], object]
MEMORY = "[memory]"  # how the profiler calls what an allocator gives or takes back
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it need not say that it starts and ends


class Flops(TorchDispatchMode):
    """Operations of matrix products, convolutions and attention, by their names; torch's own formulas.

    (torch's FlopCounterMode follows modules and stumbles over gradients of leaves, so it is not used.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.by: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry and args[0] is not None:  # a backward without a gradient does nothing
            self.by[packet.__name__] += flop_registry[packet](*args, **kwargs, out_val=out)
        elif "scaled_dot_product" in packet.__name__ and "backward" not in packet.__name__:
            self.by[packet.__name__] += sdpa_flop_count(*(one.shape for one in args[:3]))
        return out

    @property
    def total(self) -> int:
        return sum(self.by.values())


def flops(work: Work) -> int:
    with Flops() as counter:
        work()
    return counter.total


@contextmanager
def counted_runs() -> Iterator[list[int]]:
    """The number of images of each run of a network."""
    runs: list[int] = []
    run = vitreous.Model.run

    def noted(self: vitreous.Model, images: torch.Tensor, *given: Any) -> torch.Tensor:
        runs.append(len(images))
        return run(self, images, *given)

    with mock.patch.object(vitreous.Model, "run", noted):
        yield runs


@dataclass
class Peak:
    """The most bytes that torch's allocator held at a time within `peak_memory`, above what it held before."""

    bytes: int = 0


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    found = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found.bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(profile_memory=True) as profiler:
        yield found
    assert profiler.kineto_results is not None
    changes = [event for event in profiler.kineto_results.events() if event.name() == MEMORY]
    held = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        found.bytes = max(found.bytes, held)
