"""Scores of images in which some patches are replaced by those of a cover image.

If the token of a patch depends on that patch only, tokens are exchanged instead of pixels: patches are embedded once
for each image and each cover, not for each variant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from jaxtyping import Bool
from torch import Tensor

from vitreous.capture.attention import near
from vitreous.errors import ModelError
from vitreous.trace.last_block import known
from vitreous.trace.perturb.dropped_runs import lean_run
from vitreous.trace.perturb.entering_tokens import Entering, entered, tokens_entering
from vitreous.trace.perturb.variant_scores import Ends, VariantScores, scores_each
from vitreous.trace.run import Finished
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images

Hidden = Bool[Tensor, "V *cells h w"]
Hide = Callable[[Sequence[int], Hidden], Finished]
LOCAL = "can tokens be exchanged in place of pixels?"


def scores_hidden(
    trace: Trace,
    target: Target,
    rows: Sequence[int],
    hidden: Hidden,
    cover: Images,
    what: str | None = None,
    key: Hashable | None = None,
    ends: Ends | None = None,
) -> VariantScores:
    """The score of image `rows[i]` with the patches `hidden[i]` taken from its cover; the target is fixed."""

    @cache
    def hide() -> Hide:
        if trace.compiled or not known(trace, LOCAL, lambda: is_local(trace)):
            return hide_pixels(trace, cover)
        return hide_tokens(trace, cover)

    return scores_each(trace, target, rows, lambda part: hide()(rows[part], hidden[part]), what, key=key, ends=ends)


# -------------------------------------------------------------------------------------- two ways to hide patches


def hide_pixels(trace: Trace, cover: Images) -> Hide:
    """Exchange pixels and run the whole network."""

    def hide(rows: Sequence[int], hidden: Hidden) -> Finished:
        index = list(rows)
        return lean_run(trace, torch.where(pixels_of(trace, hidden), cover[index], trace.images[index]), rows=index)

    return hide


def hide_tokens(trace: Trace, cover: Images) -> Hide:
    """Exchange tokens and run from the first block on."""
    tokens = torch.cat([tokens_entering(trace, images) for images in (trace.images, cover)])
    both, place = Entering(trace, trace.images[:1], tokens), torch.arange(tokens.shape[1], device=cover.device)

    def hide(rows: Sequence[int], hidden: Hidden) -> Finished:
        image = torch.tensor(rows, device=cover.device)[:, None] + len(trace) * tokens_of(trace, hidden)[..., 0]
        enter = both.picking(image, place, len(place))
        return lean_run(trace, both.carrier, enter=enter, rows=rows, shared=both.shared)

    return hide


def pixels_of(trace: Trace, hidden: Hidden) -> Bool[Tensor, "V *frames 1 Y X"]:
    """The pixels of the hidden patches; pixels that belong to no patch are never hidden."""
    rows, columns = (torch.tensor(trace.layout.lines(axis, trace.size[axis]), device=hidden.device) for axis in (0, 1))
    inside = (rows >= 0)[:, None] & (columns >= 0)
    found = hidden[..., rows[:, None], columns] & inside
    if len(trace.extent) == 3:
        times = torch.tensor(trace.layout.moments(trace.extent[0]), device=hidden.device)
        found = found[:, times] & (times >= 0)[:, None, None]
    return found[..., None, :, :]


def tokens_of(trace: Trace, hidden: Hidden) -> Bool[Tensor, "V N 1"]:
    """The tokens of the hidden patches."""
    found = hidden.new_zeros(len(hidden), trace.layout.tokens, 1)
    found[:, trace.layout.patch_tokens, 0] = hidden.flatten(1)
    return found


def is_local(trace: Trace) -> bool:
    """Whether the token of a patch depends on that patch only, and the output on the tokens only.

    Changing one patch of the image must give the same output as exchanging its token.
    """
    layout = trace.layout
    if not layout.layers or len(layout.blocks) != layout.layers or layout.alone:
        return False
    middle = torch.zeros(1, *layout.cells, dtype=torch.bool, device=trace.images.device)
    middle[(0, *layout.middle)] = True
    image = trace.images[:1]
    changed = torch.where(pixels_of(trace, middle), image + 1, image)
    streams, whole = entered(trace, torch.cat([image, image + 1, changed]), [0, 0, 0], stop=False)
    if whole is None or streams.ndim != 3 or streams.shape[1] != layout.tokens:
        return False
    made = torch.where(tokens_of(trace, middle), streams[1:2], streams[:1])
    both = torch.cat([streams[:1], made]).movedim(0, trace.batch_axis)
    try:
        output = lean_run(trace, image, enter=lambda stream: both, rows=[0, 0]).output
    except ModelError:  # the model uses the batch size before the first block
        return False
    return near(made, streams[2:]) and near(output, whole.output[::2])
