"""Forward passes without some tokens: cut out of the sequence, cut out after the first block, or masked everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from vitreous.errors import ModelError
from vitreous.trace.compiled import run_compiled
from vitreous.trace.perturb.entering_tokens import Entering
from vitreous.trace.perturb.variant_runs import Cut, Gone, Kept, Lean, Left, Shared, gone_of, repeated
from vitreous.trace.run import Edit, Finished, Narrow, Run
from vitreous.trace.trace import Trace
from vitreous.types import Images


def lean_run(
    trace: Trace,
    images: Images,
    gone: Gone | None = None,
    enter: Edit | None = None,
    *,
    rows: Sequence[int],
    shared: Shared | None = None,
) -> Finished:
    """Run variants (or what `enter` makes of their tokens) of the images `rows`, some tokens masked everywhere."""
    if gone is None and enter is None and (found := run_compiled(trace, images, rows)) is not None:
        return found
    how = trace.least(Run.to_output(), proven=gone is None).of(rows)
    if gone is not None and how.narrow is not None:
        how = how.narrowed(Narrow())  # keys can only be masked in an attention that is not folded
    with Lean(trace, gone, shared=shared):
        return trace.run(images, how if enter is None else how.entering(enter, len(rows)))


def run_keeping(trace: Trace, rows: Sequence[int], keep: Kept, cut: bool, entering: Entering | None = None) -> Finished:
    """Run images with some of their tokens only; the others are cut out of the sequence, or masked.

    `entering`: the tokens of all images, of which only those that are kept enter the first block.
    """
    if not cut:
        return lean_run(trace, trace.images[list(rows)], gone_of(trace, keep), rows=rows)
    how = fewer(trace.least(Run.to_output(), proven=False).of(rows), keep.shape[1])
    if entering is None:
        with Lean(trace, tokens=keep.shape[1]):
            return trace.run(trace.images[list(rows)], how.inside(partial(Cut, trace, keep)))
    enter = entering.picking(torch.tensor(rows, device=keep.device)[:, None], keep, trace.layout.tokens)
    how = how.entering(enter, len(rows)).inside(partial(Cut, trace, keep, entered=True))
    with Lean(trace, tokens=keep.shape[1], shared=entering.shared):
        return trace.run(entering.carrier, how)


def run_leaving(trace: Trace, index: int, left: Left, shared: Shared) -> Finished:
    """Run one image without each of these tokens: masked in the first block, cut out after it.

    `shared`: results that are the same for all tokens of this image, kept between calls.
    """
    count, layout = len(left), trace.layout
    every = torch.arange(layout.tokens - 1, device=left.device).expand(count, -1)
    keep = every + (every >= left[:, None])
    how = fewer(trace.least(Run.to_output(), proven=False), layout.tokens - 1)
    how = how.entering(partial(repeated, count, layout.batch_axis), count).inside(partial(Cut, trace, keep, 1))
    with Lean(trace, left=left, shared=shared):
        return trace.run(trace.images[index : index + 1], how.of([index] * count))


def run_without(trace: Trace, index: int, gone: Gone) -> Finished:
    """Run one image once for each row of `gone`, with those tokens masked in every attention."""
    image, rows = trace.images[index : index + 1], [index] * len(gone)
    if len(trace.layout.blocks) == trace.layout.layers:
        try:
            return lean_run(trace, image, gone, partial(repeated, len(gone), trace.batch_axis), rows=rows)
        except ModelError:  # the model writes into its tokens in place, or uses the batch size before the first block
            pass
    return lean_run(trace, image.expand(len(gone), -1, -1, -1).contiguous(), gone, rows=rows)


def fewer(how: Run, tokens: int) -> Run:
    """The same run with this number of tokens."""
    return how if how.narrow is None else how.narrowed(Narrow(how.narrow.fold, tokens))


def kept(trace: Trace, patches: Int[Tensor, "V k"]) -> Kept:
    """The tokens of these patches, with all that are no patches, in their order."""
    layout = trace.layout
    tokens, special = (
        torch.tensor(some, dtype=patches.dtype, device=patches.device) for some in (layout.patch_tokens, layout.special)
    )
    return torch.cat([tokens[patches], special.expand(len(patches), -1)], 1).sort(1).values
