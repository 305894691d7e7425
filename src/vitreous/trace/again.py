"""How a block of a run is run again, alone, as it ran there (capture/recomputed.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from vitreous.capture.capture import Capture, Enough
from vitreous.capture.entries import CutAt, Unfrozen
from vitreous.capture.recomputed import Again, Recomputed
from vitreous.models.layout import Layout
from vitreous.models.model import Model

NOTHING = 2**30  # no attention call has this number
Within = Callable[[], AbstractContextManager[Any]]


def recomputing(
    model: Model, layout: Layout, autocast: torch.autocast, within: Within | None, seen: Capture, cut: CutAt | None
) -> Recomputed:
    """The context of a run whose blocks keep nothing, if each layer is a block; the last, needed first, keeps all.

    `within`: the context in which they are run again; None: all blocks keep all.
    """
    names = layout.blocks[:-1] if within is not None and len(layout.blocks) == layout.layers else ()
    blocks = [model.module.get_submodule(name) for name in names]
    return Recomputed(blocks, partial(again_from_here, model, autocast, within or nullcontext, seen, cut))


def again_from_here(model: Model, autocast: torch.autocast, within: Within, seen: Capture, cut: CutAt | None) -> Again:
    """What makes the same context as that of the block that begins now, in a run with gradients or without.

    `within`: the context of the run, such as its rules. Of the modes of the run, only copies are kept: what they
    recorded holds the graph, and the graph holds this.
    """
    grad, number, recording = torch.is_grad_enabled(), seen.seen, seen.recording
    names, images, forms = seen.names, seen.images, seen.forms
    later = None if cut is None or cut.leaf is not None else cut.from_here()

    @contextmanager
    def again(attention: bool) -> Iterator[Capture]:
        since, most = (number, number + 1) if attention else (NOTHING, None)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(autocast)
            stack.enter_context(model.still())
            stack.enter_context(within())
            stack.enter_context(suppress(Enough))
            copy = stack.enter_context(Capture(names, images, since=since, most=most, forms=forms))
            copy.seen, copy.recording = number, recording
            if later is not None:
                stack.enter_context(later(copy))
            elif grad:
                stack.enter_context(Unfrozen())
            yield copy

    return again
