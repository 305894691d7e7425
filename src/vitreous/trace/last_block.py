"""Check whether the last block may be computed for the classifier's tokens only (capture/narrowed_block.py).

This is correct if everything in the block besides attention treats each token independently. That is checked once for
each network: the output and its gradient must equal those of the layout run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from vitreous.capture.attention import near
from vitreous.capture.narrowed_block import Fold
from vitreous.errors import ModelError
from vitreous.models.layout import Layout, Reference, along, find_layout, noise_images
from vitreous.models.model import Model
from vitreous.trace.run import Finished, Narrow, Run
from vitreous.types import Images

T = TypeVar("T")
Result = tuple[Tensor, Tensor | None]  # an output, and a gradient
LAST = "how the last block may be run"


@runtime_checkable
class Runs(Protocol):
    """The part of a trace that is needed here: its model, its images and a way to run them."""

    model: Model
    layout: Layout
    images: Images
    size: tuple[int, int]
    autocast: bool

    def run(self, images: Images, how: Run) -> Finished: ...


def known(trace: Runs, question: str, answer: Callable[[], T]) -> T:
    """Results of these checks for a network at one image size; reset if its last block is replaced."""
    return trace.model.facts.find(asked(trace, question), answer)


def asked(trace: Runs, question: str) -> Hashable:
    blocks = trace.layout.blocks
    built = tuple(map(type, trace.model.module.get_submodule(blocks[-1]).modules())) if blocks else ()
    return question, trace.size, trace.autocast, built


def narrowing(trace: Runs, *, fold: bool = True, proven: bool = True) -> Narrow | None:
    """How the last block may be narrowed; None if it must run in full. `fold`: its attention need not be recorded.

    `proven=False` allows an unchecked guess, for callers that compare the outputs themselves and need no gradient.
    """
    if not trace.model.facts.knows(asked(trace, LAST)):
        if not could_narrow(trace.layout) or is_hooked(trace):
            return None
        if not proven:
            return Narrow(find_fold(trace, trace.model.facts.get(("layout run", trace.size))) if fold else None)
    found = known(trace, LAST, lambda: check(trace))
    return found if found is None or (fold and not trace.autocast) else Narrow()


def is_proven(trace: Runs) -> bool:
    """Whether the last block was checked."""
    return trace.model.facts.knows(asked(trace, LAST))


def is_hooked(trace: Runs) -> bool:
    """Whether the network has foreign hooks, in which case every forward pass must be complete."""
    with trace.model.still() as still:
        return still.hooked


def could_narrow(layout: Layout) -> bool:
    """Whether the classifier uses only a few tokens and each block is a module."""
    return layout.read_tokens is not None and layout.probed and len(set(layout.blocks)) == layout.layers


def check(trace: Runs) -> Narrow | None:
    """The cheapest way to run the last block that leaves the results unchanged."""
    kept: Reference | None = trace.model.facts.take(("layout run", trace.size))
    kept = kept or find_layout(trace.model, trace.size)[1]
    fold = find_fold(trace, kept)
    ways = [Narrow(fold), Narrow()] if fold is not None else [Narrow()]
    return next((narrow for narrow in ways if same_run(trace, narrow, kept)), None)


def find_fold(trace: Runs, kept: Reference | None) -> Fold | None:
    """Where queries, keys and values come from; None in half precision, where folded scores would be rounded."""
    exact = trace.model.dtype in (torch.float32, torch.float64) and not trace.autocast
    return kept.fold if kept is not None and exact else None


def same_run(trace: Runs, narrow: Narrow, kept: Reference | None) -> bool:
    """Whether this way reproduces the output and gradient of the layout run for the noise images."""
    noise = noise_images(trace.model, trace.size)
    try:
        found = result(trace, noise, narrow)
        if kept is not None and equal(found, (kept.output, kept.grad)):
            return True
        return equal(found, result(trace, noise, None))  # the weights may have changed since the layout run
    except (ModelError, RuntimeError, IndexError):
        return False


def equal(one: Result, other: Result) -> bool:
    """Whether the outputs and their gradients (if any) are equal up to rounding."""
    (output, grad), (expected, expected_grad) = one, other
    if not near(output, expected) or (grad is None) != (expected_grad is None):
        return False
    return grad is None or expected_grad is None or near(grad, expected_grad)


def result(trace: Runs, images: Images, narrow: Narrow | None) -> Result:
    """The output, and its gradient with respect to the tokens that enter the last attention, if available."""
    layout = trace.layout
    how = Run.from_layer(layout.layers - 1) if layout.entries else Run.to_output()
    run = trace.run(images, how.narrowed(narrow))
    if run.leaf is None or not run.output.requires_grad:
        return run.output.detach(), None
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(along([run.output]), [run.leaf])
    return run.output.detach(), grad
