"""The score that a target asks for, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.errors import Unsupported
from vitreous.trace.run import Finished
from vitreous.trace.target import Target
from vitreous.types import Scores


def score_of(target: Target, run: Finished, rows: slice = slice(None)) -> Scores:
    """The target's score, with the graph of the run behind it."""
    with torch.enable_grad():
        return widen(target(run.output[rows], run.embedding[rows]))


def gradients(y: Scores | list[Scores], wrt: Sequence[Tensor], keep: bool = True) -> tuple[Tensor, ...]:
    """∂Σy/∂ each; `keep`: the graph stays, so that another target can be asked about."""
    ends = y if isinstance(y, list) else [y]
    if not all(end.requires_grad for end in ends):
        raise Unsupported(
            "the model runs without gradients (torch.inference_mode in its forward?); try attention or rollout"
        )
    found = torch.autograd.grad(ends, wrt, [torch.ones_like(end) for end in ends], retain_graph=keep, allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, wrt))
