"""Try every method on a model: it works, is refused with a reason, gives a useless map, or fails."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitreous._support.memory import out_of_memory
from vitreous.api import explain
from vitreous.errors import VitreousError, explained
from vitreous.inspect.check.result import Tried
from vitreous.inspect.check.verify import Subject, difference, plain
from vitreous.registry import Method
from vitreous.trace.apply import is_aimed, why_not
from vitreous.trace.trace import Trace

CHEAP = 50  # forward passes of a method that runs the network many times, with its cheap options
MAPS = 1e-2  # how far a map may differ in another batch, in single precision


def attempt(subject: Subject, methods: Sequence[Method], forward: float, seconds: float | None) -> Iterator[Tried]:
    """Try the methods, the cheap ones first, and name them in the order given; `seconds`: None without a limit."""
    found: dict[str, Tried] = {}
    began = time.perf_counter()
    for declared in sorted(methods, key=lambda one: cost(subject, one)):
        refused = why_not(subject.layout, subject.model.name, declared)
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        if refused is not None:
            found[declared.name] = Tried(declared.name, declared.family, "refused", refused)
        elif left is not None and cost(subject, declared) * forward > left:
            said = f"it may take longer than the {seconds:.0f} s of this check; name the method, or ask for all"
            found[declared.name] = Tried(declared.name, declared.family, "not tried", said)
        else:
            found[declared.name] = attempt_one(subject, declared, forward, {} if seconds is None else declared.cheap)
    yield from (found[declared.name] for declared in methods)


def cost(subject: Subject, declared: Method) -> int:
    """A guess, in forward passes of one image."""
    if declared.alone and (declared.costly or not declared.cheap):
        return subject.layout.patches * (10 if declared.costly else 2)
    if declared.alone:
        return max(CHEAP, subject.layout.patches // 4)
    return 12 if declared.costly else 4


def attempt_one(subject: Subject, declared: Method, forward: float, options: Mapping[str, Any]) -> Tried:
    """One method on both images; on one, if it takes them one by one."""
    name, family, target = declared.name, declared.family, subject.target if is_aimed(subject.model, declared) else None
    images = subject.images
    if declared.alone:
        images, target = images[:1], None if target is None else target.of_image(0)
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = explain(subject.model, Trace(subject.model, images), name, target, **options)
            wrong = useless(made.map, subject)  # waits for a GPU
            took = (time.perf_counter() - began) / max(forward, 1e-9) * len(subject.images) / len(images)
            if not wrong and declared.quick and not declared.alone:
                wrong = unsteady(subject, declared, made.map)
    except VitreousError as refusal:
        return Tried(name, family, "refused", explained(refusal), options=options)
    except Exception as crash:
        if out_of_memory(crash):
            return Tried(name, family, "not tried", "there is too little memory for it", options=options)
        return Tried(name, family, "bug", explained(crash), options=options, traceback=traceback.format_exc())
    shape = tuple(made.map.shape[1:])
    return Tried(name, family, "wrong" if wrong else "works", wrong, shape, took, options)


def useless(map: Tensor, subject: Subject) -> str:
    """What is wrong with a map by itself; empty if nothing is."""
    grid, size = tuple(subject.layout.grid), tuple(subject.images.shape[-2:])
    if not map.isfinite().all():
        return "its map contains NaN or infinity"
    flat = map.flatten(1)
    if not flat.any(1).all():
        return "its map is zero"
    if min(grid) > 2 and bool((flat.amax(1) == flat.amin(1)).any()):
        return "its map is the same everywhere"
    if map.ndim != 3 or (tuple(map.shape[1:]) not in (grid, size) and any(n > m for n, m in zip(map.shape[1:], size))):
        return f"its map is {list(map.shape[1:])}, for {grid[0]}×{grid[1]} patches"
    return ""


def unsteady(subject: Subject, declared: Method, maps: Tensor) -> str:
    """Whether the map of an image depends on its batch; empty if it does not."""
    for row, image in enumerate(subject.images):
        target = subject.target.of_image(row) if is_aimed(subject.model, declared) else None
        alone = explain(subject.model, Trace(subject.model, image[None]), declared.name, target).map
        error, limit = difference(maps[row], alone[0]), subject.limit(MAPS)
        if not error <= limit:
            return f"its map of an image depends on the other images of the batch (by {error:.1e})"
    return ""


def seconds_of(subject: Subject) -> float:
    """One forward pass of both images, the faster of two."""
    found = []
    for _ in range(2):
        began = time.perf_counter()
        plain(subject.model, subject.images)
        if subject.images.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)
