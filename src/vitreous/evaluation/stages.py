"""Successive halving: all contenders on a few images, the better ones on more, the last few on all.

The images are shuffled once, by the seed, and every stage adds to those of the stage before it. Differences are paired
by image, so that an image on which every method does well favours none. The controls are measured on every image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from vitreous._support.statistics import mean_of
from vitreous.evaluation.leaderboard import After, Leaderboard
from vitreous.evaluation.plan import CONTROLS

SHARE = 5  # a search in stages takes at most one run of so many that the exhaustive search takes
FINALISTS = (4, 3, 2)  # contenders in the last stage, at least; the most that can be afforded
RATES = (2, 3, 4, 5)  # what the contenders are divided by, and the images multiplied with, from stage to stage


@dataclass(frozen=True)
class Stage:
    """How many contenders are measured on how many images, those of the stages before it included."""

    contenders: int
    images: int


def plan_stages(contenders: int, images: int, exhaustive: bool = False) -> tuple[Stage, ...]:
    """The stages of a search; a single one, which is the exhaustive search, where a fifth of its runs is too few.

    Of those that can be afforded, the one with the most finalists, the most gradual, and then the one that starts with
    the most images.
    """
    whole = (Stage(contenders, images),)
    if exhaustive:
        return whole
    for last, rate in product(FINALISTS, RATES):
        for first in range(images // 2, 0, -1):
            stages = halved(contenders, images, first, rate, last)
            if SHARE * runs_of(stages) <= runs_of(whole):
                return stages
    return whole


def halved(contenders: int, images: int, first: int, rate: int, last: int) -> tuple[Stage, ...]:
    """`first` images for all, then `rate` times as many for the best `rate`-th, down to the `last` contenders.

    The last stage adds as many images as were seen before it, or more.
    """
    stages = [Stage(contenders, first)]
    while stages[-1].images < images:
        before = stages[-1]
        kept, more = max(last, -(-before.contenders // rate)), before.images * rate
        ends = kept <= last or 2 * more > images
        stages.append(Stage(min(before.contenders, kept), images if ends else more))
    return tuple(stages)


def runs_of(stages: Sequence[Stage]) -> int:
    """Contenders and controls, each on each image of its stages."""
    ends = [0, *(stage.images for stage in stages)]
    return sum(s.contenders * (s.images - used) for s, used in zip(stages, ends)) + len(CONTROLS) * ends[-1]


@dataclass(frozen=True, eq=False)
class Searched:
    """What a search has done."""

    dropped: dict[str, int]  # the stage after which each contender was left out, from 0
    fresh: list[int]  # the images that only the finalists have seen; all of them in an exhaustive search


def search(
    board: Leaderboard, stages: Sequence[Stage], order: Sequence[int], sign: int, after: After | None
) -> Searched:
    """Measure the contenders stage by stage and leave out those with the least gain over random so far.

    Images that cannot be read do not count. A contender without any value is the first to be left out.
    """
    kept = [name for name in board.methods if name not in CONTROLS]
    dropped: dict[str, int] = {}
    board.wanted[:] = False
    rest, seen, fresh = list(order), 0, list(order)
    for number, stage in enumerate(stages):
        if number:
            ranked = by_gain(board, kept, sign)
            dropped |= dict.fromkeys(ranked[stage.contenders :], number - 1)
            kept = [name for name in kept if name not in dropped]
            fresh = list(rest)
        while rest and seen < stage.images:
            more = rest[: stage.images - seen]
            del rest[: len(more)]
            rows = [*CONTROLS, *kept]
            board.wanted[np.ix_([board.methods.index(name) for name in rows], more)] = True
            board.run(after, sorted(more), rows)
            seen += sum(image not in board.skipped for image in more)
    return Searched(dropped, fresh)


def by_gain(board: Leaderboard, names: list[str], sign: int) -> list[str]:
    """Contenders by their mean difference to random, image by image, the best first; those without a value last."""
    control, rows = board.methods.index(CONTROLS[0]), [board.methods.index(name) for name in names]
    gains = mean_of(sign * (board.values[rows, 0] - board.values[control, 0]))
    return [names[i] for i in np.argsort(-np.nan_to_num(gains, nan=-np.inf), kind="stable")]
