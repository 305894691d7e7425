"""The score of an image without some of its tokens.

Tokens are dropped in the cheapest way that gives the correct output: cut out of the sequence, cut out after the first
block, or masked in every attention. Which ways a model supports is checked once: with nothing dropped, the output must
be that of a plain forward pass, and cutting must give the same output as masking.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import near
from vitreous.errors import ModelError, OptionError, Unsupported
from vitreous.trace.last_block import asked, is_proven, known, narrowing
from vitreous.trace.perturb.dropped_runs import kept, lean_run, run_keeping, run_leaving, run_without
from vitreous.trace.perturb.entering_tokens import Entering, entered, tokens_entering
from vitreous.trace.perturb.variant_runs import Kept, Left, Shared, one_gone
from vitreous.trace.perturb.variant_scores import VariantScores, ends_of, scores_each
from vitreous.trace.run import Finished
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Scores

Source = Callable[[], Entering | None]  # None: images must run themselves
WORKS = "can tokens be left out?"
CUTS = "can tokens be cut out of the sequence?"
ENTERS = "can tokens of an image enter the first block in a run of another?"
LEAVES = "can a token be cut out behind the first block?"


def scores_of(
    trace: Trace, index: int, target: Target, images: Callable[[slice], Images], count: int, what: str, key: Hashable
) -> Scores:
    """The scores of `count` variants of one image for its target; `images` makes those of a slice."""
    rows = [index] * count
    return scores_each(
        trace, target, [0] * count, lambda part: lean_run(trace, images(part), rows=rows[part]), what, key=key
    )


def scores_without(
    trace: Trace, index: int, target: Target, left: Left, what: str, key: Hashable | None = None
) -> Scores:
    """The scores of one image without each of these tokens in turn, for the target of that image."""
    trial, shared = try_dropping(trace, index, left), Shared()

    def run(part: slice) -> Finished:
        found = leave(trace, index, left[part], shared, trial)
        return run_without(trace, index, one_gone(trace, left[part])) if found is None else found

    return scores_each(trace, target, [0] * len(left), run, what, key=key)


def scores_keeping(
    trace: Trace,
    target: Target,
    rows: Sequence[int],
    keep: Kept,
    what: str | None = None,
    key: Hashable | None = None,
    entering: Source = lambda: None,
) -> VariantScores:
    """The score of image `rows[i]` with only the tokens `keep[i]`; the others are cut out, which saves time.

    `entering`: see `all_entering`.
    """
    refuse_dropping(trace)
    cut = cuts(trace)

    def run(part: slice) -> Finished:
        return run_keeping(trace, rows[part], keep[part], cut, entering())

    return scores_each(trace, target, rows, run, what, keep.shape[1] / trace.layout.tokens if cut else 1.0, key)


def ends_keeping(trace: Trace, rows: Sequence[int], keep: Kept, entering: Source = lambda: None) -> tuple[Tensor, ...]:
    """The outputs and embeddings of the same variants."""
    cut, count = cuts(trace), keep.shape[1]
    size = batch_size(int((count / trace.layout.tokens if cut else 1.0) * trace.layout.footprint[0]), keep.device)
    parts = in_batches(
        lambda part: ends_of(run_keeping(trace, rows[part], keep[part], cut, entering())), len(rows), size
    )
    return tuple(torch.cat(part) for part in zip(*parts))


def all_entering(trace: Trace, index: int | None = None) -> Source:
    """The tokens of all images (or of one) that enter the first block, recorded once, for many runs that cut."""

    @cache
    def make() -> Entering | None:
        if trace.inputs or not cuts(trace) or not known(trace, ENTERS, lambda: can_enter(trace)):
            return None
        if index is not None or len(trace) == 1:
            return Entering(trace, trace.images[index or 0 :][:1], first=index or 0)
        return Entering(trace, trace.images[:1], tokens_entering(trace, trace.images))

    return make


def scored_as(trace: Trace, target: Target, of: str) -> tuple[Target, Scores]:
    """The fixed target of the images, by logit or probability, and their current scores."""
    trace.plain()
    fixed = target.fix(trace.output)
    if of == "probability":
        if not fixed.names_classes:
            raise OptionError(f"of=probability needs a class, and {target} is not one; use of=logit")
        fixed = fixed.graded(trace.model.meaning)  # a value has no probability and is measured itself
    return fixed, trace.score(fixed).detach()


# ----------------------------------------------------------------------------------- which ways a model supports

Trial = dict[int, Tensor]  # the output of an image without a token, by the token


def refuse_dropping(trace: Trace) -> None:
    """Raise unless this model supports dropping tokens."""
    try_dropping(trace, 0, torch.zeros(0, dtype=torch.long, device=trace.images.device))


def try_dropping(trace: Trace, index: int, left: Left) -> Trial:
    """Check once that a dropped token has no influence, and that the output is unchanged if none is dropped.

    The same forward pass also masks two of the tokens `left`, as a reference for `leave`.
    """
    facts, works = trace.facts, asked(trace, WORKS)
    trial: Trial = {}
    if not trace.layout.layers:
        raise Undroppable(f"{trace.model.name} {trace.layout.obstacle or 'shows no layers'}")
    if not trace.model.has_gradients:
        raise Undroppable(f"{trace.model.name} rounds its tokens together (int8)")
    if trace.layout.foreign and any(token in trace.layout.patch_tokens for token in trace.layout.readout):
        raise Undroppable(f"{trace.model.name} may take the mean of another input's tokens as of the image's own")
    if not facts.knows(works) or (len(left) and has_blocks(trace) and not facts.knows(asked(trace, LEAVES))):
        found = None if is_proven(trace) else try_guess(trace, index, left)
        if found is None:
            narrowing(trace)
            found = can_drop(trace, index, left)
        works_now, trial = found
        facts.note(works, works_now)
    if not facts.get(works):
        raise Undroppable(f"{trace.model.name} uses its tokens in other ways than attention and their mean")
    return trial


class Undroppable(Unsupported):
    """No token can be dropped from this model; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}, so no token can be dropped. Try occlusion or rise.")
        self.reason = reason


def try_guess(trace: Trace, index: int, left: Left) -> tuple[bool, Trial] | None:
    """The same with an unchecked last block; None if that block may be the cause of a difference."""
    try:
        found = can_drop(trace, index, left)
    except ModelError:
        return None
    return found if found[0] else None


def can_drop(trace: Trace, index: int, left: Left) -> tuple[bool, Trial]:
    """Whether the output is unchanged if no token is dropped, and independent of the content of a dropped token."""
    layout, image = trace.layout, trace.images[index : index + 1]
    middle = layout.token(*layout.middle)
    tried = left[[0, len(left) // 2]].tolist() if len(left) else []
    gone = torch.zeros(3 + len(tried), layout.tokens, dtype=torch.bool, device=image.device)
    gone[range(1, len(gone)), [middle, middle, *tried]] = True
    images = image.expand(len(gone), *image.shape[1:]).contiguous()

    def run(part: slice, tokens: bool) -> Tensor:
        some, row = images[part], 2 - part.start
        rows, enter = [index] * len(some), partial(spoil, trace, middle, row) if tokens else None
        if not tokens and 0 <= row < len(some):
            some = torch.cat([some[:row], spoilt_pixels(trace, image), some[row + 1 :]])
        return lean_run(trace, some, gone[part], enter, rows=rows).output.detach()

    size = batch_size(layout.footprint[0], image.device)
    try:
        found = torch.cat(in_batches(partial(run, tokens=len(layout.blocks) == layout.layers), len(images), size))
    except ModelError:  # the first block gets other tokens than its attention: another patch spoils the token
        found = torch.cat(in_batches(partial(run, tokens=False), len(images), size))
    works = near(found[0], trace.plain().output[index].detach()) and near(found[1], found[2])
    return works, dict(zip(tried, found[3:]))


def spoil(trace: Trace, token: int, row: int, stream: Tensor) -> Tensor:
    """The tokens that enter the first block, with another content of one token of one row."""
    tokens = stream.movedim(trace.batch_axis, 0)
    if tokens.ndim != 3 or tokens.shape[1] != trace.layout.tokens:
        raise ModelError("the first block gets other tokens than its attention")
    if 0 <= row < len(tokens):
        tokens = tokens.clone()
        tokens[row, token] += 1 + tokens[row].roll(1, 0)[token]
    return tokens.movedim(0, trace.batch_axis)


def spoilt_pixels(trace: Trace, image: Tensor) -> Tensor:
    """An image with another patch in the middle."""
    layout, spoilt = trace.layout, image.clone()
    spoilt[layout.where(*layout.middle)] += 1
    return spoilt


def leave(trace: Trace, index: int, left: Left, shared: Shared, trial: Trial) -> Finished | None:
    """Run with each of these tokens cut out after the first block; None if the model does not support it.

    The first such run of a model is compared with masking the same tokens.
    """
    facts, allowed = trace.facts, asked(trace, LEAVES)
    if facts.get(allowed) is False or not has_blocks(trace):
        return None
    if facts.knows(allowed):
        return run_leaving(trace, index, left, shared)
    found = try_leaving(trace, index, left, shared, trial)
    if found is None and not is_proven(trace):
        narrowing(trace)
        shared.clear()
        found = try_leaving(trace, index, left, shared, trial)
    facts.note(allowed, found is not None)
    return found


def try_leaving(trace: Trace, index: int, left: Left, shared: Shared, trial: Trial) -> Finished | None:
    """Such a run, if it gives the same output as masking."""
    try:
        found = run_leaving(trace, index, left, shared)
    except ModelError:  # the model uses the number of tokens elsewhere
        return None
    pairs = [(row, trial[token]) for token, row in zip(left.tolist(), found.output.detach()) if token in trial]
    return found if pairs and all(near(row, expected) for row, expected in pairs) else None


def has_blocks(trace: Trace) -> bool:
    """Whether there is a second block, to which the patches come as one run of tokens."""
    one_run = isinstance(trace.layout.patch_run, slice)
    return one_run and len(trace.layout.blocks) == trace.layout.layers >= 2


def cuts(trace: Trace) -> bool:
    """Whether cutting tokens out of the sequence gives the same output as masking them."""
    return known(trace, CUTS, lambda: can_cut(trace))


def can_cut(trace: Trace) -> bool:
    """Compare cutting and masking half of the patches."""
    layout, device = trace.layout, trace.images.device
    if len(layout.blocks) != layout.layers or not isinstance(layout.patch_run, slice):
        return False
    every = torch.arange(layout.tokens, device=device)
    patches = torch.zeros_like(every, dtype=torch.bool)
    patches[layout.patch_run] = True
    some = every[~patches | (every % 2 == 0)]
    others = every[~patches | ((every + every // 2) % 2 == 0)][: len(some)]
    keep = some[None] if len(others) < len(some) else torch.stack([some, others])
    rows = [0] * len(keep)
    try:
        found = run_keeping(trace, rows, keep, cut=True).output
    except ModelError:  # the model uses the number of tokens elsewhere
        return False
    return near(found, run_keeping(trace, rows, keep, cut=False).output)


def can_enter(trace: Trace) -> bool:
    """Cut all but a few tokens out of an image, in a run of its own and in that of another image."""
    layout, image = trace.layout, trace.images[:1]
    tokens = entered(trace, image, [0], stop=True)[0]
    if tokens.ndim != 3 or tokens.shape[1] != layout.tokens:
        return False
    few = torch.arange(min(4, layout.patches), device=image.device)
    keep = kept(trace, torch.stack([few, few + layout.patches - len(few)]))
    try:
        found = run_keeping(trace, [0, 0], keep, True, Entering(trace, image + 1, tokens)).output
    except ModelError:  # the model uses the batch size before the first block
        return False
    return near(found, run_keeping(trace, [0, 0], keep, True).output)
