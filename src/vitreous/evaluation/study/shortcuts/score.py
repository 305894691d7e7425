"""What the second phase says of each cluster: its effects with intervals, its score, its rank, and whether to alarm.

score = w · mean over images x of other classes of p(class | x with the cue) − p(class | x with ordinary parts of it)
w     = max(1 − share of the class's images that have the cue, share of its relevance outside the masks)
p     = the largest of the tests below: an alarm needs every one; p · clusters ≤ level (Bonferroni)

Without the weight, what every image of a class has, its object, would stand beside what few have; with masks, a cue
that all images have counts by how far it lies outside the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from vitreous._support.statistics import intervals, mean_of
from vitreous.evaluation.study.kind import Rows
from vitreous.evaluation.study.shortcuts.effects import INSERTION, REMOVAL
from vitreous.evaluation.study.shortcuts.options import Options

FEW = 5  # pairs of images: no test from fewer
MANY = 8  # clusters: whether one stands out is asked of as many
READ = ("target", "prediction", "probability", "error", "occurs", *REMOVAL, *INSERTION, "a_tsi", "m_tsi")
Series = Float[np.ndarray, "n"]


@dataclass(frozen=True, eq=False)
class Measured:
    """The raw numbers of the second phase, by cluster."""

    removal: dict[int, np.ndarray]  # [n 6]: p whole, p without, p random; hit whole, hit without, hit random
    insertion: dict[int, np.ndarray]  # [n 7]: host, p before, with cue, with ordinary, with random; best is the class
    here: dict[int, int]
    elsewhere: dict[int, int]
    images: dict[int, int]  # of each class
    indices: dict[int, tuple[float, float]]  # of an image: A-TSI and M-TSI


@dataclass(frozen=True, eq=False)
class Judged:
    """One cluster and everything that is said of it; intervals are 95 % bootstraps over images."""

    told: dict[str, Any]  # as it was designed
    values: dict[str, float]
    tests: dict[str, float]
    p: float = 1.0
    rank: int | None = None
    alarm: bool = False


def measure(design: dict[str, Any], second: Rows) -> Measured:
    """Gather the rows of the second phase by cluster."""
    group = {one["cluster"]: one["class"] for one in design["clusters"]}
    removal, insertion = ({cluster: list[Any]() for cluster in group} for _ in range(2))
    here, elsewhere = (dict.fromkeys(group, 0) for _ in range(2))
    images, indices, number = dict[int, int](), dict[int, tuple[float, float]](), 0
    for table in second.tables(list(READ)):
        for row in table.to_pylist():
            number += 1
            if row["error"] is not None or not (row["target"] or "").isdigit():
                continue
            own = int(row["target"])
            images[own] = images.get(own, 0) + 1
            for cluster in row["occurs"]:
                (here if group[cluster] == own else elsewhere)[cluster] += 1
            for cluster, _, *rest in zip(*(row[name] for name in REMOVAL)):
                hit = float(row["prediction"] == own)
                removal[cluster].append((row["probability"], rest[0], rest[2], hit, rest[1], rest[3]))
            for cluster, before, cue, best, ordinary, usual, chance in zip(*(row[name] for name in INSERTION)):
                flips = float(best == group[cluster]), float(usual == group[cluster])
                insertion[cluster].append((number - 1, before, cue, ordinary, chance, *flips))
            if row["a_tsi"] is not None:
                indices[number - 1] = row["a_tsi"], row["m_tsi"]
    gone, put = ({key: np.array(rows, np.float64) for key, rows in of.items()} for of in (removal, insertion))
    return Measured(gone, put, here, elsewhere, images, indices)


def judge(design: dict[str, Any], found: Measured, options: Options) -> list[Judged]:
    """Every cluster, ranked by its score; those without one come last."""
    every = [judge_one(told, design, found, options) for told in design["clusters"]]
    scores = np.array([one.values["score"] for one in every])
    p = [max([*one.tests.values(), stands_out(scores, i)]) for i, one in enumerate(every)]
    order = sorted(range(len(every)), key=lambda i: (np.isnan(scores[i]), -scores[i] if scores[i] == scores[i] else 0))
    ranked = []
    for rank, i in enumerate(order, 1):
        one, tests = every[i], {**every[i].tests, "stands out": stands_out(scores, i)}
        known = bool(np.isfinite(scores[i]))
        alarm = known and p[i] * len(every) <= options.level
        ranked.append(Judged(one.told, one.values, tests, p[i], rank if known else None, alarm))
    return ranked


def judge_one(told: dict[str, Any], design: dict[str, Any], found: Measured, options: Options) -> Judged:
    cluster, group = told["cluster"], told["class"]
    outside = np.array([np.nan if one is None else one for one in told["outside"]], np.float64)
    weight = max(told["rare"], float(np.nan_to_num(mean_of(outside))))
    values = {"weight": weight} | removed_values(found.removal[cluster], options.seed)
    values |= inserted_values(found.insertion[cluster], weight, options.seed)
    mine = found.images.get(group, 0)
    others = sum(found.images.values()) - mine
    values["here"] = found.here[cluster] / max(1, mine)
    values["elsewhere"] = found.elsewhere[cluster] / others if others else np.nan
    values |= means({"share": np.array(told["shares"]), "outside": outside}, options.seed)
    tsi = np.array([found.indices[n] for n in told["indexed"] if n in found.indices]).reshape(-1, 2)
    values |= means({"a_tsi": tsi[:, 0], "m_tsi": tsi[:, 1]}, options.seed)
    tests = {
        "inserted": test_inserted(found.insertion[cluster], weight, options.margin),
        "sources": test_sources(found.insertion[cluster], cluster, design),
        "of the class": test_specific(told["again"], mine, found.elsewhere[cluster], others),
    }
    return Judged(told, values, tests)


def removed_values(rows: np.ndarray, seed: int) -> dict[str, float]:
    """Without the tokens of the cluster, less than without as many random ones."""
    p, gone, chance, hit, hit_gone, hit_chance = rows.T if len(rows) else np.zeros((6, 0))
    series = {
        "confidence_removed": gone - p,
        "confidence_random": chance - p,
        "confidence_change": gone - chance,
        "accuracy_removed": hit_gone - hit,
        "accuracy_random": hit_chance - hit,
        "accuracy_change": hit_gone - hit_chance,
    }
    return {"removals": float(len(rows)), **means(series, seed)}


def inserted_values(rows: np.ndarray, weight: float, seed: int) -> dict[str, float]:
    """With the cue in images of other classes, more than with ordinary parts of the class."""
    _, before, cue, ordinary, chance, flips, usual = rows.T if len(rows) else np.zeros((7, 0))
    series = {
        "score": weight * (cue - ordinary),
        "gain": cue - ordinary,
        "inserted": cue - before,
        "ordinary": ordinary - before,
        "random": chance - before,
        "flips": flips,
        "flips_ordinary": usual,
    }
    return {"insertions": float(len(rows)), **means(series, seed)}


def means(series: dict[str, Series], seed: int) -> dict[str, float]:
    """The mean and interval of each series, as NAME, NAME_low and NAME_high; NaN where there is none."""
    stack = np.stack(list(series.values()))
    ends = intervals(stack, seed) if stack.shape[1] else np.full((2, len(stack)), np.nan)
    found: dict[str, float] = {}
    for name, mean, low, high in zip(series, mean_of(stack), *ends):
        found |= {name: float(mean), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found


# --------------------------------------------------------------------------------------------------------------- tests


def test_inserted(rows: np.ndarray, weight: float, margin: float) -> float:
    """Is the score larger than the margin? Wilcoxon's signed-rank test over the images that the cue was put into."""
    gain = weight * (rows[:, 2] - rows[:, 3]) - margin if len(rows) else np.zeros(0)
    if len(gain) < FEW or not gain.any():
        return 1.0
    return float(stats.wilcoxon(gain, alternative="greater").pvalue)


def test_sources(rows: np.ndarray, cluster: int, design: dict[str, Any]) -> float:
    """Do the images with the cue give more than the class's other images? Mann and Whitney's test, by source image."""
    source = {pair[0]: (pair[2], pair[4]) for pair in design["pairs"] if pair[1] == cluster}
    sides = []
    for column, side in ((2, 0), (3, 1)):
        gains: dict[int, list[float]] = {}
        for row in rows:
            gain = row[column] - row[1]
            if np.isfinite(gain):
                gains.setdefault(source[int(row[0])][side], []).append(gain)
        sides.append([float(np.mean(some)) for some in gains.values()])
    if len(sides[0]) < 2 or len(sides[1]) < 2:
        return 1.0
    return float(stats.mannwhitneyu(*sides, alternative="greater").pvalue)


def test_specific(again: int, mine: int, elsewhere: int, others: int) -> float:
    """Is it in more images of the class than of others? Fisher's test; an image of the class counts if it lies within
    the radius of the other images' centre, so that it does not vouch for itself."""
    if not others or not mine:
        return 1.0
    table = [[min(again, mine), max(0, mine - again)], [elsewhere, others - elsewhere]]
    return float(stats.fisher_exact(table, alternative="greater").pvalue)


def stands_out(scores: Series, place: int) -> float:
    """Does its score lie beyond what the other clusters' lead one to expect? Student's t for one more of their kind."""
    rest = np.delete(scores, place)
    rest = rest[np.isfinite(rest)]
    if not np.isfinite(scores[place]):
        return 1.0
    if len(rest) < MANY - 1:
        return 0.0  # too few to ask: the other tests decide
    low, high = np.quantile(rest, (0.25, 0.75))
    rest = np.clip(rest, low - 3 * (high - low), high + 3 * (high - low))  # a cue may be in several clusters
    spread = float(rest.std(ddof=1)) * (1 + 1 / len(rest)) ** 0.5
    return float(stats.t.sf((scores[place] - rest.mean()) / max(spread, 1e-12), len(rest) - 1))


def frame_rows(model: str, ranked: Sequence[Judged], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each cluster, as a table for programs."""
    rows = []
    for one in ranked:
        told = one.told
        kept = {key: told[key] for key in ("cluster", "class", "label", "images", "parts", "stability", "persistence")}
        tests = {f"p_{name.replace(' ', '_')}": value for name, value in one.tests.items()}
        rows.append(
            {
                "model": model,
                **kept,
                "rank": one.rank,
                "alarm": one.alarm,
                "p": one.p,
                "p_corrected": min(1.0, one.p * len(ranked)),
                **{name: (value if np.isfinite(value) else None) for name, value in one.values.items()},
                **tests,
                "image_names": [names[number] for number in told["members"]],
                "image_shares": list(told["shares"]),
                "places": [list(places) for places in told["places"]],
            }
        )
    return rows
