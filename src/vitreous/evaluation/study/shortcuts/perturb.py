"""Images without some tokens, and with patches of another image: the class of each, and the score of a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import widen
from vitreous.trace.perturb.drop_tokens import Undroppable, refuse_dropping
from vitreous.trace.perturb.dropped_runs import lean_run
from vitreous.trace.perturb.fills import filled
from vitreous.trace.perturb.hide_patches import hide_pixels, pixels_of
from vitreous.trace.perturb.variant_scores import ends_of
from vitreous.trace.run import Finished
from vitreous.trace.target import Class
from vitreous.trace.trace import Trace
from vitreous.types import Images

Gone = Bool[np.ndarray, "V P"]  # the patches of each variant


@dataclass(frozen=True, eq=False)
class Answers:
    """Of each variant: the probability of the class that is asked for, and the best class."""

    probability: Float[np.ndarray, "V"]
    best: Int[np.ndarray, "V"]


def answers(trace: Trace, classes: Sequence[int], run: Callable[[slice], Finished]) -> Answers:
    """Run variants in slices that fit into memory; variant i is asked for class `classes[i]`."""
    if not classes:
        return Answers(np.zeros(0), np.zeros(0, np.int64))
    size = batch_size(trace.layout.footprint[0], trace.images.device)
    with torch.no_grad():
        parts = in_batches(lambda part: ends_of(run(part)), len(classes), size)
        return answered(trace, classes, *(torch.cat(part) for part in zip(*parts)))


def answered(trace: Trace, classes: Sequence[int], output: Tensor, embedding: Tensor) -> Answers:
    asked = Class(tuple(classes)).graded(trace.model.meaning, "probability", trace.model.exclusive)
    return Answers(widen(asked(output, embedding)).cpu().double().numpy(), output.argmax(1).cpu().numpy())


def unchanged(trace: Trace, rows: Sequence[int], classes: Sequence[int]) -> Answers:
    """Image `rows[i]` as it is."""
    output, embedding = ends_of(trace.any_finished())
    return answered(trace, classes, output[list(rows)], embedding[list(rows)])


def removes(trace: Trace) -> bool:
    """Whether tokens can be taken out of the sequence; if not, their patches get the mean colour of the image."""
    try:
        refuse_dropping(trace)
    except Undroppable:
        return False
    return True


def without(trace: Trace, rows: Sequence[int], gone: Gone, classes: Sequence[int]) -> Answers:
    """Image `rows[i]` without the patches `gone[i]`."""
    layout, device = trace.layout, trace.images.device
    if not rows:
        return answers(trace, [], lambda part: trace.plain())
    if not removes(trace):
        hidden = torch.from_numpy(gone).to(device).reshape(-1, *layout.cells)
        hide = hide_pixels(trace, filled(trace, "mean"))
        return answers(trace, classes, lambda part: hide(rows[part], hidden[part]))
    tokens = torch.zeros(len(rows), layout.tokens, dtype=torch.bool, device=device)
    tokens[:, layout.patch_tokens] = torch.from_numpy(gone).to(device)

    def run(part: slice) -> Finished:
        return lean_run(trace, trace.images[list(rows[part])], tokens[part], rows=rows[part])

    return answers(trace, classes, run)


def inserted(
    trace: Trace, rows: Sequence[int], donors: Sequence[Images], places: Gone, classes: Sequence[int]
) -> Answers:
    """Image `rows[i]` with the patches `places[i]` of another image, `donors[i]`, at the same places."""
    there = torch.from_numpy(places).to(trace.images.device).reshape(-1, *trace.layout.cells)

    def run(part: slice) -> Finished:
        given = torch.cat([donor.to(trace.images) for donor in donors[part]])
        mixed = torch.where(pixels_of(trace, there[part]), given, trace.images[list(rows[part])])
        return lean_run(trace, mixed, rows=rows[part])

    return answers(trace, classes, run)


def mask_of(places: Sequence[int] | np.ndarray, patches: int) -> Bool[np.ndarray, "P"]:
    found = np.zeros(patches, bool)
    found[np.asarray(places, np.int64)] = True
    return found
