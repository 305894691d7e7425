"""Variants whose tokens are picked from those of a few images as they enter the first block.

Patches are embedded once for each image, not for each variant. Until the first attention mixes tokens, a norm or a
linear layer gives the same for the same token, so it is computed for those few images too, and its results are picked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.capture import Enough
from vitreous.trace.perturb.picked_tokens import Table, picked
from vitreous.trace.perturb.variant_runs import Shared
from vitreous.trace.run import Edit, Finished, Run
from vitreous.trace.trace import Trace
from vitreous.types import Images, Tokens


class Entering:
    """The tokens of some images that enter the first block, as a table from which variants pick theirs.

    `tokens`: of the images from number `first` on; None: those of the `carrier` in the first run. The carrier runs in
    place of the variants up to that block.
    """

    def __init__(
        self, trace: Trace, carrier: Images, tokens: Float[Tensor, "images N D"] | None = None, first: int = 0
    ) -> None:
        self.axis, self.carrier, self.first = trace.batch_axis, carrier, first
        self.table = None if tokens is None else Table(tokens.flatten(0, 1))
        self.shared: Shared = {}

    def picking(self, image: Int[Tensor, "V #n"], token: Int[Tensor, "*V n"], count: int) -> Edit:
        """What exchanges the tokens that enter the first block, `count` of each image, for these of these images."""
        index = ((image - self.first) * count + token).movedim(0, self.axis)

        def enter(stream: Tensor) -> Tensor:
            if self.table is None:
                self.table = Table(stream.movedim(self.axis, 0).flatten(0, 1))
            return picked(self.table, index)

        return enter


def tokens_entering(trace: Trace, images: Images) -> Tokens:
    """The tokens that enter the first block, of a version of each image; the forward passes end there."""
    size, rows = batch_size(trace.layout.footprint[0], images.device), range(len(images))
    return torch.cat(in_batches(lambda part: entered(trace, images[part], rows[part], True)[0], len(images), size))


def entered(trace: Trace, images: Images, rows: Sequence[int], stop: bool) -> tuple[Tensor, Finished | None]:
    """The tokens that enter the first block, batch axis first, and the run, which ends there if `stop`."""
    kept: list[Tensor] = []
    with trace.model.still() as still:

        def note(stream: Tensor) -> Tensor:
            kept.append(stream.movedim(trace.batch_axis, 0))
            if stop and not still.hooked:
                raise Enough
            return stream

        run = trace.look(images, Run.to_output().entering(note).of(rows))
    return kept[0], run if isinstance(run, Finished) else None
