"""The findings of an ablation: the worth of every part with intervals, a control, and how well it was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from vitreous._support.statistics import LEVEL, intervals, mean_of, pearson, resampled_means
from vitreous._support.words import finite
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.evaluation.study.kind import Rows
from vitreous.plot.ablate import Part, bars_figure, grid_figure, scatter_figure

SHOWN = 40  # rows of the table
ONES = {"heads": "head", "mlps": "MLP", "layers": "layer"}
VERBS = {"zero": "zeroed", "mean": "replaced by its mean", "resample": "replaced by that of another image"}
Series = Float[np.ndarray, "P N"]


@dataclass(frozen=True, eq=False)
class Worth:
    """The changes that every ablation makes, of each part and image; NaN where there is none."""

    names: tuple[str, ...]
    parts: tuple[int, ...]  # of each layer
    what: str
    by: str
    labelled: bool  # right by the images' labels; else the answer of the whole network
    right: Float[np.ndarray, "N"]
    unchanged: float
    changes: dict[str, Series]  # accuracy, probability, log_probability, score, and of maps
    control: dict[str, Series]
    predicted: dict[str, Series]  # score, log_probability; by one backward pass
    averaged: dict[str, Series]  # the same by the gradients half-way
    seed: int = 0

    @property
    def images(self) -> int:
        return len(self.right)

    @property
    def measured(self) -> str:
        """By what parts are ranked: the log-probability of the class; the score of a target that is none."""
        return "log_probability" if np.isfinite(self.changes["log_probability"]).any() else "score"

    def mean(self, name: str) -> Float[np.ndarray, "P"]:
        return mean_of(self.changes[name])

    def importance(self, rank: str = "true") -> Float[np.ndarray, "P"]:
        """How far the log-probability (or score) falls without each part: true, predicted, or its size."""
        if rank == "size":
            return mean_of(np.abs(self.predicted[self.measured]))
        return -mean_of((self.best if rank == "predicted" else self.changes)[self.measured])

    @property
    def best(self) -> dict[str, Series]:
        """The better prediction that was made."""
        return self.averaged if np.isfinite(self.averaged[self.measured]).any() else self.predicted

    @cached_property
    def ends(self) -> dict[str, Float[np.ndarray, "2 P"]]:
        """The 95 % interval of each mean change."""
        return {name: intervals(values, self.seed) for name, values in self.changes.items()}

    def agreement(
        self, name: str | None = None, *, averaged: bool | None = None, size: bool = False
    ) -> dict[str, Any] | None:
        """Pearson's r and Spearman's ρ of predicted and true mean changes; r with its interval over images.

        `averaged`: by gradients half-way or by first order; None: by the better that was made. `size`: of the mean
        |changes|.
        """
        name = name or self.measured
        made = self.best if averaged is None else self.averaged if averaged else self.predicted
        true, told = self.changes[name], made[name]
        if not np.isfinite(told).any() or len(true) < 3:
            return None
        true, told = (np.abs(true), np.abs(told)) if size else (true, told)
        one, other = mean_of(true), mean_of(told)
        found = {"r": float(pearson(one, other)), "rho": float(stats.spearmanr(one, other).statistic)}
        drawn = resampled_means(np.concatenate([true, told]), self.seed)
        each = pearson(drawn[:, : len(true)], drawn[:, len(true) :])
        ends = np.nanquantile(each, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)) if self.images > 1 else (np.nan, np.nan)
        return {**found, "low": float(ends[0]), "high": float(ends[1])}

    def part(self, i: int, name: str) -> Part:
        low, high = self.ends[name][:, i]
        return Part(self.names[i], float(self.mean(name)[i]), float(low), float(high))


def worth_of(kind: Any, study: Rows) -> Worth:
    """The stored rows as changes."""
    table = study.to_arrow([*kind.columns(), "label", "error"])
    table = table.filter(table["error"].is_null())
    parts = tuple(study.told().get("parts", ()))
    columns = {name: table[name].to_pylist() for name in (*kind.columns(), "label")}

    def many(name: str) -> Series:
        rows = columns[name]
        width = sum(parts)
        return np.array([[np.nan] * width if row is None else row for row in rows], np.float64).reshape(-1, width).T

    def one(name: str) -> Float[np.ndarray, "N"]:
        return np.array([np.nan if value is None else value for value in columns[name]], np.float64)

    labels, answer = one("label"), one("answer")
    named = np.isfinite(labels)
    wanted = np.where(named, labels, answer)
    known = answer >= 0

    def changes(ending: str) -> dict[str, Series]:
        log, whole = many(f"log_probability_{ending}"), one("log_probability")
        right = np.where(known, many(f"answer_{ending}") == wanted, np.nan)
        missing = np.isnan(many(f"score_{ending}"))
        return {
            "accuracy": np.where(missing, np.nan, right - np.where(known, answer == wanted, np.nan)),
            "probability": np.exp(log) - np.exp(whole),
            "log_probability": log - whole,
            "score": many(f"score_{ending}") - one("score"),
        }

    true, control = changes("without"), changes("control")
    for name in ("map_correlation", "map_distance"):
        if np.isfinite(found := many(name)).any():
            true[name] = found
    layers = [(layer, part) for layer, count in enumerate(parts) for part in range(count)]
    names = tuple(f"{layer}.{part}" if kind.what == "heads" else str(layer) for layer, part in layers)
    right = np.where(known, answer == wanted, np.nan)
    told, mean = (
        {name: many(f"{name}_{way}") for name in ("score", "log_probability")} for way in ("predicted", "averaged")
    )
    unchanged = one("unchanged")
    most = float(np.nanmax(unchanged)) if np.isfinite(unchanged).any() else float("nan")
    labelled = bool(named.any())
    return Worth(names, parts, kind.what, kind.by, labelled, right, most, true, control, told, mean, study.seed)


def ablate_findings(kind: Any, study: Rows) -> Findings:
    """The table, the figures and the sentences."""
    worth = worth_of(kind, study)
    if not worth.images or not worth.names:
        return Findings("no image could be measured")
    order = np.argsort(-np.nan_to_num(worth.importance(), nan=-np.inf), kind="stable")
    lead, told = sentences(worth, order)
    return Findings(lead, told, [table_of(worth, order)], charts_of(worth), numbers_of(worth))


def sentences(worth: Worth, order: np.ndarray) -> tuple[str, list[str]]:
    one, first = ONES[worth.what], int(order[0])
    named = "accuracy" if worth.labelled else "agreement with its own answers"
    lead = f"{one} {worth.names[first]}, {VERBS[worth.by]}, costs most: {said(worth, first)}"
    told = []
    base = mean_of(worth.right)
    if np.isfinite(base) and worth.labelled:
        told.append(f"The whole network is right on {float(base):.1%} of {worth.images} images.")
    told.append(f"Changes of {named} are by {'the labels' if worth.labelled else 'what the whole network answers'}.")
    harmless = [i for i in range(len(worth.names)) if worth.ends[worth.measured][0, i] > 0]
    if harmless:
        named_parts = ", ".join(worth.names[i] for i in harmless[:8])
        told.append(
            f"{len(harmless)} of {len(worth.names)} raise the {words(worth.measured)} when gone: {named_parts}."
        )
    what = f"with the true mean change of {words(worth.measured)}, over {len(worth.names)} {worth.what}"
    if (found := worth.agreement(averaged=False)) is not None:
        size = worth.agreement(averaged=False, size=True)
        more = "" if size is None else f"; of their sizes {agreed_words(size)}"
        told.append(f"Predicted to first order (one backward pass): {agreed_words(found)} {what}{more}.")
    if (found := worth.agreement(averaged=True)) is not None:
        told.append(
            f"Predicted by gradients half-way (one backward pass for each layer): {agreed_words(found)} {what}."
        )
    if np.isfinite(worth.control[worth.measured]).any():
        mine, other = (np.abs(mean_of(side[worth.measured])).mean() for side in (worth.changes, worth.control))
        told.append(
            f"Control: the mean |change of {words(worth.measured)}| is {mine:.3g}; "
            f"after a step of the same length in a random direction {other:.3g}."
        )
    told.append(f"A run that changes nothing moves the score by at most {worth.unchanged:.1g}.")
    return lead, told


def agreed_words(found: dict[str, Any]) -> str:
    return f"r = {found['r']:.2f} [{found['low']:.2f}, {found['high']:.2f}], Spearman {found['rho']:.2f}"


def words(name: str) -> str:
    return name.replace("_", "-") if name == "log_probability" else name.replace("_", " ")


def said(worth: Worth, i: int) -> str:
    """The change of accuracy and of the probability."""
    if worth.measured == "score":
        return f"{spelled(worth.part(i, 'score'))} of the score"
    accuracy = worth.part(i, "accuracy")
    return f"{points(accuracy)} of accuracy, {points(worth.part(i, 'probability'))} of probability"


def points(part: Part) -> str:
    """−3.1 [−4.0, −2.2] points."""
    if not np.isfinite(part.mean):
        return "–"
    ends = f" [{100 * part.low:+.1f}, {100 * part.high:+.1f}]" if np.isfinite(part.low) else ""
    return f"{100 * part.mean:+.1f}{ends}".replace("-", "−")


def spelled(part: Part) -> str:
    if not np.isfinite(part.mean):
        return "–"
    ends = f" [{part.low:+.3g}, {part.high:+.3g}]" if np.isfinite(part.low) else ""
    return f"{part.mean:+.3g}{ends}".replace("-", "−")


def table_of(worth: Worth, order: Sequence[int] | np.ndarray) -> Table:
    """The parts that cost most first."""
    logs = worth.measured == "log_probability"
    head = [ONES[worth.what], *(["accuracy, points", "probability, points"] if logs else []), words(worth.measured)]
    head += ["predicted", "random step"]
    maps = "map_correlation" in worth.changes
    head += ["map ρ", "map distance"] if maps else []
    told, control = mean_of(worth.best[worth.measured]), mean_of(worth.control[worth.measured])
    rows = []
    for i in map(int, order[:SHOWN]):
        row = [worth.names[i]]
        row += [points(worth.part(i, "accuracy")), points(worth.part(i, "probability"))] if logs else []
        row += [spelled(worth.part(i, worth.measured))]
        row += [f"{x:+.3g}".replace("-", "−") if np.isfinite(x) else "–" for x in (told[i], control[i])]
        row += (
            [spelled(worth.part(i, name)).lstrip("+") for name in ("map_correlation", "map_distance")] if maps else []
        )
        rows.append(row)
    more = f"; {len(worth.names) - SHOWN} more in findings.json" if len(worth.names) > SHOWN else ""
    title = f"What changes without each {ONES[worth.what]} ({VERBS[worth.by]}), mean and 95 % interval"
    return Table(title, head, rows, f"{worth.images} images{more}")


def charts_of(worth: Worth) -> list[Chart]:
    shown = "accuracy" if worth.measured == "log_probability" else "score"
    title = f"Change of {words(shown)} without each {ONES[worth.what]}"
    about = f"Each {ONES[worth.what]} {VERBS[worth.by]}, mean of {worth.images} images."
    found = []
    for name in dict.fromkeys((shown, worth.measured)):
        title = f"Change of {words(name)} without each {ONES[worth.what]}"
        draw = partial(figure_of, worth, name, title)
        found.append(Chart(f"{name.replace('_', '-')}-by-{ONES[worth.what].lower()}", title, about, draw))
    agreed = worth.agreement()
    if agreed is not None:
        draw = partial(
            scatter_figure,
            worth.names,
            mean_of(worth.best[worth.measured]),
            worth.mean(worth.measured),
            worth.ends[worth.measured],
            f"change of {words(worth.measured)}",
            agreed_words(agreed),
        )
        said = "A few backward passes for all parts, against a forward pass for each; a point on the line is exact."
        found.append(Chart("predicted-and-true", "Predicted and true", said, draw))
    return found


def figure_of(worth: Worth, name: str, title: str) -> Any:
    percent = name in ("accuracy", "probability")
    unit = "points" if percent else words(name)
    scale = 100.0 if percent else 1.0
    mean, ends = scale * worth.mean(name), scale * worth.ends[name]
    if worth.what == "heads":
        return grid_figure(mean, worth.parts, title, unit)
    return bars_figure(worth.names, mean, ends, title, unit, ONES[worth.what])


def numbers_of(worth: Worth) -> dict[str, Any]:
    """Everything for programs."""
    each = {}
    for i, name in enumerate(worth.names):
        row: dict[str, Any] = {}
        for key, values in worth.changes.items():
            low, high = finite(worth.ends[key][:, i])
            row[key] = {"mean": finite(mean_of(values))[i], "low": low, "high": high}
        for way, made in (("predicted", worth.predicted), ("averaged", worth.averaged)):
            row |= {f"{key}_{way}": finite(mean_of(values))[i] for key, values in made.items()}
        for key in ("accuracy", "probability", "log_probability", "score"):
            row[f"{key}_control"] = finite(mean_of(worth.control[key]))[i]
        each[name] = row
    agreed = {
        name: {
            "first_order": worth.agreement(name, averaged=False),
            "first_order_size": worth.agreement(name, averaged=False, size=True),
            "averaged": worth.agreement(name, averaged=True),
        }
        for name in ("score", "log_probability")
    }
    base = finite(np.array([mean_of(worth.right)]))[0]
    return {
        "what": worth.what,
        "by": worth.by,
        "images": worth.images,
        "accuracy": base if worth.labelled else None,
        "agreement": agreed,
        "unchanged": worth.unchanged,
        "parts": each,
    }
