"""The read-out of a detector, or of an answer, by target: the tokens that its query or word reads, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from vitreous.trace.detection import Detected
from vitreous.trace.target import Contrast, Each, Target
from vitreous.trace.trace import Trace

Queries = list[tuple[int, ...]]  # of each image


@runtime_checkable
class Asks(Protocol):
    """A target that knows which rows of the output it reads, such as a word of an answer."""

    def queries(self, images: int) -> Queries | None: ...


@contextmanager
def reading(trace: Trace, target: Target) -> Iterator[None]:
    """A trace whose read-out is that of the target's queries."""
    before = trace.queries
    trace.queries = queries_of(target, len(trace)) or queries_of(target.fix(trace.output), len(trace))
    try:
        yield
    finally:
        trace.queries = before


def queries_of(target: Target, images: int) -> Queries | None:
    """The queries that a target reads in each image, as far as they are fixed."""
    if isinstance(target, Detected | Asks):
        return target.queries(images)
    if isinstance(target, Contrast):
        one, other = queries_of(target.one, images), queries_of(target.other, images)
        return None if one is None or other is None else [tuple(dict.fromkeys(a + b)) for a, b in zip(one, other)]
    if isinstance(target, Each):
        each = [queries_of(one, 1) for one in target.targets]
        return [one[0] for one in each if one is not None] if None not in each else None
    return None
