"""CUDA graphs: a method is recorded once per shape as a graph of kernels, and replayed.

For a ViT of usual size, Python takes longer to launch and observe the kernels than the GPU takes to run them. Within
`with vitreous.replay():` the second batch of a shape is recorded and every later one is replayed without Python in
between: the same kernels with the same results. Weights may change in place; a network whose tensors are replaced is
recorded again. The graphs and their memory are released when the context ends.

`replay("limited")` is meant for programs that do not know what they will run. The third batch is recorded and its
result compared, hooks and every attribute that Python code may read belong to the key, and the graphs of a network hold
at most a share of the free memory: the one that was not used for longest goes first. They go with the network, or by
`model.forget()`. It was not yet measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous._support.memory import budget
from vitreous.capture.attention import near
from vitreous.errors import OptionError
from vitreous.models.model import Model
from vitreous.registry import Method
from vitreous.trace.target import Numbered, Target
from vitreous.types import Images

Made = tuple[Tensor, ...]
Targets = tuple[Target, ...]
Run = Callable[[Images, Targets], Made]
SHARE = 4  # graphs hold at most this part of the memory that a batch may use
PLAIN = (bool, int, float, str, tuple, type(None))
OWN = frozenset(vars(nn.Module())) - {"training"}  # attributes that every module has; its tensors are in the key
_replays: ContextVar[Replays | Literal["limited"] | None] = ContextVar("vitreous_replay", default=None)


@contextmanager
def replay(how: Literal["all", "limited"] = "all") -> Iterator[None]:
    """Replay repeated batches of one shape as CUDA graphs within this context; has no effect on other devices.

    `limited`: from the third batch on, within a limit of memory, for a network that may change in any way.
    """
    if how not in ("all", "limited"):
        raise OptionError(f"replay takes 'all' or 'limited', not {how!r}")
    token = _replays.set(Replays() if how == "all" else "limited")
    try:
        yield
    finally:
        _replays.reset(token)


class Graph:
    """The CUDA graph of one method for one shape and one or more targets.

    `errors`: "global" forbids other threads to allocate memory meanwhile, "thread_local" does not.
    """

    def __init__(self, run: Run, images: Images, targets: Targets, errors: str = "global") -> None:
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
        before = torch.cuda.memory_reserved(images.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode=errors):
            self.made = run(self.images, asked)
        self.bytes = torch.cuda.memory_reserved(images.device) - before + self.images.nbytes

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

    seen_before = 1  # batches of a shape that run as usual
    errors = "global"

    def __init__(self) -> None:
        self.graphs: dict[Hashable, Graph] = {}  # the one that was not used for longest first
        self.times: dict[Hashable, int] = {}  # how often a key was seen
        self.unrecordable: set[Hashable] = set()  # shapes whose runs CUDA refuses to record

    def __call__(self, key: Hashable, run: Run, images: Images, targets: Targets) -> Made:
        if key in self.graphs:
            self.graphs[key] = graph = self.graphs.pop(key)
            return graph(images, targets)
        self.times[key] = self.times.get(key, 0) + 1
        if key in self.unrecordable or self.times[key] <= self.seen_before:
            return run(images, targets)
        return self.record(key, run, images, targets)

    def record(self, key: Hashable, run: Run, images: Images, targets: Targets) -> Made:
        """Record a run; returns its result."""
        try:
            graph = self.graphs[key] = Graph(run, images, targets, self.errors)
        except RuntimeError:  # a copy from the CPU within the run, for example, or too little memory
            self.unrecordable.add(key)
            return run(images, targets)
        return graph(images, targets)


class Limited(Replays):
    """The graphs of a network that may change, in a program with other threads: compared once, limited in memory."""

    seen_before = 2
    errors = "thread_local"

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.lock = model.facts.lock

    def __call__(self, key: Hashable, run: Run, images: Images, targets: Targets) -> Made:
        with self.lock:
            return super().__call__(key, run, images, targets)

    def record(self, key: Hashable, run: Run, images: Images, targets: Targets) -> Made:
        plain, found = run(images, targets), super().record(key, run, images, targets)
        if key in self.graphs and not all(map(near, found, plain)):
            del self.graphs[key]
            self.unrecordable.add(key)
        self.forget(budget(images.device) // SHARE)
        return plain

    def forget(self, limit: int) -> None:
        """Release graphs, the one that was not used for longest first, until the rest holds less than this."""
        while self.graphs and sum(graph.bytes for graph in self.graphs.values()) > limit:
            key = next(iter(self.graphs))
            del self.graphs[key]
            self.unrecordable.add(key)  # else it would be recorded again and again


def replays(
    model: Model, method: Method, values: dict[str, Any], images: Images, *targets: Target
) -> tuple[Replays, Hashable] | None:
    """The graphs in which this run is looked up, with its key; None if it cannot be replayed."""
    found = _replays.get()
    asked = all(target.replay_key is not None for target in targets)
    if found is None or not (asked and images.is_cuda and method.can_replay(values)):
        return None
    key = key_of(method.name, values, model, images, *targets)
    if isinstance(found, Replays):
        return found, key
    state = state_of(model)
    if state is None:
        return None
    by_model: WeakKeyDictionary[Model, Limited] = model.facts.find("CUDA graphs", WeakKeyDictionary)
    own = by_model.setdefault(model, Limited(model))
    return own, (key, state, torch.cuda.current_stream(images.device).cuda_stream)


def state_of(model: Model) -> Hashable | None:
    """Everything of a network that Python code may depend on: its modules and their attributes, and torch's settings.

    None if someone has hooked into it: a replay would not call the hooks.
    """
    with model.still() as still:
        if still.hooked:
            return None
    told: list[Any] = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    told += [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    told += [torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()]
    configs: dict[int, Any] = {}
    for module in model.module.modules():
        own = module.__dict__
        told += [id(module), *map(id, own["_modules"].values())]
        told += [value if isinstance(value, PLAIN) else id(value) for name, value in own.items() if name not in OWN]
        if "config" in own:
            configs[id(own["config"])] = own["config"]
    for config in configs.values():
        told.append(repr(sorted(getattr(config, "__dict__", {}).items())))
    return hash(tuple(map(repr, told)))


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
