"""Whether the last block of a model may be run for the tokens that are read alone (capture/narrowed_block.py).

Nothing is assumed of a block except that everything in it besides attention treats each token by itself. Whether that
holds is checked once for each network: the output and its gradient must be those of the layout run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from vitreous.capture.attention import near
from vitreous.capture.narrowed_block import Fold
from vitreous.errors import ModelError
from vitreous.models.layout import Layout, Reference, along, noise_images
from vitreous.models.model import Model
from vitreous.trace.run import Finished, Narrow, Run
from vitreous.types import Images

T = TypeVar("T")
Result = tuple[Tensor, Tensor | None]  # an output, and a gradient
LAST = "how the last block may be run"


@runtime_checkable
class Runs(Protocol):
    """What is asked of a trace: its model, its images, and runs of them."""

    model: Model
    layout: Layout
    images: Images
    size: tuple[int, int]
    autocast: bool

    def run(self, images: Images, how: Run) -> Finished: ...


def known(trace: Runs, question: str, answer: Callable[[], T]) -> T:
    """What was found out about a network at this image size; found out again if its last block is rebuilt."""
    return trace.model.facts.find(asked(trace, question), answer)


def asked(trace: Runs, question: str) -> Hashable:
    blocks = trace.layout.blocks
    built = tuple(map(type, trace.model.module.get_submodule(blocks[-1]).modules())) if blocks else ()
    return question, trace.size, built


def narrowing(trace: Runs, *, fold: bool = True, proven: bool = True) -> Narrow | None:
    """How the last block may compute less; None: it must not. `fold`: its attention need not be seen.

    Not `proven`: it may be a guess, for those who compare the outputs themselves and need no gradient.
    """
    if not trace.model.facts.knows(asked(trace, LAST)):
        if not could_narrow(trace.layout) or is_hooked(trace):
            return None
        if not proven:
            return Narrow(find_fold(trace, trace.model.facts.get(("layout run", trace.size))) if fold else None)
    found = known(trace, LAST, lambda: check(trace))
    return found if found is None or (fold and not trace.autocast) else Narrow()


def is_proven(trace: Runs) -> bool:
    """Was the last block checked?"""
    return trace.model.facts.knows(asked(trace, LAST))


def is_hooked(trace: Runs) -> bool:
    """Are there hooks of others in the network, so that every run must be a whole one?"""
    with trace.model.still() as still:
        return still.hooked


def could_narrow(layout: Layout) -> bool:
    """Are a few tokens read, behind blocks that are modules of their own?"""
    return layout.read_tokens is not None and layout.probed and len(set(layout.blocks)) == layout.layers


def check(trace: Runs) -> Narrow | None:
    """The way to run the last block that computes least and changes nothing."""
    kept: Reference | None = trace.model.facts.take(("layout run", trace.size))
    fold = find_fold(trace, kept)
    ways = [Narrow(fold), Narrow()] if fold is not None else [Narrow()]
    return next((narrow for narrow in ways if same_run(trace, narrow, kept)), None)


def find_fold(trace: Runs, kept: Reference | None) -> Fold | None:
    """Where queries, keys and values come from; scores of products in half precision would be rounded."""
    exact = trace.model.dtype in (torch.float32, torch.float64) and not trace.autocast
    return kept.fold if kept is not None and exact else None


def same_run(trace: Runs, narrow: Narrow, kept: Reference | None) -> bool:
    """Does this way give the output and the gradient that the layout run gave for the noise images?"""
    noise = noise_images(trace.model, trace.size)
    try:
        found = result(trace, noise, narrow)
        if kept is not None and equal(found, (kept.output, kept.grad)):
            return True
        return equal(found, result(trace, noise, None))  # the weights may have changed since
    except (ModelError, RuntimeError, IndexError):
        return False


def equal(one: Result, other: Result) -> bool:
    """Are the output and its gradient (where there is one) the same up to rounding?"""
    (output, grad), (expected, expected_grad) = one, other
    if not near(output, expected) or (grad is None) != (expected_grad is None):
        return False
    return grad is None or expected_grad is None or near(grad, expected_grad)


def result(trace: Runs, images: Images, narrow: Narrow | None) -> Result:
    """The output, and the gradient for the tokens that enter the last attention, where that can be had."""
    layout = trace.layout
    how = Run.from_layer(layout.layers - 1) if layout.entries else Run.to_output()
    run = trace.run(images, how.narrowed(narrow))
    if run.leaf is None or not run.output.requires_grad:
        return run.output.detach(), None
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(along([run.output]), [run.leaf])
    return run.output.detach(), grad
