"""How far training or evaluation has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` batches; the loss of this epoch so far, the accuracy after the last one."""

    stage: str  # "embedding", "training" or "evaluating"
    done: int
    total: int
    epoch: int = 0  # finished ones
    loss: float | None = None
    accuracy: float | None = None


Tell = Callable[[Progress], None]


def quietly(progress: Progress) -> None:
    """Report nothing."""
