"""Runs of big models, whose blocks keep only the tokens that enter them and are run again when they are needed.

It costs up to one forward pass more. A run is big if its graph would take too much memory (`keeps_too_much`) and each
layer is a block that is a module; a network that somebody has hooked into runs its blocks once, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

from vitreous._support.memory import keeps_too_much
from vitreous.capture.attention import Attention
from vitreous.capture.attention_backward import Follower
from vitreous.trace.again import Within
from vitreous.trace.last_block import narrowing
from vitreous.trace.perform import Batch
from vitreous.trace.run import Finished, Run


def is_big(trace: Batch) -> bool:
    """Whether the graph of a run would take too much memory, and its blocks can be run again."""
    layout = trace.layout
    known = bool(layout.blocks) and not (layout.alone or layout.stages) and trace.surgery is None
    return known and keeps_too_much(layout.footprint[1], len(trace), trace.images.device)


def sparing(trace: Batch, how: Run, within: Within = nullcontext) -> Run:
    """The same run; of a big model, one that keeps no attention but the pool, and runs its blocks again `within`."""
    if not is_big(trace):
        return how
    return replace(how, since=max(how.since, after_layers(trace))).recomputed(within)


def after_layers(trace: Batch) -> int:
    """The number of the first attention call behind the last layer."""
    layout = trace.layout
    return layout.numbers[-1] + 1 if layout.numbers else layout.layers


def follow_big(trace: Batch) -> tuple[Finished, Follower] | None:
    """A run of a big model whose backward visits every layer; None where some cannot be visited there."""
    layout = trace.layout
    if not layout.entries or not is_big(trace):
        return None
    follower = Follower(layout.tokens, layout.numbers, every=True)
    how = Run.watched_backward(follower).narrowed(narrowing(trace, fold=False))
    run = trace.run(trace.images, sparing(trace, how))
    return (run, follower) if follower.seen == layout.layers else None


def backwards(trace: Batch) -> Iterator[tuple[int, Attention]] | None:
    """The layers of a big model with their numbers, last to first, each recorded in its turn; None: it is not big."""
    layout = trace.layout
    if not is_big(trace) or layout.decoder is not None or layout.calls != layout.layers:
        return None
    last = layout.layers - 1
    record = trace.look(trace.images, Run.to_last_attention(since=last).recomputed(nullcontext))
    if len(record.again) != last or len(record.layers) != 1:
        return None
    calls = list(record.again)

    def layers() -> Iterator[tuple[int, Attention]]:
        yield last, record.layers[0]
        while calls:
            yield len(calls) - 1, calls.pop().run(attention=True).calls[0]

    return layers()
