"""Which method, which layer, which options: found out on your model and your images, with evidence.

Every contender is measured by one faithfulness metric beside the random control; differences are paired by image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitreous._support.statistics import FEW, Summary, intervals, mean_of
from vitreous._support.words import count_of
from vitreous.errors import OptionError
from vitreous.evaluation.estimate import Estimate, estimated
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import CONTROLS, configured, spelled
from vitreous.evaluation.results import Asked, Plan
from vitreous.evaluation.stages import Searched, plan_stages, search
from vitreous.images.dataset import Data, read_data
from vitreous.models.model import Model
from vitreous.registry import METHODS, METRICS, ConfiguredMethod, Metric
from vitreous.trace.apply import as_model, of_images


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
    images: int  # on which it was measured
    dropped: int | None = None  # the stage after which it was left out, from 1; None: it was measured on all images

    @property
    def beats_random(self) -> bool:
        return bool(self.gain_low > 0)


@dataclass(frozen=True)
class Fresh:
    """The gain of the winner over random on the images that took no part in the choice of the finalists."""

    images: int
    gain: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Advice:
    """All contenders, the most faithful first, those that were left out behind them, and what follows from that."""

    model: str
    metric: str
    better: str
    images: int
    contenders: tuple[Contender, ...]
    random: float
    equals: tuple[str, ...]  # those that cannot be told from the best on these images
    board: Leaderboard
    estimate: Estimate
    fresh: Fresh | None = None  # None after an exhaustive search, which keeps no images apart

    @property
    def runs(self) -> int:
        """How often a contender or a control was measured on an image."""
        return int(self.board.measured.sum())

    @property
    def finalists(self) -> tuple[Contender, ...]:
        """The contenders that were measured on all images."""
        return tuple(one for one in self.contenders if one.dropped is None)

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
        if self.fresh is not None:
            gain = f"{self.fresh.gain:+.3f} ({self.fresh.low:+.3f} … {self.fresh.high:+.3f})"
            said.append(f"On the {self.fresh.images} images that only the finalists saw, it gains {gain} over random.")
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
                worth += "" if top.dropped is None else f", on {count_of(top.images, 'image')}"
                said.append(f"If you use {method}, take layer {top.options['layer']} ({interval(top)}{worth}).")
        if len(self.estimate.stages) > 1:
            told = ", ".join(f"{stage.contenders} on {stage.images}" for stage in self.estimate.stages)
            said.append(f"Searched in stages: {told} images; {self.runs:,} of {self.estimate.exhaustive_runs:,} runs.")
        return "\n".join(said)


def interval(one: Contender) -> str:
    return f"{one.score:.3f} ({one.low:.3f} … {one.high:.3f})" if np.isfinite(one.low) else f"{one.score:.3f}"


def advise(
    model: Model | nn.Module | str | None,
    images: str | Path | Sequence[str | Path] | Data,
    metric: str | None = None,
    *,
    methods: Sequence[str | ConfiguredMethod] | None = None,
    target: Any = None,
    thorough: bool = False,
    exhaustive: bool = False,
    seed: int = 0,
    before: Callable[[Estimate], None] | None = None,
    after: Callable[[list[int]], None] | None = None,
) -> Advice:
    """Find the most faithful method, layer and options for this model on these images.

    `images`: as for the leaderboard. `metric`: a faithfulness metric, with its options as in "srg:of=logit"; None: srg,
    which takes tokens away from both ends. `methods`: only these; each name as it is and with every layer or option
    that is worth a try, and `vitreous.methods.NAME(…)` or "NAME:OPTION=VALUE" with its own options alone. `thorough`:
    also methods that cost a hundred forward passes and more. `before`: called with the estimated cost before it starts.

    The search goes in stages, with at most a fifth of the runs of the `exhaustive` one, which measures every contender
    on every image: all contenders on a few images, the better ones on more, the last few and the controls on all. Few
    images, or few contenders, are searched exhaustively. The images are shuffled by `seed`; the same seed gives the
    same result.

    What the intervals mean: finalists are measured on all images, by the same numbers as in the exhaustive search, so
    their scores and differences are paired and complete. As there, the images that chose the winner also judge it,
    which flatters it a little; `Advice.fresh` is its gain on those images alone that had no part in the choice of the
    finalists. Contenders that were left out are listed with the images that they were measured on; their intervals are
    those of so few images, and say nothing of the others.
    """
    wrapped = of_images(as_model(model), "advise works")
    data = images if isinstance(images, Data) else read_data(images)
    judge, own = find_judge(metric)
    entered = {one.label: one for one in line_up(wrapped, methods, thorough)}
    asked = {name: Asked(one.method, dict(one.values)) for name, one in entered.items()}
    metrics = {judge.label(own): judged_by(judge, own, wrapped)}
    board = Leaderboard(wrapped, data, Plan(asked, metrics, target, seed))
    stages = plan_stages(len(entered) - len(CONTROLS), len(data), exhaustive)
    order = np.random.default_rng(seed).permutation(len(data)).tolist() if len(stages) > 1 else list(range(len(data)))
    estimate = estimated(board, stages, order, list(entered.values()))
    if before is not None:
        before(estimate)
    (judged,) = metrics.values()
    sign = -1 if judge.direction(judged.values) == "lower" else 1
    return conclude(board, entered, estimate, search(board, stages, order, sign, after), sign)


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


def conclude(
    board: Leaderboard, entered: Mapping[str, ConfiguredMethod], estimate: Estimate, searched: Searched, sign: int
) -> Advice:
    """From the table to an answer."""
    summary = board.summary()
    made = contenders_of(board, summary, entered, searched.dropped)
    control = summary.methods.index(summary.control)
    (metric,) = summary.metrics
    finalists = [one.name for one in made if one.dropped is None]
    found = Advice(
        board.about.name,
        metric,
        summary.better[0],
        int(board.done.sum()),
        tuple(made),
        float(summary.mean[control, 0]),
        equals_of(board, finalists, sign),
        board,
        estimate,
    )
    if len(estimate.stages) > 1 and finalists:
        found = replace(found, fresh=fresh_gain(board, finalists[0], searched.fresh, sign))
    return found


def contenders_of(
    board: Leaderboard, summary: Summary, entered: Mapping[str, ConfiguredMethod], dropped: Mapping[str, int]
) -> list[Contender]:
    """Those with a value, the best first; those that were left out come behind, the last ones first."""
    costs = board.costs()
    made = []
    for m, name in enumerate(summary.methods):
        if np.isnan(summary.mean[m, 0]) or name in CONTROLS:
            continue
        cost = costs[name].ratio if name in costs else float("nan")
        left = dropped[name] + 1 if name in dropped else None
        one, images = entered[name], int(summary.count[m, 0])
        score, low, high = (float(table[m, 0]) for table in (summary.mean, summary.low, summary.high))
        gain, least, most = (float(table[m, 0]) for table in (summary.gain, summary.gain_low, summary.gain_high))
        made.append(Contender(name, one.name, one.options, score, low, high, gain, least, most, cost, images, left))
    return sorted(made, key=lambda one: (-np.inf if one.dropped is None else -one.dropped, -one.gain))


def fresh_gain(board: Leaderboard, name: str, images: Sequence[int], sign: int) -> Fresh:
    """The gain over random on some images, with its interval."""
    kept = [image for image in images if image not in board.skipped]
    row, control = (board.values[board.methods.index(one), 0, kept] for one in (name, CONTROLS[0]))
    gains = sign * (row - control)
    low, high = intervals(gains[None], board.plan.seed)[:, 0]
    return Fresh(int(np.isfinite(gains).sum()), float(mean_of(gains)), float(low), float(high))


def equals_of(board: Leaderboard, ranked: list[str], sign: int) -> tuple[str, ...]:
    """The best, and all whose paired difference to it may be nothing."""
    if not ranked:
        return ()
    numbers = [board.methods.index(name) for name in ranked]
    values = sign * board.values[numbers, 0][:, board.done]
    low, _ = intervals(values[0] - values, board.plan.seed)
    return tuple(name for i, name in enumerate(ranked) if i == 0 or not low[i] > 0)
