"""Scores of variants of images, computed in slices; their outputs are kept for other targets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import widen
from vitreous.trace.compiled import scored_by_output
from vitreous.trace.run import Finished
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

VariantScores = Float[Tensor, "V"]
Ends = dict[Hashable, tuple[Tensor, ...]]  # outputs and embeddings of variants, by what was changed
MOST_KEPT = 2**25  # numbers in the cached outputs of all variants of a trace


def scores_each(
    trace: Trace,
    target: Target,
    rows: Sequence[int],
    run: Callable[[slice], Finished],
    what: str | None = None,
    share: float = 1.0,
    key: Hashable | None = None,
    ends: Ends | None = None,
) -> VariantScores:
    """Scores of variants, computed in slices; variant i belongs to image `rows[i]` and takes this share of its memory.

    `key` identifies the variants within `ends`, so that other targets can reuse their outputs; default: those of the
    trace.
    """
    size = batch_size(int(share * trace.layout.footprint[0]), trace.images.device)
    kept = trace.ends if ends is None else ends
    with scored_by_output(trace, target) as compiled:
        key = key if key is None or not compiled else (key, "compiled")  # without embeddings
        if key is None or (key not in kept and not has_room(trace, len(rows), ends or {})):
            return torch.cat(
                in_batches(
                    lambda part: trace.score(target.of_rows(rows[part]), run(part)).detach(), len(rows), size, what
                )
            )
        if key not in kept:
            parts = in_batches(lambda part: ends_of(run(part))[: 1 if compiled else 2], len(rows), size, what)
            kept[key] = tuple(torch.cat(part) for part in zip(*parts))
    return widen(target.of_rows(rows)(kept[key][0], kept[key][-1]))


def has_room(trace: Trace, variants: int, ends: Ends) -> bool:
    """Whether the outputs of so many variants can be kept beside these."""
    held = sum(output.numel() for output, *_ in ends.values())
    return held + variants * (trace.model.outputs or 0) <= MOST_KEPT


def ends_of(run: Finished) -> tuple[Tensor, Tensor]:
    """The output and the embedding, from which scores are computed."""
    return run.output.detach(), run.embedding.detach()
