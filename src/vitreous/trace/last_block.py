"""Whether the last block of a model may be run for the tokens that are read alone (capture/narrowed_block.py).

Nothing is assumed of a block except that everything in it besides attention treats each token by itself. Whether that
holds is checked once for each network: the output and its gradient must be those of the layout run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from vitreous._support.memory import batch_size
from vitreous.capture.attention import near
from vitreous.capture.narrowed_block import Fold
from vitreous.errors import ModelError
from vitreous.models.layout import Layout, Reference, along, noise_images
from vitreous.models.model import Model
from vitreous.trace.run import Finished, Narrow, Run, rows_of_run
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


def narrowing(trace: Runs, *, fold: bool = True) -> Narrow | None:
    """How the last block may compute less; None: it must not. `fold`: its attention need not be seen."""
    if not trace.model.facts.knows(asked(trace, LAST)) and is_hooked(trace):
        return None
    found = known(trace, LAST, lambda: check(trace)[0])
    return found if found is None or (fold and not trace.autocast) else Narrow()


def narrowing_with_output(trace: Runs) -> Finished | None:
    """The output of the trace's own images from the run that checks the last block; None: it was checked before."""
    room = batch_size(trace.layout.footprint[1], trace.images.device)
    if trace.model.facts.knows(asked(trace, LAST)) or is_hooked(trace) or room < 2 + len(trace.images):
        return None
    narrow, run = check(trace, trace.images)
    trace.model.facts.note(asked(trace, LAST), narrow)
    return run


def is_hooked(trace: Runs) -> bool:
    """Are there hooks of others in the network, so that every run must be a whole one?"""
    with trace.model.still() as still:
        return still.hooked


def check(trace: Runs, also: Images | None = None) -> tuple[Narrow | None, Finished | None]:
    """The way to run the last block that computes least and changes nothing; and what it gave for `also`."""
    layout = trace.layout
    if layout.read_tokens is None or not layout.probed or len(set(layout.blocks)) != layout.layers:
        return None, None
    kept: Reference | None = trace.model.facts.take(("layout run", trace.size))
    fold = find_fold(trace, kept)
    for narrow in ([Narrow(fold)] if fold is not None else []) + [Narrow()]:
        run = same_run(trace, narrow, kept, also)
        if run is not None:
            return narrow, run
    return None, None


def find_fold(trace: Runs, kept: Reference | None) -> Fold | None:
    """Where queries, keys and values come from; scores of products in half precision would be rounded."""
    exact = trace.model.dtype in (torch.float32, torch.float64) and not trace.autocast
    return kept.fold if kept is not None and exact else None


def same_run(trace: Runs, narrow: Narrow, kept: Reference | None, also: Images | None) -> Finished | None:
    """A run in this way of `also`, if it gives the output and gradient of the layout run for the noise images."""
    noise = noise_images(trace.model, trace.size)
    try:
        run = run_from_last(trace, noise if also is None else torch.cat([noise, also]), narrow)
        found = run.output[:2].detach(), gradient_of(trace, run)
        if kept is None or not equal(found, (kept.output, kept.grad)):  # or the weights have changed since
            whole = run_from_last(trace, noise, None)
            if not equal(found, (whole.output.detach(), gradient_of(trace, whole))):
                return None
    except (ModelError, RuntimeError, IndexError):
        return None
    return rows_of_run(run, slice(2, None))


def equal(one: Result, other: Result) -> bool:
    """Are the output and its gradient (where there is one) the same up to rounding?"""
    (output, grad), (expected, expected_grad) = one, other
    if not near(output, expected) or (grad is None) != (expected_grad is None):
        return False
    return grad is None or expected_grad is None or near(grad, expected_grad)


def run_from_last(trace: Runs, images: Images, narrow: Narrow | None) -> Finished:
    """Differentiable from the tokens that enter the last attention, where that can be."""
    layout = trace.layout
    how = Run.from_layer(layout.layers - 1) if layout.entries else Run.to_output()
    return trace.run(images, how.narrowed(narrow))


def gradient_of(trace: Runs, run: Finished) -> Tensor | None:
    """Of the two noise images, for what enters the last attention."""
    if run.leaf is None or not run.output.requires_grad:
        return None
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(along([run.output[:2]]), [run.leaf])
    return grad.narrow(trace.layout.batch_axis, 0, 2)
