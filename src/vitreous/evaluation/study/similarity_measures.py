"""The CASS of many images in numbers: how it goes with depth, and how far the heads of a layer differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from vitreous._support.statistics import FEW, LEVEL, Moments, intervals, mean_of, pearson

MANY = 5000  # images: more need no resampling
AT_ONCE = 2**14  # images whose numbers are worked on together
SIGNIFICANT = 0.05
ALMOST, LOOSE = -0.9, -0.3  # rank correlations of the mean curve
EXCEPTIONS = 0.2  # of the steps or layers
WEAK, MODERATE, STRONG = 0.1, 0.3, 0.5  # Kendall's W

Verdict = Literal["holds", "holds partly", "does not hold", "cannot be told"]
PerLayer = Float[np.ndarray, "L"]


@dataclass(frozen=True, eq=False)
class Measured:
    """The scores of N images in numbers; intervals are NaN for fewer than five images."""

    images: int
    mean: Float[np.ndarray, "L H"]
    head_ends: Float[np.ndarray, "2 L H"]
    layer_ends: Float[np.ndarray, "2 L"]
    step_ends: Float[np.ndarray, "2 K"]  # of the change from a layer to the next, K = L − 1
    gap_ends: Float[np.ndarray, "2 L"]
    rho: float  # mean over images of the rank correlation of layer means and depth; NaN: no order to find
    rho_ends: Float[np.ndarray, "2"]
    falling: float  # share of images whose correlation is below zero
    trend: float  # p of Page's test for a fall
    w: PerLayer
    p: PerLayer  # after Holm
    lowest: Float[np.ndarray, "L H"]  # share of images in which a head is the lowest of its layer

    @property
    def layers(self) -> PerLayer:
        return np.asarray(self.mean.mean(1))

    @property
    def steps(self) -> Float[np.ndarray, "K"]:
        return np.diff(self.layers)

    @property
    def best(self) -> Int[np.ndarray, "L"]:
        return np.asarray(self.mean.argmax(1))

    @property
    def worst(self) -> Int[np.ndarray, "L"]:
        return np.asarray(self.mean.argmin(1))

    @property
    def gaps(self) -> PerLayer:
        """The difference of the best and the worst head."""
        return np.asarray(np.ptp(self.mean, axis=1))

    @property
    def curve(self) -> float:
        """The rank correlation of the mean curve and depth."""
        return float(depth_correlations(self.layers[None])[0])

    @cached_property
    def clear(self) -> tuple[int, int]:
        """How many steps fall and how many rise with an interval that excludes zero."""
        return int((self.step_ends[1] < 0).sum()), int((self.step_ends[0] > 0).sum())

    @property
    def differing(self) -> int:
        """How many layers have heads that differ significantly and not only a little."""
        return int(((self.p < SIGNIFICANT) & (self.w >= WEAK)).sum())

    @property
    def falls(self) -> Verdict:
        """Does similarity fall almost monotonically with depth?"""
        if self.images < FEW or len(self.mean) < 3:
            return "cannot be told"
        if not self.rho_ends[1] < 0 or not self.curve <= LOOSE:
            return "does not hold"
        rising = self.clear[1] > EXCEPTIONS * len(self.steps)
        return "holds" if self.curve <= ALMOST and not rising else "holds partly"

    @property
    def differ(self) -> Verdict:
        """Do the heads of a layer differ?"""
        if self.images < FEW or self.mean.shape[1] < 2:
            return "cannot be told"
        if not self.differing:
            return "does not hold"
        same = len(self.mean) - self.differing
        return "holds" if same <= EXCEPTIONS * len(self.mean) else "holds partly"


def measure(scores: Float[np.ndarray, "N L H"], seed: int = 0) -> Measured:
    """Compute every statistic from scores without NaN."""
    count, depth, heads = scores.shape
    mean = scores.mean(0, dtype=np.float64)
    layers = scores.mean(2, dtype=np.float64)
    every = np.arange(depth)
    gaps = scores[:, every, mean.argmax(1)].astype(np.float64) - scores[:, every, mean.argmin(1)]
    rho = depth_correlations(layers)
    series = [scores.reshape(count, -1), layers, np.diff(layers), gaps, rho[:, None]]
    of_heads, of_layers, of_steps, of_gaps, of_rho = all_intervals(series, seed)
    tests = [heads_test(scores[:, layer]) for layer in every]
    return Measured(
        images=count,
        mean=mean,
        head_ends=of_heads.reshape(2, depth, heads),
        layer_ends=of_layers,
        step_ends=of_steps,
        gap_ends=of_gaps,
        rho=float(mean_of(rho)),
        rho_ends=of_rho[:, 0],
        falling=float((rho < 0).mean()),
        trend=fall_test(layers),
        w=np.array([w for w, _ in tests]),
        p=holm(np.array([p for _, p in tests])),
        lowest=sum((scores[at] == scores[at].min(2, keepdims=True)).sum(0) for at in blocks(count)) / count,
    )


def blocks(count: int) -> Iterator[slice]:
    """All images, some at a time."""
    return (slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE))


def all_intervals(series: list[Float[np.ndarray, "N _"]], seed: int) -> list[Float[np.ndarray, "2 _"]]:
    """The intervals of several tables of series, from the same resamples where there are any."""
    if len(series[0]) > MANY:
        return [mean_intervals(one.T, seed) for one in series]
    ends = mean_intervals(np.concatenate(series, 1, dtype=np.float64).T, seed)
    return np.split(ends, np.cumsum([one.shape[1] for one in series[:-1]]), 1)


def mean_intervals(series: Float[np.ndarray, "S N"], seed: int = 0) -> Float[np.ndarray, "2 S"]:
    """The 95 % interval of each mean over images: bootstrap; beyond 5,000 images its limit; none from fewer than five.

    m ± 1.96 √(s² / n)
    """
    found = np.full((2, len(series)), np.nan)
    if series.shape[1] > MANY:
        kept = Moments(range(len(series)))
        for at in blocks(series.shape[1]):
            kept.add(series[:, at].T)
        half = stats.norm.ppf((1 + LEVEL) / 2) * kept.error
        return np.where(kept.count >= FEW, np.stack([kept.mean - half, kept.mean + half]), np.nan)
    enough = np.isfinite(series).sum(1) >= FEW
    if enough.any():
        found[:, enough] = intervals(series[enough], seed)
    return found


def depth_correlations(curves: Float[np.ndarray, "N L"]) -> Float[np.ndarray, "N"]:
    """Spearman's ρ of each curve and depth; NaN where layers are fewer than three or all alike."""
    if curves.shape[1] < 3:
        return np.full(len(curves), np.nan)
    depth = np.arange(curves.shape[1])
    return np.concatenate([pearson(stats.rankdata(curves[at], axis=1), depth) for at in blocks(len(curves))])


def fall_test(layers: Float[np.ndarray, "N L"]) -> float:
    """The p value of Page's test: are the layers' means in falling order?

    L = Σ_j j R_j of the rank sums R, the last layer first; E = n k (k+1)² / 4, V = n k² (k+1) (k²−1) / 144
    """
    n, k = layers.shape
    if n < FEW or k < 3:
        return float("nan")
    ranks = sum(stats.rankdata(layers[at], axis=1).sum(0) for at in blocks(n))
    expected, varied = n * k * (k + 1) ** 2 / 4, n * k**2 * (k + 1) * (k**2 - 1) / 144
    return float(stats.norm.sf((ranks[::-1] @ np.arange(1, k + 1) - expected) / varied**0.5))


def heads_test(scores: Float[np.ndarray, "N H"]) -> tuple[float, float]:
    """Kendall's W and the p value that the heads are alike: Friedman's test, Wilcoxon's for two heads.

    W = χ² / (n (k−1)); of two heads, W = (a − b)² / (n (a + b)), where one is higher in a images, the other in b
    """
    count, heads = scores.shape
    if heads < 2:
        return float("nan"), float("nan")
    if heads > 2:
        w, p = friedman(scores)
    else:
        apart = np.diff(scores.astype(np.float64))[:, 0]
        apart = apart[apart != 0]
        w, p = 0.0, 1.0
        if len(apart):
            w, p = float(np.sign(apart).sum() ** 2 / (count * len(apart))), float(stats.wilcoxon(apart).pvalue)
    return w, p if count >= FEW else float("nan")


def friedman(scores: Float[np.ndarray, "N H"]) -> tuple[float, float]:
    """Kendall's W and the p value of Friedman's test, from rank sums; heads that are alike everywhere have W = 0.

    χ² = (12 Σ R² / (n k (k+1)) − 3 n (k+1)) / c, c = 1 − Σ (t³ − t) / (n k (k²−1)) for t ranks that are shared
    """
    n, k = scores.shape
    sums, squares = np.zeros(k), 0.0
    for at in blocks(n):
        ranks = stats.rankdata(scores[at], axis=1)
        sums += ranks.sum(0)
        squares += float((ranks**2).sum())
    shared = 12 * (n * k * (k + 1) * (2 * k + 1) / 6 - squares)  # ranks that are shared lie nearer to their mean
    left = 1 - shared / (n * k * (k**2 - 1))
    if left <= 0:
        return 0.0, 1.0
    chi2 = (12 / (k * n * (k + 1)) * float((sums**2).sum()) - 3 * n * (k + 1)) / left
    return max(0.0, chi2 / (n * (k - 1))), float(stats.chi2.sf(chi2, k - 1))  # rounding may leave W just below zero


def holm(p: Float[np.ndarray, "T"]) -> Float[np.ndarray, "T"]:
    """Holm's correction of p values of several tests: max over the smaller ones of (tests left) · p; NaN stays NaN."""
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    found = np.full(len(p), np.nan)
    found[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return found


def unusually_low(mean: Float[np.ndarray, "L H"]) -> list[tuple[int, int]]:
    """Heads that lie below the others of their layer as few would by chance, the lowest first.

    t = (m̄ − m_h) / (s √(1 + 1/k)) over the k = H − 1 other heads, one-sided p < 0.05 / H
    """
    layers, heads = mean.shape
    if heads < 3:
        return []
    limit = stats.t.isf(SIGNIFICANT / heads, heads - 2) * (1 + 1 / (heads - 1)) ** 0.5
    low = []
    for layer, head in np.ndindex(layers, heads):
        others = np.delete(mean[layer], head)
        below = others.mean() - mean[layer, head]
        if below > max(limit * others.std(ddof=1), 1e-6):  # float32 is no finer
            low.append((layer, head))
    return sorted(low, key=lambda place: float(mean[place]))
