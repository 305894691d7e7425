"""Statistics of a sample of images: paired bootstrap intervals, ranks and verdicts.

mean* = Σ cᵢ vᵢ / Σ cᵢ, c ~ Multinomial(n, 1/n): all methods are averaged over the same resampled images
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from vitreous.errors import OptionError
from vitreous.registry import Better

TIMES = 2000  # resamples
LEVEL = 0.95
FEW = 5  # images: no verdict from fewer
NAMED = 3  # metrics listed by name in a verdict; more are only counted
MOST_DIGITS = 6
AT_ONCE = 2**23  # numbers per block of resamples
GROUPS = 8192  # of images, at most, are resampled: of more images, groups that are drawn at random

Table = Float[np.ndarray, "M K"]  # methods, metrics
Counts = Int[np.ndarray, "M K"]
Values = Float[np.ndarray, "M K N"]  # … and images; NaN: not measured


def resampled_means(
    values: Float[np.ndarray, "S N"], seed: int = 0, times: int = TIMES
) -> Float[np.ndarray, "{times} S"]:
    """The mean of each series over the same resampled images, ignoring NaN.

    Of more than 8,192 images, groups of as many images each, drawn at random, are resampled in their place: the sum of
    a group varies as the sum of its images does, so the means vary alike.
    """
    filled, there = in_groups(values, seed)
    count = len(filled)
    chance = np.random.default_rng(seed)
    share = np.full(count, 1 / count)
    parts = []
    for start in range(0, times, most := max(1, AT_ONCE // count)):
        drawn = chance.multinomial(count, share, size=min(most, times - start)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            parts.append(drawn @ filled / (drawn @ there))
    return np.concatenate(parts)


def in_groups(
    values: Float[np.ndarray, "S N"], seed: int = 0, most: int | None = None
) -> tuple[Float[np.ndarray, "G S"], Float[np.ndarray, "G S"]]:
    """The sum of each series over every group of images, and how many of its values are numbers."""
    most, images = most or GROUPS, values.shape[1]
    if images <= most:  # each image is a group
        known = np.isfinite(values)
        return np.where(known, values, 0).T, known.T.astype(np.float64)
    group = np.random.default_rng([seed, images]).permutation(images) % most
    sums, counts = np.zeros((most, len(values))), np.zeros((most, len(values)))
    for s, series in enumerate(values):
        known = np.isfinite(series)
        sums[:, s] = np.bincount(group, np.where(known, series, 0), most)
        counts[:, s] = np.bincount(group, known, most)
    return sums, counts


def intervals(values: Float[np.ndarray, "S N"], seed: int = 0) -> Float[np.ndarray, "2 S"]:
    """The 95 % bootstrap interval of each mean; NaN from fewer than two images."""
    found = np.full((2, len(values)), np.nan)
    enough = np.isfinite(values).sum(1) > 1
    if enough.any():
        ends = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
        found[:, enough] = np.nanquantile(resampled_means(values[enough], seed), ends, axis=0)
    return found


def mean_of(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis, ignoring NaN; NaN if there is no finite value."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(-1) / known.sum(-1))


def pearson(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Pearson's r along the last axis; NaN if one side is constant."""
    x, y = (side - side.mean(-1, keepdims=True) for side in (one.astype(np.float64), other.astype(np.float64)))
    size = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    varied = (np.ptp(one, axis=-1) > 0) & (np.ptp(other, axis=-1) > 0) & (size > 0)
    r = (x * y).sum(-1) / np.where(varied, size, 1)
    return np.asarray(np.where(varied, np.clip(r, -1, 1), np.nan))


def otsu(values: Float[np.ndarray, "S n"]) -> tuple[Float[np.ndarray, "S"], Float[np.ndarray, "S"]]:
    """Part each series into two classes: the share of its variance that lies between them, and the value between them.

    max_t w₀·w₁·(μ₀ − μ₁)² / σ²; 0 where all values are the same
    """
    rising = np.sort(values.astype(np.float64), 1)
    n = rising.shape[1]
    below = np.arange(1, n)
    sums = rising.cumsum(1)
    low, high = sums[:, :-1] / below, (sums[:, -1:] - sums[:, :-1]) / (n - below)
    between = below / n * (1 - below / n) * (high - low) ** 2
    whole = rising.var(1)
    share = np.where(whole > 0, between.max(1, initial=0) / np.maximum(whole, 1e-300), 0)
    last = between.argmax(1) if n > 1 else np.zeros(len(rising), np.int64)
    rows = np.arange(len(rising))
    return share, (rising[rows, last] + rising[rows, np.minimum(last + 1, n - 1)]) / 2


@dataclass(frozen=True, eq=False)
class Summary:
    """Methods × metrics: means with intervals, gains over the control with intervals, ranks."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    better: tuple[Better, ...]
    judged: tuple[bool, ...]  # which metrics judge whether a map is right; the others only describe it
    control: str
    mean: Table
    low: Table
    high: Table
    count: Counts
    gain: Table  # mean paired difference from the control; positive is better, whatever the metric's direction
    gain_low: Table
    gain_high: Table
    pairs: Counts
    rank: Table  # 1 is best; ties share their mean rank

    @cached_property
    def mean_rank(self) -> Float[np.ndarray, "M"]:
        """The mean rank of each method over the judging metrics for which it has a value."""
        return mean_of(self.rank[:, list(np.flatnonzero(self.judged))])

    @property
    def order(self) -> list[int]:
        """The indices of the methods, best mean rank first, those without a rank last."""
        return sorted(range(len(self.methods)), key=lambda m: (np.isnan(self.mean_rank[m]), self.mean_rank[m], m))

    @cached_property
    def effect(self) -> Int[np.ndarray, "M K"]:
        """1: better than the control, −1: worse, 0: not distinguishable."""
        enough = self.pairs >= FEW
        above, below = (self.gain_low > 0) & enough, (self.gain_high < 0) & enough
        return above.astype(np.int64) - below.astype(np.int64)

    def verdict(self, method: int) -> str:
        """The comparison of one method with the control, as text."""
        if self.methods[method] == self.control:
            return "the control: what an uninformed map scores"
        told = [k for k, judged in enumerate(self.judged) if judged and self.pairs[method, k]]
        if not told:
            return "could not be measured"
        if max(self.pairs[method, k] for k in told) < FEW:
            return f"too few images to tell ({max(self.pairs[method, k] for k in told)})"
        won, lost = ([k for k in told if self.effect[method, k] == sign] for sign in (1, -1))
        if not won and not lost:
            return f"not distinguishable from {self.control} on this model"
        parts = []
        if won:
            parts.append(f"better than {self.control} on {self.share(won, told)}")
        if lost:
            parts.append(f"worse {'' if won else f'than {self.control} '}on {self.named(lost)}")
        unclear = [k for k in told if k not in won and k not in lost]
        if unclear and (won or lost):
            parts.append(f"not distinguishable on {self.named(unclear)}")
        return "; ".join(parts)

    def share(self, some: Sequence[int], all: Sequence[int]) -> str:
        """`all 4 metrics`, `3 of 4 metrics`, or the name of the only one."""
        if len(all) == 1:
            return self.named(all)
        return f"all {len(all)} metrics" if len(some) == len(all) else f"{len(some)} of {len(all)} metrics"

    def named(self, metrics: Sequence[int]) -> str:
        """The names of a few metrics, or the number of many."""
        return f"{len(metrics)} others" if len(metrics) > NAMED else ", ".join(self.metrics[k] for k in metrics)

    def spell(self, value: float, k: int) -> str:
        """Format a value of a metric with enough digits to distinguish the methods: 0.123, −1.20, 0.00098, 340."""
        known = self.mean[:, k][np.isfinite(self.mean[:, k])]
        width = float(known.max() - known.min()) or float(np.abs(known).max()) or 1.0
        digits = max(0, 2 - math.floor(math.log10(width)))
        said = f"{value:.2e}" if digits > MOST_DIGITS or abs(value) >= 1e6 else f"{value:.{digits}f}"
        return said.replace("-", "−", 1) if value < 0 else said


def summarise(
    values: Values,
    methods: Sequence[str],
    metrics: Sequence[str],
    better: Sequence[Better],
    *,
    control: str = "random",
    judged: Sequence[bool] | None = None,
    seed: int = 0,
) -> Summary:
    """Summarise a table of values [methods, metrics, images]."""
    if control not in methods:
        raise OptionError(
            f"{control} is not among the methods ({', '.join(methods)}), so nothing can be compared with it"
        )
    shape = values.shape[:2]
    sign = np.array([1.0 if direction == "higher" else -1.0 for direction in better])
    gains = sign[:, None] * (values - values[list(methods).index(control)])
    both = np.concatenate([values, gains]).astype(np.float64).reshape(2 * shape[0] * shape[1], values.shape[2])
    low, high = (ends.reshape(2, *shape) for ends in intervals(both, seed))
    mean = mean_of(values.astype(np.float64))
    counted = tuple(judged) if judged is not None and any(judged) else (True,) * len(metrics)
    return Summary(
        tuple(methods),
        tuple(metrics),
        tuple(better),
        counted,
        control,
        mean,
        low[0],
        high[0],
        np.isfinite(values).sum(-1),
        mean_of(gains.astype(np.float64)),
        low[1],
        high[1],
        np.isfinite(gains).sum(-1),
        ranks(mean, sign),
    )


def ranks(mean: Table, sign: Float[np.ndarray, "K"]) -> Table:
    """The rank of each method within each metric, 1 for the best; ties share their mean rank, NaN has no rank."""
    ranked = np.full(mean.shape, np.nan)
    for k in range(mean.shape[1]):
        there: Bool[np.ndarray, "M"] = np.isfinite(mean[:, k])
        ranked[there, k] = stats.rankdata(-sign[k] * mean[there, k])
    return ranked


class Moments:
    """The mean curve of many images and its 95 % interval, without keeping the curves.

    M₂ ← M₂ + Σ (x − x̄)² + (x̄ − m)² · n b / (n + b) for b more images, the interval is m ± t·√(M₂ / (n−1) / n)
    """

    def __init__(self, at: Sequence[float | int]) -> None:
        self.at = tuple(float(place) for place in at)
        self.count = np.zeros(len(self.at), dtype=np.int64)
        self.mean = np.zeros(len(self.at))
        self._spread = np.zeros(len(self.at))

    def add(self, curves: Float[np.ndarray, "B T"]) -> None:
        """Add more images; NaN points are ignored."""
        known = np.isfinite(curves)
        count = known.sum(0)
        mean = np.where(known, curves, 0).sum(0, dtype=np.float64) / np.maximum(count, 1)
        step, total = np.where(count > 0, mean - self.mean, 0), np.maximum(self.count + count, 1)
        self._spread += (np.where(known, curves - mean, 0) ** 2).sum(0) + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count += count

    @property
    def error(self) -> Float[np.ndarray, "T"]:
        """The standard error of each mean; NaN from fewer than two images."""
        n = self.count
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(n > 1, np.sqrt(self._spread / (n - 1) / n), np.nan)

    @property
    def interval(self) -> Float[np.ndarray, "2 T"]:
        """The lower and upper ends of the 95 % interval; NaN from fewer than two images."""
        half = stats.t.ppf((1 + LEVEL) / 2, np.maximum(self.count - 1, 1)) * self.error
        return np.stack([self.mean - half, self.mean + half])
