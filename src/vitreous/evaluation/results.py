"""The results of a leaderboard: values of methods × metrics × images with intervals, costs, failures and files.

values [M K N]: methods, metrics, images; NaN where something could not be measured, and why
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from PIL import Image

from vitreous._support.statistics import Moments, Summary, summarise
from vitreous._support.words import finite
from vitreous.attribution import Attribution
from vitreous.images.dataset import Data
from vitreous.registry import Declared, Method, Metric
from vitreous.trace.apply import BROKEN, EMPTY

if TYPE_CHECKING:
    from vitreous.models.model import Model
    from vitreous.plot.curves import Curve

DESCRIBING = frozenset({"complexity", "discrimination", "robustness", "sanity", "shortcut"})  # cannot tell right maps
NAMED = 50  # failures that are told one by one
NO_MASK, UNTOLD = "no mask", "the metric gives no number"

D = TypeVar("D", bound=Declared)


@dataclass(frozen=True, eq=False)
class Asked(Generic[D]):
    """A method or a metric, with all its options."""

    declared: D
    values: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be measured, and how."""

    methods: dict[str, Asked[Method]]
    metrics: dict[str, Asked[Metric]]
    target: Any = None  # None: the label where it is known, else the best class
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> list[bool]:
        """Which metrics count for ranks and verdicts; of columns that differ in `of` alone, the first."""
        return [not describes(one.declared) and i not in self.twins for i, one in enumerate(self.metrics.values())]

    @property
    def twins(self) -> list[int]:
        """The columns that show a metric once more, by logit instead of probability, say."""
        shown = [
            (one.declared.name, {name: value for name, value in one.values.items() if name != "of"})
            for one in self.metrics.values()
        ]
        return [i for i, one in enumerate(shown) if one in shown[:i]]


@dataclass(frozen=True)
class About:
    """The model that was measured."""

    name: str
    fingerprint: str
    device: str
    dtype: str
    size: tuple[int, int]

    @classmethod
    def of(cls, model: Model) -> About:
        from vitreous.models.fingerprint import fingerprint

        dtype = str(model.dtype).removeprefix("torch.")
        return cls(model.name, fingerprint(model), str(model.device), dtype, model.size)


@dataclass(eq=False)
class Example:
    """One image with every method's map of it."""

    name: str
    photo: Image.Image
    target: str
    maps: dict[str, Attribution] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What a method costs per image."""

    seconds: float
    ratio: float  # to a plain forward pass, measured in the same run


def describes(one: Metric) -> bool:
    """Whether a metric only describes a map and cannot tell whether it is right."""
    return one.family in DESCRIBING


class Board:
    """The value of every method, metric and image, or the reason why there is none."""

    def __init__(self, about: About, data: Data, plan: Plan) -> None:
        self.about, self.data, self.plan = about, data, plan
        self.methods, self.metrics = list(plan.methods), list(plan.metrics)
        self.values = np.full((len(self.methods), len(self.metrics), len(data)), np.nan)
        self.seconds = np.full((len(self.methods), len(data)), np.nan)
        self.measured = np.zeros((len(self.methods), len(data)), dtype=bool)
        self.wanted = np.ones_like(self.measured)  # which methods are to measure which images
        self.targets: dict[int, str] = {}
        self.best: dict[int, int] = {}  # the model's own classes
        self.skipped: dict[int, str] = {}  # images that cannot be used
        self.lost_masks: dict[int, str] = {}
        self.refused: dict[tuple[str, str], str] = {}  # method and metric ("": any) that cannot work here
        self.reasons: dict[tuple[int, int, int], str] = {}  # method, metric and image without a value
        self.curves: dict[tuple[str, str], Moments] = {}
        self.examples: dict[int, Example] = {}
        self.forwards: list[float] = []  # seconds of plain runs, of one image

    @property
    def done(self) -> np.ndarray:
        """Which images have any value, [N]."""
        return np.asarray(self.measured.any(0))

    @property
    def finished(self) -> bool:
        """Whether every readable image has been measured, by the methods that were to measure it."""
        readable = [number for number in range(len(self.data)) if number not in self.skipped]
        return not (self.wanted & ~self.measured)[:, readable].any()

    def summary(self) -> Summary:
        """Means, intervals, ranks and verdicts of what has been measured so far."""
        asked = list(self.plan.metrics.values())
        return summarise(
            self.values[:, :, self.done],
            self.methods,
            self.metrics,
            [one.declared.direction(one.values) for one in asked],
            judged=self.plan.judged,
            seed=self.plan.seed,
        )

    def mean_curves(self, metric: str) -> dict[str, Curve]:
        """The mean curve of each method that has one for this metric."""
        from vitreous.plot.curves import Curve

        kept = {name: self.curves[name, metric] for name in self.methods if (name, metric) in self.curves}
        return {name: Curve(one.at, one.mean, *one.interval) for name, one in kept.items() if one.count.any()}

    def costs(self) -> dict[str, Cost]:
        """The cost of each method that was timed on a trace of its own: that of its quickest batch."""
        quickest = min(self.forwards, default=float("nan"))
        found: dict[str, Cost] = {}
        for name, seconds in zip(self.methods, self.seconds):
            if np.isfinite(seconds).any():
                least = float(np.nanmin(seconds))
                found[name] = Cost(least, least / quickest)
        return found

    @property
    def forward(self) -> float:
        """Seconds of a plain forward pass of one image."""
        return min(self.forwards, default=float("nan"))

    @property
    def accuracy(self) -> float | None:
        """The share of labelled images whose label is the model's best class."""
        known = [(self.data.samples[n].label, top) for n, top in self.best.items()]
        right = [label == top for label, top in known if label is not None]
        return sum(right) / len(right) if right else None

    def why(self, m: int, k: int, number: int) -> str | None:
        """Why there is no value."""
        if number in self.skipped:
            return self.skipped[number]
        method, metric = self.methods[m], self.metrics[k]
        refused = self.refused.get((method, ""), self.refused.get((method, metric)))
        return self.reasons.get((m, k, number), refused)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each measured image, method and metric; images that cannot be used come last."""
        every = range(len(self.methods))
        for number in np.flatnonzero(self.done).tolist():
            for m in every:
                yield from self.rows_of(m, [number] if self.measured[m, number] else [])
        for m in every:
            yield from self.rows_of(m, list(self.skipped))

    def rows_of(self, m: int, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The rows of one method."""
        for number in numbers:
            sample = self.data.samples[number]
            for k, metric in enumerate(self.metrics):
                yield {
                    "image": sample.name,
                    "label": sample.label,
                    "target": self.targets.get(number),
                    "method": self.methods[m],
                    "metric": metric,
                    "value": finite(self.values[m, k, number]),
                    "seconds": finite(self.seconds[m, number]),
                    "note": self.why(m, k, number),
                }

    def failures(self) -> list[str]:
        """What could not be measured, in sentences; each reason is given once."""
        said = [f"left out: {reason}" for reason in islice(self.skipped.values(), NAMED)]
        if len(self.skipped) > NAMED:
            said.append(f"left out: {len(self.skipped) - NAMED:,} images more")
        said += [f"{self.data.samples[n].name}: its mask is not used: {why}" for n, why in self.lost_masks.items()]
        said += [f"without {method}: {why}" for (method, metric), why in self.refused.items() if not metric]
        pairs: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (method, metric), why in self.refused.items():
            if metric:
                pairs[metric, why].append(method)
        said += [
            f"{metric} cannot be measured for {self._whose(names)}: {why}" for (metric, why), names in pairs.items()
        ]
        images: dict[tuple[str, str, str], list[Sequence[int]]] = defaultdict(list)
        for m, k, why, numbers in self.gaps():
            metric = "" if why in (BROKEN, EMPTY) else self.metrics[k]
            images["" if why == NO_MASK else self.methods[m], metric, why].append(numbers)
        for (method, metric, why), parts in islice(images.items(), NAMED):
            each = np.unique(np.concatenate(parts))
            more = f" and {len(each) - 1} more" if len(each) > 1 else ""
            name = self.data.samples[int(each[0])].name
            said.append(f"{', '.join(part for part in (method, metric) if part)}: {why} ({name}{more})")
        if len(images) > NAMED:
            said.append(f"{len(images) - NAMED:,} other reasons for values that are missing")
        return said

    def gaps(self) -> Iterator[tuple[int, int, str, Sequence[int]]]:
        """Method, metric, why there is no value, and the images without one."""
        return ((m, k, why, [number]) for (m, k, number), why in self.reasons.items())

    def _whose(self, names: list[str]) -> str:
        able = [name for name in self.methods if (name, "") not in self.refused]
        return "any method" if set(names) >= set(able) else ", ".join(names)

    def notes(self) -> list[str]:
        """Notes for the reader."""
        told = [*self.data.notes, *self.plan.notes]
        if not self.finished:
            said = f"{self.measured.all(0).sum()} of {len(self.data)} images are done"
            begun = int((self.done & ~self.measured.all(0)).sum())
            told.append(f"stopped early: {said}{f', {begun} are begun' if begun else ''}")
        return told
