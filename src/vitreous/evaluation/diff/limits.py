"""How much two checkpoints may differ, and whether they do: a check fails only where the interval leaves the limit out.

share of k in n images    exact interval by Clopper and Pearson
difference of accuracies  Tango's score interval for paired answers
median                    exact interval between two order statistics
mean, difference          bootstrap over images, both models resampled together
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import optimize, stats

from vitreous._support.files import write_whole
from vitreous._support.statistics import LEVEL, intervals, mean_of
from vitreous.errors import InputError, OptionError
from vitreous.evaluation.diff.pairs import Pair

FILE = "limits.json"
Verdict = Literal["passed", "failed", "not measured"]


@dataclass(frozen=True)
class Limits:
    """The most that may change; None: anything.

    `max_flips`: share of images with another answer. `max_drop`: accuracy that is lost. `max_moved`: of the images with
    the same answer, the share with another reason; 0.1 is what the rule itself may find by chance. `min_correlation`:
    median rank correlation of the maps.
    """

    max_flips: float | int | None = 0.05
    max_drop: float | int | None = 0.02
    max_moved: float | int | None = 0.1
    min_correlation: float | int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), -1 if one.name == "min_correlation" else 0
            if value is not None and not least <= value <= 1:
                raise OptionError(f"{one.name}={value}: give a number from {least} to 1")


def write_limits(folder: Path, limits: Limits) -> None:
    """Beside the study, for whoever writes its report again; the rows do not depend on them."""
    write_whole(folder / FILE, json.dumps(asdict(limits), indent=2).encode())


def read_limits(folder: Path) -> Limits:
    try:
        return Limits(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Limits()
    except (OSError, ValueError, TypeError):
        raise InputError(f"{folder / FILE}: does not hold limits; run vitreous diff again to write it") from None


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    count: int = 0  # images

    @property
    def told(self) -> dict[str, Any]:
        found = {"value": self.value, "low": self.low, "high": self.high}
        return {name: one if math.isfinite(one) else None for name, one in found.items()} | {"images": self.count}


def rate(these: Sequence[bool]) -> Estimate:
    """A share of images with its exact interval; none of no images."""
    count, all = sum(these), len(these)
    if not all:
        return Estimate(math.nan)
    ends = stats.binomtest(count, all).proportion_ci(LEVEL, "exact")
    return Estimate(count / all, float(ends.low), float(ends.high), all)


def median(values: Sequence[float | int]) -> Estimate:
    """The interval lies between two order statistics; from fewer than six images there is none."""
    rising = np.sort([value for value in values if math.isfinite(value)])
    if not len(rising):
        return Estimate(math.nan)
    found = float(np.median(rising))
    least = int(stats.binom.ppf((1 - LEVEL) / 2, len(rising), 0.5))
    if stats.binom.cdf(least - 1, len(rising), 0.5) <= 0:
        return Estimate(found, count=len(rising))
    return Estimate(found, float(rising[least - 1]), float(rising[len(rising) - least]), len(rising))


def paired_means(one: Sequence[float], other: Sequence[float], seed: int) -> tuple[Estimate, Estimate, Estimate]:
    """The mean of each and of their difference, other − one, over the same resampled images."""
    sides = np.array([one, other], np.float64).reshape(2, -1)
    values = np.concatenate([sides, sides[1:] - sides[:1]])
    low, high = intervals(values, seed) if values.shape[1] else np.full((2, 3), np.nan)
    counts = np.isfinite(values).sum(1)
    means = mean_of(values) if values.shape[1] else np.full(3, np.nan)
    made = [Estimate(float(m), float(a), float(b), int(n)) for m, a, b, n in zip(means, low, high, counts)]
    return made[0], made[1], made[2]


def paired_shares(one: Sequence[bool], other: Sequence[bool]) -> tuple[Estimate, Estimate, Estimate]:
    """The share of each and their difference, other − one; its interval holds all d with |T(d)| ≤ z (Tango 1998).

    T(d) = (c − b − n d) / √(n (2 q + d (1 − d))), b, c: pairs that are true only in one or only in the other, q: the
    most likely share of b under d
    """
    n, b, c = len(one), *(sum(x and not y for x, y in zip(*pair)) for pair in ((one, other), (other, one)))
    if not n:
        return rate(one), rate(other), Estimate(math.nan)
    z = float(stats.norm.ppf((1 + LEVEL) / 2))

    def score(d: float) -> float:
        linear = -b - c + (2 * n - c + b) * d
        q = (math.sqrt(max(linear**2 + 8 * n * b * d * (1 - d), 0.0)) - linear) / (4 * n)
        spread = math.sqrt(max(n * (2 * q + d * (1 - d)), 1e-300))
        return (c - b - n * d) / spread

    low, found, high = -1 + 1e-9, (c - b) / n, 1 - 1e-9
    low = optimize.brentq(lambda d: score(d) - z, low, found) if score(low) > z and score(found) < z else -1.0
    high = optimize.brentq(lambda d: score(d) + z, found, high) if score(high) < -z and score(found) > -z else 1.0
    return rate(one), rate(other), Estimate(found, float(low), float(high), n)


def mcnemar(lost: int, won: int) -> float:
    """The exact two-sided p-value of as many answers that became wrong and right, if either were equally likely."""
    return float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0


@dataclass(frozen=True)
class Check:
    """One limit beside what was measured."""

    name: str
    what: str
    limit: float
    found: Estimate
    least: bool = False  # the limit is a lower one

    @property
    def verdict(self) -> Verdict:
        if not math.isfinite(self.found.value):
            return "not measured"
        low, high = self.found.low, self.found.high
        beyond = high < self.limit if self.least else low > self.limit
        return "failed" if beyond else "passed"

    @property
    def sure(self) -> bool:
        """Whether the whole interval lies on one side of the limit."""
        low, high = self.found.low, self.found.high
        return self.verdict == "failed" or (low >= self.limit if self.least else high <= self.limit)


@dataclass(frozen=True)
class Counted:
    """Everything that is measured over the images."""

    flips: Estimate
    moved: Estimate
    correlation: Estimate
    overlap: Estimate
    distance: Estimate
    ratio: Estimate
    noise: tuple[Estimate, Estimate]
    accuracy: tuple[Estimate, Estimate, Estimate]  # of each model, and the difference
    lost: int  # right answers that became wrong
    won: int
    faithfulness: tuple[Estimate, Estimate, Estimate]

    @property
    def pvalue(self) -> float:
        return mcnemar(self.lost, self.won)


def count(pairs: Sequence[Pair], seed: int) -> Counted:
    right = [pair.right for pair in pairs if pair.right is not None]
    return Counted(
        flips=rate([not pair.same for pair in pairs]),
        moved=rate([pair.moved for pair in pairs if pair.same]),
        correlation=median([pair.correlation for pair in pairs]),
        overlap=median([pair.overlap for pair in pairs]),
        distance=median([pair.distance for pair in pairs]),
        ratio=median([pair.ratio for pair in pairs]),
        noise=(of_side(pairs, 0), of_side(pairs, 1)),
        accuracy=paired_shares([a for a, _ in right], [b for _, b in right]),
        lost=sum(a and not b for a, b in right),
        won=sum(b and not a for a, b in right),
        faithfulness=paired_means([p.faithfulness[0] for p in pairs], [p.faithfulness[1] for p in pairs], seed),
    )


def of_side(pairs: Sequence[Pair], side: int) -> Estimate:
    """The median over images of the median distance under a model's own augmentations."""
    return median([float(np.median(pair.noise[side])) for pair in pairs])


def checks(found: Counted, limits: Limits) -> list[Check]:
    """Those limits that were given, each beside its measure."""
    drop = found.accuracy[2]
    lost = Estimate(-drop.value, -drop.high, -drop.low, drop.count)
    every = [
        ("max_flips", "images with another answer", limits.max_flips, found.flips, False),
        ("max_drop", "accuracy lost", limits.max_drop, lost, False),
        ("max_moved", "same answer, other reason", limits.max_moved, found.moved, False),
        ("min_correlation", "median rank correlation of the maps", limits.min_correlation, found.correlation, True),
    ]
    return [Check(name, what, limit, one, least) for name, what, limit, one, least in every if limit is not None]
