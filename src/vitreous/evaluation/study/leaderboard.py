"""`study leaderboard`: methods × metrics on a whole data set, with controls; as `vitreous evaluate`, but resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from markupsafe import Markup

from vitreous._support.statistics import Summary
from vitreous._support.words import finite
from vitreous.attribution import Attribution
from vitreous.evaluation.leaderboard import EXAMPLES, Found, forward_seconds, measure_method, share_between
from vitreous.evaluation.leaderboard import Scene as Measuring
from vitreous.evaluation.plan import Methods, make_plan
from vitreous.evaluation.results import About, Asked, Board, D, Example, Plan
from vitreous.evaluation.study.filled_board import KEYS, FilledBoard, images_of
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene, Settings
from vitreous.evaluation.study.maps import check_methods
from vitreous.images.dataset import Data
from vitreous.images.readers import from_jpeg
from vitreous.models.model import Model
from vitreous.plot.curves import curves_figure
from vitreous.registry import METHODS, METRICS, Registry

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Leaderboard(Kind):
    """Every metric of every method's map; a curve where there is one."""

    name = "leaderboard"
    summary = "Measure methods on a data set, beside controls: resumable, on one machine or many."
    shard = 16
    masked = True
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        methods: Methods | None,
        metrics: str | Sequence[str] | None,
        settings: Settings,
        data: Data,
    ) -> Leaderboard:
        plan = make_plan(methods, metrics, settings, data)
        return cls(
            {name: one.values for name, one in plan.methods.items()},
            {name: one.values for name, one in plan.metrics.items()},
        )

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return self.chosen

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return any(one.declared.others for one in self.plan.metrics.values())

    @property
    def plan(self) -> Plan:
        return Plan(
            {label: asked_as(METHODS, label, values) for label, values in self.chosen.items()},
            {label: asked_as(METRICS, label, values) for label, values in self.metrics.items()},
        )

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        values = {name: pa.float64() for name in self.metrics}
        curves = {f"{name}_curve": pa.list_(pa.float32()) for name in self.metrics}
        return {**values, **curves, "missing": pa.string()}

    def check(self, model: Model) -> list[str]:
        return check_methods(self.chosen, model)

    def work(self, scene: Scene) -> dict[str, Outcome]:
        assert scene.target is not None
        plan, own = self.plan, Measuring(scene.trace, scene.target, scene.masks, scene.timed, scene.pool, scene.numbers)
        if not scene.timed:
            share_between(scene.trace, plan, list(self.chosen))
        told = {"forward": forward_seconds(scene.trace) / len(scene.trace)} if scene.timed else {}
        return {name: self.outcome(measure_method(plan, own, name), scene, told) for name in self.chosen}

    def outcome(self, found: Found, scene: Scene, told: dict[str, Any]) -> Outcome:
        """The values, curves and reasons of a row; maps are kept for examples only."""
        count = len(scene.trace)
        made = Outcome(seconds=found.seconds * count, told=dict(told))
        reasons: list[dict[str, str]] = [{} for _ in range(count)]
        for k, metric in enumerate(self.metrics):
            made.values[metric] = finite(found.values[k])
            measured = found.curves.get(metric)
            curves = [None] * count if measured is None or measured.curve is None else list(measured.curve.numpy())
            made.values[f"{metric}_curve"] = curves
            if measured is not None and measured.at is not None:
                made.told[f"at {metric}"] = list(measured.at)
            for i in range(count):
                why = found.refused.get("", found.refused.get(metric, found.reasons.get((k, i))))
                if why is not None:
                    reasons[i][metric] = why
        made.values["missing"] = [json.dumps(each, ensure_ascii=False) if each else None for each in reasons]
        if found.made is not None:
            maps = found.made.map.cpu().numpy()
            made.parts = {i: maps[i] for i, shown in enumerate(scene.shown) if shown}
        return made

    # --------------------------------------------------------------------------------------------------- what it tells

    def findings(self, study: Rows) -> Findings:
        from vitreous.evaluation.report.leaderboard import conclusion

        boards = {asked: (board, board.summary()) for asked, board in boards_of(self, study)}
        tables, charts, told = [], [], []
        for asked, (board, summary) in boards.items():
            after = f", target {asked}" if len(boards) > 1 else ""
            tables.append(values_table(summary, f"Means with 95 % intervals{after}"))
            told += [f"{summary.methods[m]}{after}: {summary.verdict(m)}." for m in summary.order]
            told += [f"{said}." for said in board.failures()]
            charts += charts_of(board, after)
        first = next(iter(boards.values()))[1]
        numbers = {asked: means(summary) for asked, (_, summary) in boards.items()}
        return Findings(conclusion(first), told, tables, charts, numbers, partial(page_of, list(boards.values())))


def page_of(boards: Sequence[tuple[Board, Summary]]) -> Markup:
    from vitreous.evaluation.report.leaderboard import body

    return Markup("\n").join(body(board, summary) for board, summary in boards)


def asked_as(known: Registry[D], label: str, values: Mapping[str, Any]) -> Asked[D]:
    """The method or metric of a label, such as "gae start_layer=2", with all its options."""
    declared = known[label.partition(" ")[0]]
    return Asked(declared, declared.check(values))


def boards_of(kind: Leaderboard, study: Rows) -> Iterator[tuple[str, Board]]:
    """A board for each target, filled from the rows."""
    several = len(study.manifest["targets"]) > 1
    for asked in study.manifest["targets"]:
        yield asked or "label, else top-1", board_of(kind, study, asked if several else None)


def board_of(kind: Leaderboard, study: Rows, asked: str | None) -> Board:
    """The rows of one target, as a board."""
    data, labels = images_of(study)
    targets = study.manifest["targets"]
    plan = Plan(kind.plan.methods, kind.plan.metrics, asked or targets[0], study.seed)
    about = study.about
    board = FilledBoard(
        About(about["name"], about["weights"], "any device", about["dtype"], (about["size"][0], about["size"][1])),
        data,
        plan,
        labels,
    )
    at, start = study.told(), 0
    for table in study.tables([*kind.columns(), *KEYS]):
        start += board.add(table, start, asked, at)
    for name, (seconds, images) in study.seconds().items():
        board.seconds[board.methods.index(name), 0] = seconds / images
    board.forwards += [at["forward"]] if "forward" in at else []
    add_examples(board, study, asked)
    return board


def add_examples(board: Board, study: Rows, asked: str | None) -> None:
    """Add a few images with all their maps."""
    photos = {one.name: one.photo for one in study.examples()}
    chosen = {list(photos)[round(i)] for i in np.linspace(0, len(photos) - 1, min(EXAMPLES, len(photos)))}
    places = {sample.name: i for i, sample in enumerate(board.data.samples) if sample.name in chosen}
    for row, parts in study.parts():
        if row["image"] in chosen and asked in (None, row["asked"]) and parts is not None:
            place = places[row["image"]]
            known = row["class"] if row["label"] is not None and str(row["label"]) == row["target"] else None
            shown = board.examples.setdefault(
                place, Example(row["image"], from_jpeg(photos[row["image"]]), known or f"target {row['target']}")
            )
            made = board.plan.methods[row["method"]]
            shown.maps[row["method"]] = Attribution(
                torch.from_numpy(parts[None].copy()),
                made.declared.name,
                made.values,
                (row["target"],),
                board.about.name,
                made.declared.is_signed(made.values),
            )


def values_table(summary: Summary, title: str) -> Table:
    """Methods by mean rank; each mean with half its interval."""
    head = ["method", *(f"{m} {'↑' if b == 'higher' else '↓'}" for m, b in zip(summary.metrics, summary.better))]

    def cell(m: int, k: int) -> str:
        mean, half = float(summary.mean[m, k]), float(summary.high[m, k] - summary.low[m, k]) / 2
        if not np.isfinite(mean):
            return "–"
        return summary.spell(mean, k) + (f" ± {summary.spell(half, k)}" if np.isfinite(half) else "")

    rows = [[summary.methods[m], *(cell(m, k) for k in range(len(summary.metrics)))] for m in summary.order]
    return Table(title, head, rows)


def charts_of(board: Board, after: str) -> list[Chart]:
    """The mean curves of every metric that has some."""
    found = []
    for metric, asked in board.plan.metrics.items():
        if shown := board.mean_curves(metric):
            better = asked.declared.direction(asked.values)
            draw = partial(curves_figure, shown, metric, better=better, up="mean of all images")
            ending = after.replace(", target ", "-").replace(" ", "-")
            found.append(Chart(f"{metric.replace(' ', '-')}{ending}", f"{metric}{after}", asked.declared.summary, draw))
    return found


def means(summary: Summary) -> dict[str, dict[str, float | None]]:
    """The means by method and metric, for JSON."""
    return {method: dict(zip(summary.metrics, finite(summary.mean[m]))) for m, method in enumerate(summary.methods)}
