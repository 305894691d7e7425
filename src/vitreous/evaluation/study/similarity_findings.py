"""What the CASS of many images tells: does similarity fall with depth, and do the heads of a layer differ?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from vitreous._support.statistics import FEW
from vitreous._support.words import count_of, finite, number, share, span
from vitreous.errors import InputError
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.evaluation.study.similarity_measures import (
    MODERATE,
    SIGNIFICANT,
    STRONG,
    WEAK,
    Measured,
    Verdict,
    measure,
    unusually_low,
)
from vitreous.plot.similarity import Group, class_figure, layer_figure

CLASSES, SAMPLES, NAMED = 3, 50, 5


def similarity_findings(scores: Float[np.ndarray, "N L H"], groups: Sequence[str | None], seed: int = 0) -> Findings:
    """Both published claims, weighed; a table of the layers; charts by class and by layer.

    Images with a NaN score are left out and counted. “Similarity falls almost monotonically with
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
        said = f"all {out} were left out, as their scores are NaN" if out else "there is none"
        return Findings(f"Nothing can be told from no image: {said}.", numbers={"images": 0, "left_out": out})
    kept = scores if known.all() else scores[known]
    names = [group for group, there in zip(groups, known) if there]
    found = measure(kept, seed)
    left = [f"{count_of(out, 'image')} left out, as a score of each is NaN."] if out else []
    return Findings(
        lead(found),
        [*left, *told_depth(found), *told_heads(found), *told_ends(found)],
        [layer_table(found)],
        charts(found, kept, names),
        numbers(found, out),
    )


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
    """A head's layer, number and mean."""
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


def p_value(p: float) -> str:
    return "–" if not np.isfinite(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def chance(p: float) -> str:
    return f"p {p_value(p)}" if p < 0.001 else f"p = {p_value(p)}"


def numbers(found: Measured, left_out: int) -> dict[str, Any]:
    """The findings as JSON can hold them."""
    return {
        "images": found.images,
        "left_out": left_out,
        "falls_with_depth": found.falls,
        "heads_differ": found.differ,
        "depth": {
            "rho": finite(found.rho),
            "interval": finite(found.rho_ends),
            "share_below_zero": found.falling,
            "rho_of_mean": finite(found.curve),
            "steps": finite(found.steps),
            "step_intervals": finite(found.step_ends.T),
            "clear_falls": found.clear[0],
            "clear_rises": found.clear[1],
            "page_p": finite(found.trend),
        },
        "mean": finite(found.mean),
        "intervals": finite(np.moveaxis(found.head_ends, 0, -1)),
        "layers": {
            "mean": finite(found.layers),
            "intervals": finite(found.layer_ends.T),
            "best": found.best.tolist(),
            "worst": found.worst.tolist(),
            "gap": finite(found.gaps),
            "gap_intervals": finite(found.gap_ends.T),
            "w": finite(found.w),
            "p": finite(found.p),
        },
        "unusually_low": [list(place) for place in unusually_low(found.mean)],
    }


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
    """The classes with the most images, or all images where no class has two; samples are taken evenly."""
    counts = Counter(group for group in groups if group is not None)
    chosen = [name for name, count in counts.most_common(CLASSES) if count > 1]
    if not chosen:
        return [group_of("all images", scores, CLASSES * SAMPLES)]
    named = np.array(groups, dtype=object)
    return [group_of(name, scores[named == name], SAMPLES) for name in chosen]


def group_of(name: str, scores: Float[np.ndarray, "N L H"], most: int) -> Group:
    shown = np.unique(np.linspace(0, len(scores) - 1, min(most, len(scores))).round().astype(int))
    return Group(name, len(scores), scores[shown], scores.mean(0, dtype=np.float64))
