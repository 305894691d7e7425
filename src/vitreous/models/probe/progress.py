"""How far a training or an evaluation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far it is: `done` of `total` batches; this epoch's loss so far, the accuracy after the last one."""

    stage: str  # "embedding", "training" or "evaluating"
    done: int
    total: int
    epoch: int = 0  # finished ones
    loss: float | None = None
    accuracy: float | None = None


Tell = Callable[[Progress], None]


def quietly(progress: Progress) -> None:
    """Tell nobody."""
