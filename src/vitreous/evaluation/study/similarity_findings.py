"""What the CASS of many images tells: does similarity fall with depth, and do the heads of a layer differ?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from vitreous._support.statistics import FEW, LEVEL, intervals, mean_of
from vitreous.errors import InputError
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.plot.similarity import Group, class_figure, layer_figure

MANY = 5000  # images: more need no resampling
SIGNIFICANT = 0.05
ALMOST, LOOSE = -0.9, -0.3  # rank correlations of the mean curve
EXCEPTIONS = 0.2  # of the steps or layers
WEAK, MODERATE, STRONG = 0.1, 0.3, 0.5  # Kendall's W
CLASSES, SAMPLES, NAMED = 3, 50, 5

Verdict = Literal["holds", "holds partly", "does not hold", "cannot be told"]
PerLayer = Float[np.ndarray, "L"]


def similarity_findings(scores: Float[np.ndarray, "N L H"], groups: Sequence[str | None], seed: int = 0) -> Findings:
    """Both published claims, weighed; a table of the layers; charts by class and by layer.

    Images with a score that is not a number are left out and counted. “Similarity falls almost monotonically with
    depth” holds where the mean over images of their rank correlation with depth is below zero with its whole interval,
    that of the mean curve is ≤ −0.9 and at most a fifth of the steps from layer to layer rise clearly; it holds partly
    where the first is so and the mean curve has ≤ −0.3. “The heads of a layer differ” holds where in at least four of
    five layers p < 0.05 after Holm and W ≥ 0.1, partly where that is so in at least one. Fewer than five images tell
    neither.
    """
    if len(groups) != len(scores):
        raise InputError(f"{len(groups)} groups for {len(scores)} images: give every image's class, or None")
    known = np.isfinite(scores).all((1, 2))
    out = int((~known).sum())
    if not known.any() or not scores.size:
        said = f"all {out} were left out, as their scores are not numbers" if out else "there is none"
        return Findings(f"Nothing can be told from no image: {said}.", numbers={"images": 0, "left_out": out})
    kept = scores if known.all() else scores[known]
    names = [group for group, there in zip(groups, known) if there]
    found = measure(kept, seed)
    left = [f"{count_of(out, 'image')} left out, as a score of each is not a number."] if out else []
    return Findings(
        lead(found),
        [*left, *told_depth(found), *told_heads(found), *told_ends(found)],
        [layer_table(found)],
        charts(found, kept, names),
        numbers(found, out),
    )


# --------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True, eq=False)
class Measured:
    """The scores of N images in numbers; intervals are not a number where fewer than five images were seen."""

    images: int
    mean: Float[np.ndarray, "L H"]
    head_ends: Float[np.ndarray, "2 L H"]
    layer_ends: Float[np.ndarray, "2 L"]
    step_ends: Float[np.ndarray, "2 K"]  # of the change from a layer to the next, K = L − 1
    gap_ends: Float[np.ndarray, "2 L"]
    rho: float  # mean over images of the rank correlation of layer means and depth; not a number: no order to find
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
        """Best less worst head."""
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
        """Layers whose heads differ, beyond chance and not only a little."""
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
    """Everything that is told, from scores that are all numbers."""
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
    """Spearman's ρ of each curve and depth; not a number where layers are fewer than three or all alike."""
    if curves.shape[1] < 3:
        return np.full(len(curves), np.nan)
    ranks = stats.rankdata(curves, axis=1)
    off, down = ranks - ranks.mean(1, keepdims=True), np.arange(curves.shape[1]) - (curves.shape[1] - 1) / 2
    with np.errstate(invalid="ignore"):
        return np.asarray(off @ down / np.sqrt((off**2).sum(1) * (down**2).sum()))


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
    """p values of many tests together: max over the smaller ones of (tests left) · p; what is not a number stays so."""
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


# -------------------------------------------------------------------------------------------------------------- words


FALLS: dict[Verdict, str] = {
    "holds": "similarity falls almost monotonically with depth",
    "holds partly": "similarity falls with depth, though not almost monotonically",
    "does not hold": "similarity does not fall with depth",
    "cannot be told": "whether similarity falls with depth cannot be told",
}
DIFFER: dict[Verdict, str] = {
    "holds": "the heads of a layer differ",
    "holds partly": "the heads differ in some layers only",
    "does not hold": "the heads of a layer do not differ",
    "cannot be told": "whether the heads of a layer differ cannot be told",
}


def lead(found: Measured) -> str:
    rho = f" (rank correlation {number(found.rho)})" if np.isfinite(found.rho) else ""
    layers = f"in {found.differing} of {count_of(len(found.mean), 'layer')}, by up to {found.gaps.max():.2f}"
    apart = f" ({layers})" if found.differ in ("holds", "holds partly") else ""
    return f"Over {count_of(found.images, 'image')}, {FALLS[found.falls]}{rho}, and {DIFFER[found.differ]}{apart}."


def told_depth(found: Measured) -> list[str]:
    """Does similarity fall with depth?"""
    depth = len(found.mean)
    if depth < 2:
        return ["Whether similarity falls with depth cannot be told from one layer."]
    ends = f"from {found.layers[0]:.2f} in layer 0 to {found.layers[-1]:.2f} in layer {depth - 1}"
    steps = told_steps(found)
    if depth < 3:
        return [f"Whether similarity falls with depth cannot be told from two layers; the mean goes {ends}.", steps]
    if not np.isfinite(found.rho):
        return [f"The layers are all alike in every image, so similarity does not follow depth; it goes {ends}.", steps]
    rank = (
        f"Similarity and depth: each image's rank correlation of layer means and depth is {number(found.rho)} "
        f"{span(found.rho_ends)} on average and below zero in {share(found.falling)} of the images; "
        f"that of the mean curve is {number(found.curve)}, {ends}."
    )
    if found.images < FEW:
        return [rank, steps, f"Whether that is chance cannot be told from {count_of(found.images, 'image')}."]
    rule = (
        f"The published “decreases almost monotonically in the deeper layers” {found.falls} here. It is said to hold "
        "where the images' mean correlation is below zero with its whole interval, the mean curve's is at most −0.9 "
        "and at most a fifth of the steps rise clearly; partly where the first is so and the mean curve's is at most "
        "−0.3."
    )
    return [rank, steps, f"Page's trend test for a fall over the layers: {chance(found.trend)}.", rule]


def told_steps(found: Measured) -> str:
    """From layer to layer."""
    falls, rises = int((found.steps < 0).sum()), int((found.steps > 0).sum())
    said = f"Of {count_of(len(found.steps), 'step')} from a layer to the next the mean falls in {falls}"
    if found.images < FEW:
        return f"{said} and rises in {rises}; which of them are clear cannot be told from so few images."
    down, up = found.clear
    where = [f"{layer}–{layer + 1}" for layer in np.flatnonzero(found.step_ends[0] > 0)]
    named = f", {', '.join(where)}" if 0 < len(where) <= NAMED else ""
    return (
        f"{said} and rises in {rises}; {down} fall and {up} rise clearly{named} "
        "(the 95 % interval of the paired change excludes zero)."
    )


def told_heads(found: Measured) -> list[str]:
    """Do the heads of a layer differ?"""
    heads, layer = found.mean.shape[1], int(found.gaps.argmax())
    if heads < 2:
        return ["Whether the heads of a layer differ cannot be told: each layer has one head."]
    gap = (
        f"the best and the worst head of a layer lie {np.median(found.gaps):.3f} apart at the median, and most "
        f"in layer {layer}: {found.gaps[layer]:.3f} {span(found.gap_ends[:, layer], 3)}, "
        f"head {found.best[layer]} over head {found.worst[layer]}"
    )
    if found.images < FEW:
        return [f"Whether the heads differ cannot be told from {count_of(found.images, 'image')}; {gap}."]
    test, middle = "Friedman's" if heads > 2 else "Wilcoxon's", float(np.median(found.w))
    return [
        f"Heads of a layer: p < {SIGNIFICANT} in {int((found.p < SIGNIFICANT).sum())} of "
        f"{count_of(len(found.mean), 'layer')} ({test} test, Holm over the layers). Many images make small differences "
        f"significant too, so mind their size: {gap}.",
        "How far the images agree on the order of a layer's heads, Kendall's W (0 not at all, 1 wholly), is "
        f"{middle:.2f} at the median ({strength(middle)}), from {found.w.min():.2f} to {found.w.max():.2f}.",
        f"The published “not same for all the heads in the same layer” {found.differ} here: p < {SIGNIFICANT} and "
        f"W ≥ {WEAK} in {found.differing} of {count_of(len(found.mean), 'layer')}. It is said to hold where that is so "
        "in four of five layers, partly where in any.",
    ]


def told_ends(found: Measured) -> list[str]:
    """The heads at both ends, and those that stand out below."""
    if found.mean.size < 2:
        return []
    low, high = (divmod(int(i), found.mean.shape[1]) for i in (found.mean.argmin(), found.mean.argmax()))
    said = [f"{word}: {place(found, *where)}" for word, where in (("Least alike", low), ("most alike", high))]
    told = [f"{'; '.join(said)}."]
    if found.mean.shape[1] < 3:
        return told
    unusual = unusually_low(found.mean)
    rule = f"one-sided t against the other heads of the layer, p < {SIGNIFICANT} / {found.mean.shape[1]}"
    if not unusual:
        return [*told, f"No head is unusually low for its layer ({rule})."]
    named = [f"{place(found, *p)}, the lowest there in {share(found.lowest[p])} of the images" for p in unusual[:NAMED]]
    more = f"; and {len(unusual) - NAMED} more" if len(unusual) > NAMED else ""
    return [
        *told,
        f"Unusually low for {'its' if len(unusual) == 1 else 'their'} layer ({rule}): {'; '.join(named)}{more}.",
    ]


def place(found: Measured, layer: int, head: int) -> str:
    """A head's names and its mean."""
    index, size = layer * found.mean.shape[1] + head + 1, found.mean.size
    ends = span(found.head_ends[:, layer, head], 3)
    return f"layer {layer}, head {head} (number {index} of {size}), {found.mean[layer, head]:.3f} {ends}"


def layer_table(found: Measured) -> Table:
    rows = []
    for i, mean in enumerate(found.layers):
        one = found.mean.shape[1] < 2
        best, worst = (f"{h} ({found.mean[i, h]:.3f})" for h in (found.best[i], found.worst[i]))
        gap = ("–", "–") if one else (f"{found.gaps[i]:.3f} {span(found.gap_ends[:, i], 3)}", f"{found.w[i]:.2f}")
        rows.append(
            (f"layer {i}", f"{mean:.3f}", span(found.layer_ends[:, i], 3), best, worst, *gap, p_value(found.p[i]))
        )
    return Table(
        "Layers",
        ("layer", "mean", "95 % interval", "best head", "worst head", "gap", "W", "p (Holm)"),
        rows,
        "The cosine of attention and saliency over the images. Gap: best less worst head, a pair chosen by its means, "
        "with the 95 % interval of the paired difference. W: Kendall's, 0 where each image orders the heads anew, 1 "
        "where all agree. p: that the heads are alike.",
    )


def strength(w: float) -> str:
    names = ((STRONG, "strong"), (MODERATE, "moderate"), (WEAK, "weak"))
    return next((name for least, name in names if w >= least), "negligible")


def number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".replace("-", "−") if np.isfinite(value) else "–"


def span(ends: Float[np.ndarray, "2"], digits: int = 2) -> str:
    """An interval, or that there is none."""
    known = np.isfinite(ends).all()
    return f"[{number(ends[0], digits)}, {number(ends[1], digits)}]" if known else "[cannot be told]"


def p_value(p: float) -> str:
    return "–" if not np.isfinite(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def chance(p: float) -> str:
    return f"p {p_value(p)}" if p < 0.001 else f"p = {p_value(p)}"


def share(part: float) -> str:
    """Never 100 % or 0 % where it is not all or none."""
    if part in (0, 1):
        return f"{100 * part:.0f} %"
    percent = min(max(100 * part, 0.1), 99.9)
    return f"{percent:.0f} %" if 1 <= percent <= 99 else f"{percent:.1f} %"


def count_of(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def numbers(found: Measured, left_out: int) -> dict[str, Any]:
    """The same for programs."""
    return {
        "images": found.images,
        "left_out": left_out,
        "falls_with_depth": found.falls,
        "heads_differ": found.differ,
        "depth": {
            "rho": plain(found.rho),
            "interval": plain(found.rho_ends),
            "share_below_zero": found.falling,
            "rho_of_mean": plain(found.curve),
            "steps": plain(found.steps),
            "step_intervals": plain(found.step_ends.T),
            "clear_falls": found.clear[0],
            "clear_rises": found.clear[1],
            "page_p": plain(found.trend),
        },
        "mean": plain(found.mean),
        "intervals": plain(np.moveaxis(found.head_ends, 0, -1)),
        "layers": {
            "mean": plain(found.layers),
            "intervals": plain(found.layer_ends.T),
            "best": found.best.tolist(),
            "worst": found.worst.tolist(),
            "gap": plain(found.gaps),
            "gap_intervals": plain(found.gap_ends.T),
            "w": plain(found.w),
            "p": plain(found.p),
        },
        "unusually_low": [list(place) for place in unusually_low(found.mean)],
    }


def plain(values: float | np.ndarray) -> Any:
    """Numbers and lists; None for what is not a number."""
    if isinstance(values, np.ndarray):
        return [plain(value) for value in values]
    return float(values) if np.isfinite(values) else None


# ------------------------------------------------------------------------------------------------------------- charts


def charts(found: Measured, scores: Float[np.ndarray, "N L H"], groups: Sequence[str | None]) -> list[Chart]:
    shown = pick_groups(scores, groups)
    return [
        Chart(
            "similarity-by-class",
            "Similarity of every head, image by image",
            "Each thin line is an image, a thick one the mean of all images of its class, or of all where no class has "
            "two. Heads are numbered through the layers.",
            partial(class_figure, shown),
        ),
        Chart(
            "similarity-by-layer",
            "Similarity of every head, sorted inside its layer",
            f"The mean over {count_of(found.images, 'image')} with its 95 % interval as a band; the small numbers name "
            "the heads, the steps are the layers' means.",
            partial(layer_figure, found.mean, found.head_ends, found.images),
        ),
    ]


def pick_groups(scores: Float[np.ndarray, "N L H"], groups: Sequence[str | None]) -> list[Group]:
    """The classes with most images, or all images where no class has two; their samples evenly through the order."""
    counts = Counter(group for group in groups if group is not None)
    chosen = [name for name, count in counts.most_common(CLASSES) if count > 1]
    if not chosen:
        return [group_of("all images", scores, CLASSES * SAMPLES)]
    named = np.array(groups, dtype=object)
    return [group_of(name, scores[named == name], SAMPLES) for name in chosen]


def group_of(name: str, scores: Float[np.ndarray, "N L H"], most: int) -> Group:
    shown = np.unique(np.linspace(0, len(scores) - 1, min(most, len(scores))).round().astype(int))
    return Group(name, len(scores), scores[shown], scores.mean(0, dtype=np.float64))
