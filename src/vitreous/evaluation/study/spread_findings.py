"""How far attention spreads over the patches of many images: its entropy, four levels, and examples of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from vitreous._support.statistics import FEW, mean_of
from vitreous._support.words import count_of, finite, number, share, span
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.evaluation.study.similarity_measures import depth_correlations, mean_intervals
from vitreous.plot.spread import example_figure, histogram_figure, spread_figure

LEVELS = 4
SHOWN = 3  # examples of a level
FOLLOWS = 0.3  # rank correlations from here on are called a trend
LONGEST = 80  # letters of an image's name in a file's name

Borders = Float[np.ndarray, "3"]


@dataclass(frozen=True, eq=False)
class SpreadExample:
    """An image and the attention maps of every layer."""

    name: str
    photo: Image.Image
    panels: Float[np.ndarray, "P h w"]  # every layer's read-out, heads averaged; mean, min, max over them; rollout
    entropy: float


def spread_levels(entropy: Float[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """The level of each image from 1 to 4: one more than the number of quartiles below it; 0 for NaN.

    level = 1 + #{q ∈ {Q₁, Q₂, Q₃} : q < H}
    """
    return levels_between(entropy, quartiles(entropy))


def quartiles(entropy: Float[np.ndarray, "N"]) -> Borders:
    known = entropy[np.isfinite(entropy)]
    return np.quantile(known.astype(np.float64), (0.25, 0.5, 0.75)) if known.size else np.full(3, np.nan)


def levels_between(entropy: Float[np.ndarray, "N"], borders: Borders) -> Int[np.ndarray, "N"]:
    found = 1 + np.searchsorted(borders, entropy.astype(np.float64), side="left")
    return np.where(np.isfinite(entropy), found, 0)


def spread_findings(
    entropy: Float[np.ndarray, "N"],
    layers: Float[np.ndarray, "N L"],
    patches: int,
    examples: Sequence[SpreadExample],
) -> Findings:
    """How many patches attention covers, how that changes with depth, and four levels with examples.

    Images with NaN are left out and counted.
    """
    known = np.isfinite(entropy) & np.isfinite(layers).all(1)
    out = int((~known).sum())
    if not known.any():
        said = f"all {out} were left out, as their entropy is NaN" if out else "there is none"
        return Findings(f"Nothing can be told from no image: {said}.", numbers={"images": 0, "left_out": out})
    if out:
        entropy, layers = entropy[known], layers[known]
    entropy, layers = entropy.astype(np.float64, copy=False), layers.astype(np.float64, copy=False)
    found = Spread(entropy, layers, patches, quartiles(entropy), spread_levels(entropy))
    chosen = pick_examples(found, examples)
    left = [f"{count_of(out, 'image')} left out, as their entropy is NaN."] if out else []
    return Findings(
        lead(found),
        [*left, told_mean(found), told_borders(found), told_depth(found)],
        [level_table(found, chosen)],
        charts(found, chosen),
        numbers(found, chosen, out),
    )


@dataclass(frozen=True, eq=False)
class Spread:
    """The entropy of every image's attention, in nats."""

    entropy: Float[np.ndarray, "N"]
    layers: Float[np.ndarray, "N L"]
    patches: int
    borders: Borders
    level: Int[np.ndarray, "N"]

    @property
    def even(self) -> float:
        """The entropy of attention that is the same everywhere."""
        return float(np.log(self.patches))

    @cached_property
    def rho(self) -> Float[np.ndarray, "N"]:
        """The rank correlation of each image's entropies with depth."""
        return depth_correlations(self.layers)

    def of(self, level: int) -> Float[np.ndarray, "n"]:
        return np.asarray(self.entropy[self.level == level])


def pick_examples(found: Spread, examples: Sequence[SpreadExample]) -> dict[int, list[SpreadExample]]:
    """For each level, the three examples whose entropy is nearest to its median."""
    known = [one for one in examples if np.isfinite(one.entropy)]
    level = levels_between(np.array([one.entropy for one in known], dtype=np.float64), found.borders)
    chosen = {}
    for k in range(1, LEVELS + 1):
        there = [one for one, its in zip(known, level) if its == k]
        middle = float(np.median(found.of(k))) if found.of(k).size else 0.0
        chosen[k] = sorted(there, key=lambda one: abs(one.entropy - middle))[:SHOWN]
    return chosen


# -------------------------------------------------------------------------------------------------------------- words


def lead(found: Spread) -> str:
    mean = float(found.entropy.mean())
    return (
        f"Over {count_of(len(found.entropy), 'image')}, the attention looks at about {looked_at(mean)} of "
        f"{found.patches:,} patches (entropy {mean:.2f} nats{of_even(mean, found)})."
    )


def told_mean(found: Spread) -> str:
    mean, ends = float(found.entropy.mean()), mean_intervals(found.entropy[None])[:, 0]
    return (
        f"Mean entropy of the attention: {mean:.3f} {span(ends, 3)} nats{of_even(mean, found)}; attention that is even "
        f"over all {found.patches:,} patches has {found.even:.3f}. An entropy H is that of an even look at "
        f"exp(H) patches: about {looked_at(mean)} here, {looked_at(found.entropy.min())} to "
        f"{looked_at(found.entropy.max())} from image to image."
    )


def told_borders(found: Spread) -> str:
    said = ", ".join(f"{border:.3f}" for border in found.borders)
    return (
        f"The quartiles {said} nats part the images into four levels, 1 the narrowest; an image on a border belongs to "
        "the lower level, so equals share one."
    )


def told_depth(found: Spread) -> str:
    """Does attention narrow or widen with depth?"""
    depth, means = found.layers.shape[1], found.layers.mean(0)
    if depth < 2:
        return "How the spread goes with depth cannot be told from one layer."
    ends = f"from {means[0]:.2f} nats in layer 0 to {means[-1]:.2f} in layer {depth - 1}"
    rho = found.rho
    if not np.isfinite(rho).any():
        why = "from two layers" if depth < 3 else "as all layers are alike in every image"
        return f"How the spread goes with depth cannot be told {why}; the mean goes {ends}."
    mean, interval = float(mean_of(rho)), mean_intervals(rho[None])[:, 0]
    sign = -1 if mean < 0 else 1
    said = "narrows" if sign < 0 else "widens"
    if len(rho) < FEW:
        verdict = f"Whether attention narrows or widens with depth cannot be told from {count_of(len(rho), 'image')}"
    elif min(sign * interval) <= 0 or abs(mean) < FOLLOWS:
        verdict = "The spread of attention does not follow depth"
    else:
        verdict = f"Attention {said} with depth"
    return (
        f"{verdict}: each image's rank correlation of a layer's entropy and depth is {number(mean)} {span(interval)} "
        f"on average and {'below' if sign < 0 else 'above'} zero in {share(float((sign * rho > 0).mean()))} of the "
        f"images; the mean goes {ends}."
    )


def looked_at(entropy: float) -> str:
    """How many patches an even look with this entropy covers."""
    count = float(np.exp(entropy))
    return f"{count:.1f}" if count < 9.95 else f"{count:.0f}"


def of_even(entropy: float, found: Spread) -> str:
    return f", {share(min(1.0, entropy / found.even))} of what is possible" if found.patches > 1 else ""


def level_table(found: Spread, chosen: dict[int, list[SpreadExample]]) -> Table:
    rows = []
    for k in range(1, LEVELS + 1):
        values = found.of(k)
        told = ("–", "–", "–")
        if values.size:
            mean = float(values.mean())
            told = (f"{values.min():.3f} – {values.max():.3f}", f"{mean:.3f}", looked_at(mean))
        rows.append((f"level {k}", f"{values.size:,}", *told, ", ".join(one.name for one in chosen[k]) or "–"))
    return Table(
        "Levels",
        ("level", "images", "entropy (nats)", "mean", "patches looked at", "examples"),
        rows,
        "Four levels by the quartiles of the entropy. Patches looked at: exp of the mean entropy. Examples: the "
        "nearest to the level's median.",
    )


def numbers(found: Spread, chosen: dict[int, list[SpreadExample]], left_out: int) -> dict[str, Any]:
    """The same for programs."""
    rho, mean = found.rho, float(found.entropy.mean())
    return {
        "images": len(found.entropy),
        "left_out": left_out,
        "patches": found.patches,
        "entropy": mean,
        "interval": finite(mean_intervals(found.entropy[None])[:, 0]),
        "share_of_even": mean / found.even if found.patches > 1 else None,
        "patches_looked_at": float(np.exp(mean)),
        "borders": finite(found.borders),
        "depth": {"rho": finite(float(mean_of(rho))), "interval": finite(mean_intervals(rho[None])[:, 0])},
        "layers": {"mean": finite(found.layers.mean(0)), "intervals": finite(mean_intervals(found.layers.T).T)},
        "levels": [
            {
                "level": k,
                "images": int(found.of(k).size),
                "entropy": finite(float(mean_of(found.of(k)))),
                "examples": [one.name for one in chosen[k]],
            }
            for k in range(1, LEVELS + 1)
        ],
    }


# ------------------------------------------------------------------------------------------------------------- charts


def charts(found: Spread, chosen: dict[int, list[SpreadExample]]) -> list[Chart]:
    groups = {k: found.layers[found.level == k] for k in range(1, LEVELS + 1) if found.of(k).size}
    means = {k: (rows.mean(0), mean_intervals(rows.T)) for k, rows in groups.items()}
    whole = Chart(
        "spread-histogram",
        "How far attention spreads",
        "The entropy of the attention over the images; the shades are the four levels, parted by the quartiles.",
        partial(histogram_figure, found.entropy, found.borders, found.patches),
    )
    by_layer = Chart(
        "spread-by-layer",
        "Spread of attention by layer",
        "The mean entropy of each layer's attention, one line for each level, with 95 % intervals as bands.",
        partial(spread_figure, means, found.patches),
    )
    used: set[str] = set()
    return [whole, by_layer, *(example_chart(k, one, used) for k, some in chosen.items() for one in some)]


def example_chart(level: int, one: SpreadExample, used: set[str]) -> Chart:
    name = file_name(f"spread-level-{level}-", one.name, used)
    title = f"Level {level}: {one.name}"
    about = f"Entropy {one.entropy:.2f} nats: about {looked_at(one.entropy)} patches are looked at."
    return Chart(name, title, about, partial(example_figure, one.photo, one.panels, title, about))


def file_name(start: str, name: str, used: set[str]) -> str:
    """A file name of letters, digits and hyphens, without extension, that no other chart has, ignoring case."""
    bare = re.sub(r"\.[A-Za-z0-9]{1,5}$", "", name)
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", bare)[:LONGEST].strip("-") or "image"
    found, count = start + safe, 1
    while found.lower() in used:
        count += 1
        found = f"{start}{safe}-{count}"
    used.add(found.lower())
    return found
