"""The CASS of many images in numbers: how it goes with depth, and how far the heads of a layer differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from vitreous._support.statistics import FEW, LEVEL, intervals, mean_of, pearson

MANY = 5000  # images: more need no resampling
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
    series = [scores.reshape(count, -1).astype(np.float64), layers, np.diff(layers), gaps, rho[:, None]]
    ends = mean_intervals(np.concatenate(series, 1).T, seed)
    of_heads, of_layers, of_steps, of_gaps, of_rho = np.split(ends, np.cumsum([one.shape[1] for one in series[:-1]]), 1)
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
        lowest=np.asarray((scores == scores.min(2, keepdims=True)).mean(0)),
    )


def mean_intervals(series: Float[np.ndarray, "S N"], seed: int = 0) -> Float[np.ndarray, "2 S"]:
    """The 95 % interval of each mean over images: bootstrap; beyond 5,000 images its limit; none from fewer than five.

    m ± 1.96 √(s² / n)
    """
    enough = np.isfinite(series).sum(1) >= FEW
    found = np.full((2, len(series)), np.nan)
    if not enough.any():
        return found
    if series.shape[1] <= MANY:
        found[:, enough] = intervals(series[enough], seed)
        return found
    for one in np.flatnonzero(enough):
        values = series[one][np.isfinite(series[one])]
        half = stats.norm.ppf((1 + LEVEL) / 2) * values.std(ddof=1) / len(values) ** 0.5
        found[:, one] = values.mean() - half, values.mean() + half
    return found


def depth_correlations(curves: Float[np.ndarray, "N L"]) -> Float[np.ndarray, "N"]:
    """Spearman's ρ of each curve and depth; NaN where layers are fewer than three or all alike."""
    if curves.shape[1] < 3:
        return np.full(len(curves), np.nan)
    return pearson(stats.rankdata(curves, axis=1), np.arange(curves.shape[1]))


def fall_test(layers: Float[np.ndarray, "N L"]) -> float:
    """The p value of Page's test: are the layers' means in falling order?"""
    if len(layers) < FEW or layers.shape[1] < 3:
        return float("nan")
    return float(stats.page_trend_test(layers[:, ::-1], method="asymptotic").pvalue)


def heads_test(scores: Float[np.ndarray, "N H"]) -> tuple[float, float]:
    """Kendall's W and the p value that the heads are alike: Friedman's test, Wilcoxon's for two heads.

    W = χ² / (n (k−1)); of two heads, W = (a − b)² / (n (a + b)), where one is higher in a images, the other in b
    """
    count, heads = scores.shape
    if heads < 2:
        return float("nan"), float("nan")
    values = scores.astype(np.float64)
    apart = np.diff(values)[:, 0] if heads == 2 else np.ptp(values, axis=1)
    apart = apart[apart != 0]
    if not len(apart):
        w, p = 0.0, 1.0
    elif heads == 2:
        w, p = float(np.sign(apart).sum() ** 2 / (count * len(apart))), float(stats.wilcoxon(apart).pvalue)
    else:
        chi2, p = (float(found) for found in stats.friedmanchisquare(*values.T))
        w = max(0.0, chi2 / (count * (heads - 1)))  # rounding may leave it just below zero
    return w, p if count >= FEW else float("nan")


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
