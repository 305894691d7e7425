"""Variants of one image in which some patches are removed, hidden, or exchanged with those of another image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitreous._support.memory import MOST, batch_size, in_batches
from vitreous.errors import InputError, Unsupported
from vitreous.trace.features import patch_features
from vitreous.trace.last_block import known
from vitreous.trace.perturb.drop_tokens import Undroppable, refuse_dropping
from vitreous.trace.perturb.dropped_runs import run_without
from vitreous.trace.perturb.fills import filled
from vitreous.trace.perturb.hide_patches import LOCAL, hide_pixels, hide_tokens, is_local
from vitreous.trace.run import Finished
from vitreous.trace.trace import Trace
from vitreous.types import Images

Way = Literal["tokens", "pixels", "exchange"]
PLACES = ("same", "matched")
Sets = Bool[Tensor, "V n"]  # which patches are changed in each variant
Outputs = Float[Tensor, "V C"]
AT_ONCE = {"cpu": 2**12, "cuda": 2**16}  # tokens of a batch: small models run many variants at a time
Matches = Int[Tensor, "n"]  # for each patch, the patch of the other image that takes its place


@dataclass(eq=False)
class Change:
    """What is done with patches, and the model's output after it."""

    trace: Trace  # of one image
    way: Way
    run: Callable[[Sets], Finished]
    why: str | None = None  # why patches are hidden, not removed
    most: int = 0  # patches that can be changed together
    cover: Images | None = None  # the image that the changed patches come from; None: they are removed
    passes: int = field(default=0, init=False)  # images that went through the network

    def outputs(self, sets: Sets, what: str | None = None) -> Outputs:
        """The model's output for each variant, in float32."""
        device, tokens = self.trace.images.device, self.trace.layout.tokens or 1
        most = max(MOST.get(device.type, MOST["cpu"]), AT_ONCE.get(device.type, AT_ONCE["cpu"]) // tokens)
        size = batch_size(self.trace.layout.footprint[0], device, most)
        self.passes += len(sets)
        with torch.inference_mode(False), torch.no_grad():
            parts = in_batches(lambda part: self.run(sets[part]).output.detach().float(), len(sets), size, what)
        return torch.cat(parts)


def removal(trace: Trace) -> Change:
    """Tokens are removed from the sequence; where the model does not allow it, patches get the mean colour."""
    count = trace.layout.patches
    try:
        with torch.no_grad():
            refuse_dropping(trace)
    except Undroppable as error:
        grey = filled(trace, "mean")
        return Change(trace, "pixels", covering(trace, grey), error.reason, count, grey)

    def run(sets: Sets) -> Finished:
        gone = sets.new_zeros(len(sets), trace.layout.tokens)
        gone[:, trace.layout.patch_tokens] = sets
        return run_without(trace, 0, gone)

    return Change(trace, "tokens", run, most=count - 1)


def exchange(trace: Trace, other: Images, matches: Matches | None = None) -> Change:
    """Patches are exchanged with those of another image, at the same places or where `matches` says."""
    if other.shape != trace.images.shape:
        sizes = " and ".join("×".join(map(str, images.shape[-2:])) for images in (trace.images, other))
        raise InputError(f"the two images have {sizes} pixels; patches are exchanged between images of one size")
    cover = other if matches is None else rearranged(trace, other, matches)
    return Change(trace, "exchange", covering(trace, cover), None, trace.layout.patches, cover)


def covering(trace: Trace, cover: Images) -> Callable[[Sets], Finished]:
    """Runs in which the chosen patches come from a cover image."""
    with torch.no_grad():
        local = known(trace, LOCAL, lambda: is_local(trace))
        hide = (hide_tokens if local else hide_pixels)(trace, cover)
    return lambda sets: hide([0] * len(sets), sets.view(-1, *trace.layout.cells))


def rearranged(trace: Trace, other: Images, matches: Matches) -> Images:
    """The other image with each patch replaced by the one that matches it; pixels outside of patches are kept."""
    rows, columns = (spans(trace.layout.lines(axis, trace.size[axis])) for axis in (0, 1))
    places = [(..., row, column) for row in rows for column in columns]
    made = other.clone()
    for place, match in zip(places, matches.tolist()):
        taken = other[places[match]]
        if made[place].shape == taken.shape:  # a patch at the edge may be cut off
            made[place] = taken
    return made


def spans(lines: Sequence[int]) -> list[slice]:
    """The pixels of each row, or column, of patches."""
    starts = [lines.index(number) for number in range(max(lines) + 1)]
    return [slice(start, start + lines.count(number)) for number, start in enumerate(starts)]


def matched(trace: Trace, other: Trace) -> Matches:
    """For each patch, the patch of another image with the most similar features (cosine, last block but one)."""
    layer = max(0, trace.layout.layers - 2)
    try:
        features = [patch_features(one, [layer])[layer][0].flatten(0, -2).float() for one in (trace, other)]
    except Unsupported as error:
        raise Unsupported(f"places=matched compares patch features, and {error}; use places=same") from None
    one, two = (torch.nn.functional.normalize(some, dim=-1) for some in features)
    return (one @ two.mT).argmax(1).cpu()
