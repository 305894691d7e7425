"""Checks of a network, once for each image size, against its layout run.

Whether the last block may be computed for the classifier's tokens only (capture/narrowed_block.py), which is correct if
everything in the block besides attention treats each token independently: output and gradient must be the same.
Whether a network repeats, and keeps its images apart: an image alone must give what it gave in the pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from vitreous.capture.attention import near
from vitreous.capture.narrowed_block import Fold
from vitreous.errors import ModelError
from vitreous.models.facts import Facts
from vitreous.models.inputs import Inputs
from vitreous.models.kinds_of_module import kinds_in
from vitreous.models.layout import Layout
from vitreous.models.layout_run import Reference, find_layout
from vitreous.models.model import Model
from vitreous.models.survey_run import along, noise_images
from vitreous.trace.run import Finished, Narrow, Run
from vitreous.types import Extent, Images

T = TypeVar("T")
Result = tuple[Tensor, Tensor | None, Tensor | None]  # an output, the tokens before the last attention, their gradient
APART = "does it keep its images apart?"
CHANGES = "it does not even repeat itself"
LAST = "how the last block may be run"


@runtime_checkable
class Runs(Protocol):
    """The part of a trace that is needed here: its model, its images and a way to run them."""

    model: Model
    layout: Layout
    images: Images
    extent: Extent
    autocast: bool
    inputs: Inputs

    @property
    def facts(self) -> Facts: ...

    def run(self, images: Images, how: Run) -> Finished: ...


def known(trace: Runs, question: str, answer: Callable[[], T]) -> T:
    """Results of these checks for a network at one image size; reset if its last block is replaced."""
    return trace.facts.find(asked(trace, question), answer)


def asked(trace: Runs, question: str) -> Hashable:
    blocks = trace.layout.blocks
    built = kinds_in(trace.model.module.get_submodule(blocks[-1])) if blocks else ()
    return question, trace.extent, trace.autocast, built


def narrowing(trace: Runs, *, fold: bool = True, proven: bool = True) -> Narrow | None:
    """How the last block may be narrowed; None if it must run in full. `fold`: its attention need not be recorded.

    `proven=False` allows an unchecked guess, for callers that compare the outputs themselves and need no gradient.
    """
    if not trace.facts.knows(asked(trace, LAST)):
        if not could_narrow(trace.layout) or is_hooked(trace):
            return None
        if not proven:
            return Narrow(find_fold(trace, trace.facts.get(("layout run", trace.extent))) if fold else None)
    found = known(trace, LAST, lambda: check(trace))
    return found if found is None or (fold and not trace.autocast) else Narrow()


def is_proven(trace: Runs) -> bool:
    """Whether the last block was checked."""
    return trace.facts.knows(asked(trace, LAST))


def is_hooked(trace: Runs) -> bool:
    """Whether the network has foreign hooks, in which case every forward pass must be complete."""
    with trace.model.still() as still:
        return still.hooked


def could_narrow(layout: Layout) -> bool:
    """Whether the classifier uses only a few tokens, each block is a module and the patches are one run of tokens."""
    few, one_run = layout.read_tokens is not None and layout.probed, isinstance(layout.patch_run, slice)
    return few and one_run and len(set(layout.blocks)) == layout.layers


def check(trace: Runs) -> Narrow | None:
    """The cheapest way to run the last block that leaves the results unchanged."""
    kept: Reference | None = trace.facts.take(("layout run", trace.extent))
    kept = kept or find_layout(trace.model.sampled(trace.inputs), trace.extent)[1]
    fold = find_fold(trace, kept)
    ways = [Narrow(fold), Narrow()] if fold is not None else [Narrow()]
    return next((narrow for narrow in ways if same_run(trace, narrow, kept)), None)


def find_fold(trace: Runs, kept: Reference | None) -> Fold | None:
    """Where queries, keys and values come from; None in half precision, where folded scores would be rounded."""
    exact = trace.model.dtype in (torch.float32, torch.float64) and not trace.autocast
    return kept.fold if kept is not None and exact else None


def same_run(trace: Runs, narrow: Narrow, kept: Reference) -> bool:
    """Whether this way reproduces, for one of the noise images alone, what the layout run gave for it in the pair."""
    noise = noise_images(trace.model, trace.extent)[:1]
    try:
        found = result(trace, noise, narrow)
        if equal(found, part(trace, kept)):
            trace.facts.note((APART, trace.extent), True)
            return True
        return equal(found, result(trace, noise, None))  # the weights may have changed since the layout run
    except (ModelError, RuntimeError, IndexError):
        return False


def part(trace: Runs, kept: Reference) -> Result:
    """What the layout run gave for its first image."""
    axis = trace.layout.batch_axis

    def first(t: Tensor | None) -> Tensor | None:
        return t if t is None else t[None] if t.ndim == 2 else t.narrow(axis, 0, 1)

    return kept.output[:1], first(kept.tokens), first(kept.grad)


def equal(one: Result, other: Result) -> bool:
    """Whether the outputs, tokens and gradients (where both are known) are equal up to rounding."""
    pairs = [(a, b) for a, b in zip(one, other) if a is not None and b is not None]
    return (one[2] is None) == (other[2] is None) and all(a.shape == b.shape and near(a, b) for a, b in pairs)


def result(trace: Runs, images: Images, narrow: Narrow | None) -> Result:
    """The output, the tokens that enter the last attention and their gradient, as far as there are any."""
    run = run_again(trace, images, narrow)
    if run.leaf is None or not run.output.requires_grad:
        return run.output.detach(), None if run.leaf is None else run.leaf.detach(), None
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(along([run.output]), [run.leaf], allow_unused=True)
    return run.output.detach(), run.leaf.detach(), grad


def run_again(trace: Runs, images: Images, narrow: Narrow | None) -> Finished:
    """A run of images of noise."""
    layout = trace.layout
    cut = layout.entries and trace.model.has_gradients
    how = Run.from_layer(layout.layers - 1) if cut else Run.to_output()
    return trace.run(images, replace(how.narrowed(narrow), noise=True))


# ----------------------------------------------------------------------------------------- repeats, and images apart


def keeps_apart(trace: Runs) -> bool:
    """Whether an image alone gives what it gives in a batch; raise if the model does not repeat itself."""
    facts, question = trace.facts, (APART, trace.extent)
    if not facts.knows(question) and facts.knows(("layout run", trace.extent)):
        if could_narrow(trace.layout) and not is_hooked(trace):
            narrowing(trace)
        if not facts.knows(question):
            again = partial(find_layout, trace.model.sampled(trace.inputs), trace.extent)
            kept = facts.take(("layout run", trace.extent)) or again()[1]
            facts.note(question, compare(trace, kept))
    facts.take(("layout run", trace.extent))  # nothing else needs it
    if facts.get(question) == CHANGES:
        raise ModelError(
            f"{trace.model.name} gives another result when it is run again on the same image (does its forward pass "
            "draw random numbers, to mask, shuffle or drop tokens?), so no map of it would mean anything"
        )
    return facts.get(question) is not False


def compare(trace: Runs, kept: Reference) -> bool | str:
    """Run one image of the layout run alone; where something differs, find out why by running the pair again."""
    if not kept.output.isfinite().all():
        return True  # NaN equals nothing; the maps will be refused
    noise = noise_images(trace.model, trace.extent)[: len(kept.output)]
    alone = plain_result(trace, noise[:1])
    if same_values(alone, part(trace, kept)):
        return True
    again = [plain_result(trace, noise) for _ in range(2)]
    if not same_values(again[0], again[1]):
        return CHANGES
    output, tokens, _ = again[0]
    first = None if tokens is None else tokens.narrow(trace.layout.batch_axis, 0, 1)
    return same_values(alone, (output[:1], first, None))


def plain_result(trace: Runs, images: Images) -> Result:
    """Output and tokens of a whole run."""
    run = run_again(trace, images, None)
    return run.output.detach(), None if run.leaf is None else run.leaf.detach(), None


def same_values(one: Result, other: Result) -> bool:
    """Whether output and tokens are equal up to rounding."""
    return equal((*one[:2], None), (*other[:2], None))
