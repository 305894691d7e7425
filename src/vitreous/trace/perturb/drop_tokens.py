"""The score of an image without some of its tokens.

Tokens are left out in the cheapest way that gives the same output: cut out of the sequence, cut out behind the first
block, or hidden from every attention. Which way a model allows is checked once: with nothing left out, the output must
be that of a plain run, and cutting must give the output of hiding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import near, widen
from vitreous.errors import ModelError, OptionError, Unsupported
from vitreous.trace.last_block import asked, is_proven, known, narrowing
from vitreous.trace.perturb.variant_runs import Cut, Gone, Kept, Lean, Left, Shared, one_gone, repeated
from vitreous.trace.run import Edit, Finished, Narrow, Run
from vitreous.trace.target import Probability, Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Scores

VariantScores = Float[Tensor, "V"]
MOST_KEPT = 2**25  # numbers, of the outputs of all variants of a trace
WORKS = "can tokens be left out?"
CUTS = "can tokens be cut out of the sequence?"
LEAVES = "can a token be cut out behind the first block?"


def scores_of(
    trace: Trace, target: Target, images: Callable[[slice], Images], count: int, what: str, key: Hashable | None = None
) -> Scores:
    """The score of each of `count` images, for the target of one; `images` makes a slice of them."""
    return scores_each(trace, target, [0] * count, lambda part: lean_run(trace, images(part)), what, key=key)


def scores_without(
    trace: Trace, index: int, target: Target, left: Left, what: str, key: Hashable | None = None
) -> Scores:
    """The score of one image without each of these tokens, for the target of that image."""
    image, trial = trace.images[index : index + 1], try_dropping(trace, index, left)
    shared: Shared = {}

    def run(part: slice) -> Finished:
        found = leave(trace, image, left[part], shared, trial)
        return run_without(trace, image, one_gone(trace, left[part])) if found is None else found

    return scores_each(trace, target, [0] * len(left), run, what, key=key)


def scores_keeping(
    trace: Trace, target: Target, rows: Sequence[int], keep: Kept, what: str | None = None
) -> VariantScores:
    """The score of image `rows[i]` with the tokens `keep[i]` only: the others are cut out, so that it costs less."""
    refuse_dropping(trace)
    cut = cuts(trace)

    def run(part: slice) -> Finished:
        return run_keeping(trace, rows[part], keep[part], cut)

    return scores_each(trace, target, rows, run, what, keep.shape[1] / trace.layout.tokens if cut else 1.0)


def scores_each(
    trace: Trace,
    target: Target,
    rows: Sequence[int],
    run: Callable[[slice], Finished],
    what: str | None = None,
    share: float = 1.0,
    key: Hashable | None = None,
) -> VariantScores:
    """Scores of slices of variants, variant i of image `rows[i]`; each takes this share of an image's memory.

    `key`: these variants are always the same for this key and trace, so that other targets need not run them again.
    """
    size = batch_size(int(share * trace.layout.footprint[0]), trace.images.device)
    if key is None or len(rows) * (trace.model.outputs or 0) > MOST_KEPT:
        return torch.cat(
            in_batches(lambda part: trace.score(target.of_rows(rows[part]), run(part)).detach(), len(rows), size, what)
        )
    if key not in trace.ends:
        parts = in_batches(lambda part: ends_of(run(part)), len(rows), size, what)
        trace.ends[key] = tuple(torch.cat(part) for part in zip(*parts))
    return widen(target.of_rows(rows)(*trace.ends[key]))


def ends_of(run: Finished) -> tuple[Tensor, Tensor]:
    """What scores are made of."""
    return run.output.detach(), run.embedding.detach()


def scored_as(trace: Trace, target: Target, of: str) -> tuple[Target, Scores]:
    """What is asked of the images, fixed, as a logit or a probability; and their scores now."""
    trace.plain()
    fixed = target.fix(trace.output)
    if of == "probability":
        if not fixed.names_classes:
            raise OptionError(f"of=probability needs a class, and {target} is none; use of=logit")
        fixed = Probability(fixed)
    return fixed, trace.score(fixed).detach()


# ---------------------------------------------------------------------------------------------------- ways to run it


def lean_run(
    trace: Trace, images: Images, gone: Gone | None = None, enter: Edit | None = None, count: int | None = None
) -> Finished:
    """Images (or what `enter` makes of their tokens) with some tokens hidden from every attention."""
    how = trace.least(Run.to_output(), proven=gone is None)
    if gone is not None and how.narrow is not None:
        how = how.narrowed(Narrow())  # attention must be there to hide keys from it
    with Lean(trace, gone):
        return trace.run(images, how if enter is None else how.entering(enter, count))


def run_keeping(trace: Trace, rows: Sequence[int], keep: Kept, cut: bool) -> Finished:
    """Images with some of their tokens: cut out of the sequence, or hidden."""
    images = trace.images[list(rows)]
    if not cut:
        return lean_run(trace, images, gone_of(trace, keep))
    how = trace.least(Run.to_output(), proven=False)
    with Lean(trace, tokens=keep.shape[1]):
        return trace.run(images, fewer(how, keep.shape[1]).inside(partial(Cut, trace, keep)))


def run_leaving(trace: Trace, image: Images, left: Left, shared: Shared) -> Finished:
    """One image without each of these tokens: hidden in the first block, cut out behind it.

    `shared`: what is the same for all tokens of this image, kept from run to run.
    """
    count, layout = len(left), trace.layout
    every = torch.arange(layout.tokens - 1, device=left.device).expand(count, -1)
    keep = every + (every >= left[:, None])
    how = fewer(trace.least(Run.to_output(), proven=False), layout.tokens - 1)
    how = how.entering(partial(repeated, count, layout.batch_axis), count).inside(partial(Cut, trace, keep, 1))
    with Lean(trace, left=left, shared=shared):
        return trace.run(image, how)


def run_without(trace: Trace, image: Images, gone: Gone) -> Finished:
    """One image, once for each row of `gone`, whose tokens are hidden from every attention."""
    count = len(gone)
    if len(trace.layout.blocks) == trace.layout.layers:
        try:
            return lean_run(trace, image, gone, partial(repeated, count, trace.batch_axis), count)
        except ModelError:  # it writes into its tokens, or counts its images before the first block
            pass
    return lean_run(trace, image.expand(count, -1, -1, -1).contiguous(), gone)


def fewer(how: Run, tokens: int) -> Run:
    """The same run with so many tokens."""
    return how if how.narrow is None else how.narrowed(Narrow(how.narrow.fold, tokens))


def gone_of(trace: Trace, keep: Kept) -> Gone:
    """The tokens that are not kept."""
    return torch.ones(len(keep), trace.layout.tokens, dtype=torch.bool, device=keep.device).scatter_(1, keep, False)


# ------------------------------------------------------------------------------------------------ which way is right

Trial = dict[int, Tensor]  # the output of an image without a token, by the token


def refuse_dropping(trace: Trace) -> None:
    """Raise unless tokens can be left out of this model."""
    try_dropping(trace, 0, torch.zeros(0, dtype=torch.long, device=trace.images.device))


def try_dropping(trace: Trace, index: int, left: Left) -> Trial:
    """Check once that a token that is gone has no influence, and that a model with all its tokens is as it was.

    The run that checks this also hides two of the tokens `left`, for `leave` to be compared with.
    """
    facts, works = trace.model.facts, asked(trace, WORKS)
    trial: Trial = {}
    if not facts.knows(works) or (len(left) and has_blocks(trace) and not facts.knows(asked(trace, LEAVES))):
        found = None if is_proven(trace) else try_guess(trace, index, left)
        if found is None:
            narrowing(trace)
            found = can_drop(trace, index, left)
        works_now, trial = found
        facts.note(works, works_now)
    if not facts.get(works):
        raise Unsupported(
            f"{trace.model.name} reads its tokens in other ways than attention and their mean, so none can be left "
            "out. Try occlusion, rise or gradcam."
        )
    return trial


def try_guess(trace: Trace, index: int, left: Left) -> tuple[bool, Trial] | None:
    """The same where the last block was not checked; None: it may be the one that computes too little."""
    try:
        found = can_drop(trace, index, left)
    except ModelError:
        return None
    return found if found[0] else None


def can_drop(trace: Trace, index: int, left: Left) -> tuple[bool, Trial]:
    """Is nothing changed while no token is gone, and does the content of one that is gone not matter?"""
    layout, image = trace.layout, trace.images[index : index + 1]
    (row, column), (y, x) = (layout.grid[0] // 2, layout.grid[1] // 2), layout.patch or (1, 1)
    spoilt = image.clone()
    spoilt[..., row * y : (row + 1) * y, column * x : (column + 1) * x] += 1
    middle, tried = layout.token(row, column), left[[0, len(left) // 2]].tolist() if len(left) else []
    gone = torch.zeros(3 + len(tried), layout.tokens, dtype=torch.bool, device=image.device)
    gone[range(1, len(gone)), [middle, middle, *tried]] = True
    images = torch.cat([image, image, spoilt, *[image] * len(tried)])
    size = batch_size(layout.footprint[0], image.device)
    outputs = in_batches(lambda part: lean_run(trace, images[part], gone[part]).output.detach(), len(images), size)
    found = torch.cat(outputs)
    works = near(found[0], trace.plain().output[index].detach()) and near(found[1], found[2])
    return works, dict(zip(tried, found[3:]))


def leave(trace: Trace, image: Images, left: Left, shared: Shared, trial: Trial) -> Finished | None:
    """A run that cuts each of these tokens out behind the first block; None: the model does not allow it.

    The first such run of a model is compared with what hiding the same tokens gave.
    """
    facts, allowed = trace.model.facts, asked(trace, LEAVES)
    if facts.get(allowed) is False or not has_blocks(trace):
        return None
    if facts.knows(allowed):
        return run_leaving(trace, image, left, shared)
    found = try_leaving(trace, image, left, shared, trial)
    if found is None and not is_proven(trace):
        narrowing(trace)
        shared.clear()
        found = try_leaving(trace, image, left, shared, trial)
    facts.note(allowed, found is not None)
    return found


def try_leaving(trace: Trace, image: Images, left: Left, shared: Shared, trial: Trial) -> Finished | None:
    """Such a run, if it gives what hiding the same tokens gave."""
    try:
        found = run_leaving(trace, image, left, shared)
    except ModelError:  # it counts its tokens elsewhere
        return None
    pairs = [(row, trial[token]) for token, row in zip(left.tolist(), found.output.detach()) if token in trial]
    return found if pairs and all(near(row, expected) for row, expected in pairs) else None


def has_blocks(trace: Trace) -> bool:
    """Is there a block behind the first?"""
    return len(trace.layout.blocks) == trace.layout.layers >= 2


def cuts(trace: Trace) -> bool:
    """Does cutting tokens out of the sequence give what hiding them from attention gives?"""
    return known(trace, CUTS, lambda: can_cut(trace))


def can_cut(trace: Trace) -> bool:
    """Half of the patches, cut out and hidden."""
    layout, device = trace.layout, trace.images.device
    if len(layout.blocks) != layout.layers:
        return False
    every = torch.arange(layout.tokens, device=device)
    patches = (every >= layout.prefix) & (every < layout.prefix + layout.patches)
    some = every[~patches | (every % 2 == 0)]
    others = every[~patches | ((every + every // 2) % 2 == 0)][: len(some)]
    keep = some[None] if len(others) < len(some) else torch.stack([some, others])
    rows = [0] * len(keep)
    try:
        found = run_keeping(trace, rows, keep, cut=True).output
    except ModelError:  # it counts its tokens elsewhere
        return False
    return near(found, run_keeping(trace, rows, keep, cut=False).output)
