"""Which method, which layer, which options: found out on your model and your images, with evidence.

Every contender is measured by one faithfulness metric beside the random control; differences are paired by image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitreous._support.statistics import FEW, Summary, intervals
from vitreous.errors import OptionError
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import CONTROLS, configured, spelled
from vitreous.evaluation.results import Asked, Plan
from vitreous.images.dataset import Data, read_data
from vitreous.models.model import Model
from vitreous.registry import METHODS, METRICS, ConfiguredMethod, Metric
from vitreous.trace.apply import as_model


@dataclass(frozen=True)
class Contender:
    """A method with options, and what it was found to be worth."""

    name: str  # as it can be told from the others: "attention layer=8"
    method: str
    options: dict[str, Any]  # those that are not the defaults
    score: float
    low: float
    high: float
    gain: float  # how much better than random; above zero is better
    gain_low: float
    gain_high: float
    cost: float  # in plain forward passes

    @property
    def beats_random(self) -> bool:
        return bool(self.gain_low > 0)


@dataclass(frozen=True, eq=False)
class Advice:
    """All contenders, the most faithful first, and what follows from that."""

    model: str
    metric: str
    better: str
    images: int
    contenders: tuple[Contender, ...]
    random: float
    equals: tuple[str, ...]  # those that cannot be told from the best on these images
    board: Leaderboard

    @property
    def best(self) -> Contender | None:
        """The most faithful, if it is better than random."""
        first = self.contenders[0] if self.contenders else None
        return first if first is not None and first.beats_random and self.images >= FEW else None

    @property
    def cheapest(self) -> Contender | None:
        """The one that costs least among those that cannot be told from the best."""
        able = [one for one in self.contenders if one.name in self.equals]
        return min(able, key=lambda one: one.cost) if self.best is not None else None

    def layers(self, method: str) -> list[Contender]:
        """What each layer is worth to a method that looks at one."""
        of_layer = [one for one in self.contenders if one.method == method and list(one.options) == ["layer"]]
        return sorted(of_layer, key=lambda one: int(one.options["layer"]))

    def __str__(self) -> str:
        """The answer in words."""
        if self.images < FEW:
            return f"{self.images} images are too few to tell; give {FEW} or more."
        if self.best is None:
            return f"Nothing beats random maps by {self.metric} on {self.model}: trust none of them here."
        said = [
            f"Use {self.best.name}: {interval(self.best)} by {self.metric}, where random maps reach {self.random:.3f}."
        ]
        others = [name for name in self.equals if name != self.best.name]
        if others:
            said.append(f"Not distinguishable from it on these {self.images} images: {', '.join(others)}.")
        cheap = self.cheapest
        if cheap is not None and cheap.cost < 0.8 * self.best.cost:
            said.append(
                f"{cheap.name} is among them and costs {cheap.cost:.1f} forwards in place of {self.best.cost:.1f}."
            )
        for method in dict.fromkeys(one.method for one in self.contenders):
            tried = self.layers(method)
            if tried:
                top = next(one for one in self.contenders if one in tried)
                worth = "" if top.beats_random else ", not distinguishable from random"
                said.append(f"If you use {method}, take layer {top.options['layer']} ({interval(top)}{worth}).")
        return "\n".join(said)


def interval(one: Contender) -> str:
    return f"{one.score:.3f} ({one.low:.3f} … {one.high:.3f})"


def advise(
    model: Model | nn.Module | str | None,
    images: str | Path | Sequence[str | Path] | Data,
    metric: str | None = None,
    *,
    methods: Sequence[str | ConfiguredMethod] | None = None,
    target: Any = None,
    thorough: bool = False,
    seed: int = 0,
    after: Callable[[list[int]], None] | None = None,
) -> Advice:
    """Find the most faithful method, layer and options for this model on these images.

    `images`: as for the leaderboard. `metric`: a faithfulness metric, with its options as in "srg:of=logit"; None: srg,
    which takes tokens away from both ends. `methods`: only these; each name as it is and with every layer or option
    that is worth a try, and `vitreous.methods.NAME(…)` or "NAME:OPTION=VALUE" with its own options alone. `thorough`:
    also methods that cost a hundred forward passes and more.
    """
    wrapped = as_model(model)
    data = images if isinstance(images, Data) else read_data(images)
    judge, own = find_judge(metric)
    entered = {one.label: one for one in line_up(wrapped, methods, thorough)}
    asked = {name: Asked(one.method, dict(one.values)) for name, one in entered.items()}
    metrics = {judge.label(own): judged_by(judge, own, wrapped)}
    board = Leaderboard(wrapped, data, Plan(asked, metrics, target, seed))
    board.run(after)
    return conclude(board, board.summary(), entered)


def find_judge(given: str | None) -> tuple[Metric, dict[str, Any]]:
    """The metric that decides, and the options of its own."""
    name, own = spelled(given or "srg")
    judge = METRICS[name]
    if judge.family != "faithfulness":
        able = ", ".join(m.name for m in METRICS.values() if m.family == "faithfulness")
        raise OptionError(f"{judge.name} does not measure faithfulness; use one of {able}")
    return judge, own


def judged_by(judge: Metric, own: Mapping[str, Any], model: Model) -> Asked[Metric]:
    """The metric with its options: where tokens cannot be taken away, patches are hidden."""
    windows = judge.name == "srg" and model.layout.obstacle is not None
    return Asked(judge, judge.check({**({"by": "pixels"} if windows else {}), **own}))


def line_up(model: Model, given: Sequence[str | ConfiguredMethod] | None, thorough: bool) -> Iterator[ConfiguredMethod]:
    """Each method as it is, and with every layer or option that is worth a try."""
    for name in CONTROLS:
        yield METHODS[name].configured()
    for one in map(configured, given or METHODS):
        if isinstance(one, ConfiguredMethod):
            yield one
            continue
        declared = METHODS[one]
        costly = declared.alone or declared.costly
        if declared.family == "control" or (costly and not thorough and not given):
            continue
        layered = "layer" in declared.options.model_fields and not costly
        tried: list[dict[str, Any]] = [{"layer": i} for i in range(model.layout.layers)] if layered else []
        if not layered or declared.options.model_fields["layer"].default is None:  # all layers together
            tried.insert(0, {})
        yield from (declared.configured(**options) for options in (*tried, *declared.tried))


def conclude(board: Leaderboard, summary: Summary, entered: Mapping[str, ConfiguredMethod]) -> Advice:
    """From the table to an answer."""
    costs = board.costs()
    made = []
    for m, name in enumerate(summary.methods):
        if np.isnan(summary.mean[m, 0]) or name in CONTROLS:
            continue
        cost = costs[name].ratio if name in costs else float("nan")
        one = entered[name]
        score, low, high = summary.mean[m, 0], summary.low[m, 0], summary.high[m, 0]
        gain, gain_low, gain_high = summary.gain[m, 0], summary.gain_low[m, 0], summary.gain_high[m, 0]
        made.append(Contender(name, one.name, one.options, score, low, high, gain, gain_low, gain_high, cost))
    made.sort(key=lambda one: -one.gain)
    control = summary.methods.index(summary.control)
    (metric,) = summary.metrics
    return Advice(
        board.about.name,
        metric,
        summary.better[0],
        int(board.done.sum()),
        tuple(made),
        float(summary.mean[control, 0]),
        equals_of(board, [one.name for one in made], -1 if summary.better[0] == "lower" else 1),
        board,
    )


def equals_of(board: Leaderboard, ranked: list[str], sign: int) -> tuple[str, ...]:
    """The best, and all whose paired difference to it may be nothing."""
    if not ranked:
        return ()
    numbers = [board.methods.index(name) for name in ranked]
    values = sign * board.values[numbers, 0][:, board.done]
    low, _ = intervals(values[0] - values, board.plan.seed)
    return tuple(name for i, name in enumerate(ranked) if i == 0 or not low[i] > 0)
