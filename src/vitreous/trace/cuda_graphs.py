"""CUDA graphs: a method is recorded once per shape as a graph of kernels, and replayed.

For a ViT of usual size, Python takes longer to launch and observe the kernels than the GPU takes to run them. Within
`with vitreous.replay():` the second batch of a shape is recorded and every later one is replayed without Python in
between: the same kernels with the same results. Weights may change in place; a network whose tensors are replaced is
recorded again. The graphs and their memory are released when the context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from vitreous.models.model import Model
from vitreous.registry import Method
from vitreous.trace.target import Numbered, Target
from vitreous.types import Images

Made = tuple[Tensor, ...]
Targets = tuple[Target, ...]
Run = Callable[[Images, Targets], Made]
_replays: ContextVar[Replays | None] = ContextVar("vitreous_replay", default=None)


@contextmanager
def replay() -> Iterator[None]:
    """Replay repeated batches of one shape as CUDA graphs within this context; has no effect on other devices."""
    token = _replays.set(Replays())
    try:
        yield
    finally:
        _replays.reset(token)


class Graph:
    """The CUDA graph of one method for one shape and one or more targets."""

    def __init__(self, run: Run, images: Images, targets: Targets) -> None:
        self.images = images.clone()
        self.index = torch.zeros(len(targets), len(images), dtype=torch.long, device=images.device)
        numbered = [one.class_numbers(len(images)) is not None for one in targets]
        asked = tuple(Numbered(row) if put else one for one, put, row in zip(targets, numbered, self.index))
        self.put(images, targets)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run(self.images, asked)  # warm-up: libraries choose their kernels and allocate memory
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.made = run(self.images, asked)

    def put(self, images: Images, targets: Targets) -> None:
        self.images.copy_(images, non_blocking=True)
        numbers = [one.class_numbers(len(images)) for one in targets]
        if any(numbers):
            filled = [row or [0] * len(images) for row in numbers]
            self.index.copy_(torch.tensor(filled).pin_memory(), non_blocking=True)

    def __call__(self, images: Images, targets: Targets) -> Made:
        self.put(images, targets)
        self.graph.replay()
        return tuple(made.clone() for made in self.made)


class Replays:
    """The graphs of a context."""

    def __init__(self) -> None:
        self.graphs: dict[Any, Graph | None] = {}  # None: the shape was seen once
        self.unrecordable: set[Any] = set()  # shapes whose runs CUDA refuses to record

    def __call__(self, key: Any, run: Run, images: Images, targets: Targets) -> Made:
        if key not in self.graphs or key in self.unrecordable:
            self.graphs[key] = None
            return run(images, targets)
        graph = self.graphs[key]
        if graph is None:
            try:
                graph = self.graphs[key] = Graph(run, images, targets)
            except RuntimeError:  # a copy from the CPU within the run, for example
                self.unrecordable.add(key)
                return run(images, targets)
        return graph(images, targets)


def replays(method: Method, values: dict[str, Any], images: Images, *targets: Target) -> Replays | None:
    """The graphs of the current context, if the method can be replayed."""
    found = _replays.get()
    asked = all(target.replay_key is not None for target in targets)
    return found if asked and images.is_cuda and method.can_replay(values) else None


def key_of(method: str, values: dict[str, Any], model: Model, images: Images, *targets: Target) -> Any:
    """The key of a graph: everything that must be equal for a replay, including the addresses of the weights."""
    kinds = tuple(target.replay_key for target in targets)
    places = tuple([t.data_ptr() for held in holders(model) for t in held.values() if t is not None])
    amp = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return method, repr(sorted(values.items())), id(model), tuple(images.shape), images.dtype, kinds, amp, places


def holders(model: Model) -> list[Mapping[str, Tensor | None]]:
    """The dictionaries that hold a network's parameters and buffers; cached, since every batch needs them."""

    def find() -> list[Mapping[str, Tensor | None]]:
        return [held for m in model.module.modules() for held in (m._parameters, m._buffers) if held]

    return model.facts.find("parameters and buffers", find)
