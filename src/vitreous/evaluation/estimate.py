"""What a search for the best method will cost, told before it starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vitreous._support.words import count_of
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import CONTROLS
from vitreous.evaluation.stages import Stage, runs_of
from vitreous.models.inputs import Given
from vitreous.models.model import Model
from vitreous.registry import ConfiguredMethod
from vitreous.trace.apply import images_at_once
from vitreous.types import Images

QUICK, COSTLY = 4, 200  # forward passes of a map, roughly: the declarations tell only which methods are costly


@dataclass(frozen=True)
class Estimate:
    """What a search will cost."""

    contenders: int
    images: int
    stages: tuple[Stage, ...]
    runs: int  # a run: one contender on one image
    exhaustive_runs: int
    forwards: float  # passes of an image, or of a variant of one, through the network; NaN if no image can be read
    seconds: float

    def __str__(self) -> str:
        """The cost in words."""
        tried = f"{count_of(self.contenders, 'contender')} × {count_of(self.images, 'image')}"
        staged = f" in {len(self.stages)} stages, {self.runs:,} of {self.exhaustive_runs:,} runs"
        told = staged if len(self.stages) > 1 else f", {self.runs:,} runs"
        if not np.isfinite(self.seconds):
            return f"{tried}{told}"
        return f"{tried}{told}: about {rounded(self.forwards):,} forward passes, {duration(self.seconds)}"


def rounded(value: float) -> int:
    """Two digits of a number, the others zero."""
    return int(float(f"{value:.1e}"))


def duration(seconds: float | int) -> str:
    """40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def estimated(
    board: Leaderboard, stages: tuple[Stage, ...], order: Sequence[int], entered: Sequence[ConfiguredMethod]
) -> Estimate:
    """Measure the controls on the first images that can be read, and infer what all runs will cost."""
    seconds = passes = forward = float("nan")
    size = max(1, min(images_at_once(board.model), stages[0].images))
    for start in range(0, len(order), size):
        images = sorted(order[start : start + size])
        board.run(None, images, CONTROLS[:1])  # the first run of all finds out about the model
        readable = sum(image not in board.skipped for image in images)
        if readable:
            begun = time.perf_counter()
            with counted(board.model) as rows:
                board.run(None, images, CONTROLS[1:])
            seconds, passes, forward = (time.perf_counter() - begun) / readable, sum(rows) / readable, board.forward
            break
    board.forwards.clear()  # so that contenders are timed too
    maps = float(np.mean([COSTLY if one.method.costly or one.method.alone else QUICK for one in entered]))
    runs, count = runs_of(stages), len(entered) - len(CONTROLS)
    whole = runs_of((Stage(count, len(order)),))
    return Estimate(count, len(order), stages, runs, whole, runs * (maps + passes), runs * (maps * forward + seconds))


@contextmanager
def counted(model: Model) -> Iterator[list[int]]:
    """How many images and variants of images pass through the network, run by run."""
    rows: list[int] = []
    run = model.run

    def counting(images: Images, given: Given | None = None) -> Tensor:
        output = run(images, given)
        rows.append(len(output))
        return output

    model.run = counting  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del model.run
