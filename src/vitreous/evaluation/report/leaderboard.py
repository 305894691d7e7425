"""A leaderboard as one page: the table, curves, examples, what failed, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from vitreous._support.arrays import plain
from vitreous._support.statistics import FEW, LEVEL, Summary
from vitreous._support.templates import render
from vitreous.evaluation.report.page import HOME, data_uri, inline_svg, shade, whole_page
from vitreous.evaluation.results import describes
from vitreous.plot.colour import is_control, is_level, limits, line_colour
from vitreous.plot.curves import curves_figure
from vitreous.plot.overlay import overlay
from vitreous.plot.panel import changed_options
from vitreous.plot.sheet import compact

if TYPE_CHECKING:
    from vitreous.attribution import Attribution
    from vitreous.evaluation.results import Board, Example

WIDE, HIGH = 96, 18  # pixels of an interval
SIGNS = {1: ("▲", "better", "better than random"), -1: ("▼", "worse", "worse than random"), 0: ("", "unclear", "")}
SHARE = "share of the patches"


def page(board: Board, summary: Summary) -> str:
    """The whole page; it works offline."""
    title = f"{board.about.name}: which method to believe"
    return whole_page("leaderboard.html.j2", title=title, making=making(board), **shown(board, summary))


def body(board: Board, summary: Summary) -> Markup:
    """Everything but how it was made, for the page of a study."""
    return render(HOME, "leaderboard_body.html.j2", **shown(board, summary))


def shown(board: Board, summary: Summary) -> dict[str, Any]:
    """The values of the template."""
    done = int(board.done.sum())
    about = [board.about.name, board.data.source, f"{done} image{'' if done == 1 else 's'}"]
    if board.accuracy is not None:
        about.append(f"the model is right on {board.accuracy:.0%} of the labelled ones")
    metrics = [
        {"name": name, "better": better, "summary": board.plan.metrics[name].declared.summary}
        for name, better in zip(summary.metrics, summary.better)
    ]
    return {
        "about": about,
        "conclusion": conclusion(summary),
        "notes": board.notes(),
        "level": f"{LEVEL:.0%}",
        "control": summary.control,
        "aside": [name for name, one in board.plan.metrics.items() if describes(one.declared)],
        "twins": [summary.metrics[k] for k in board.plan.twins],
        "metrics": metrics,
        "rows": [row(board, summary, m) for m in summary.order],
        "curves": curves(board),
        **examples(board, summary),
        "failures": board.failures(),
    }


def conclusion(summary: Summary) -> str:
    """The table in a sentence or two."""
    judged = [k for k, counts in enumerate(summary.judged) if counts]
    real = [m for m in summary.order if not is_control(summary.methods[m]) and np.isfinite(summary.mean_rank[m])]
    if not real:
        return "No method could be measured."
    if summary.pairs[:, judged].max() < FEW:
        return f"{summary.pairs[:, judged].max()} image(s) are too few to tell methods from {summary.control}."
    best = summary.methods[real[0]]
    sure = [m for m in real if all(summary.effect[m, k] == 1 for k in judged if summary.pairs[m, k])]
    none = [m for m in real if not any(summary.effect[m, k] == 1 for k in judged)]
    said = f"{best} has the best mean rank ({summary.mean_rank[real[0]]:.1f}). "
    said += f"{len(sure)} of {len(real)} methods are better than {summary.control} on every metric that counts"
    if none:
        said += f"; not better on any: {', '.join(summary.methods[m] for m in none)}"
    return f"{said}."


# ---------------------------------------------------------------------------------------------------------- the table


def row(board: Board, summary: Summary, m: int) -> dict[str, Any]:
    """A method: what it costs, its rank, and each metric with its interval on the metric's own scale."""
    name, rank = summary.methods[m], summary.mean_rank[m]
    cost, why = board.costs().get(name), board.refused.get((name, ""))
    return {
        "name": name,
        "is_control": is_control(name),
        "colour": shade(line_colour(name)),
        "verdict": summary.verdict(m) if why is None else f"could not be measured: {why}",
        "rank": "–" if np.isnan(rank) else f"{rank:.1f}",
        "cost": None if cost is None else f"{cost.ratio:.1f}",
        "seconds": None if cost is None else compact(cost.seconds),
        "cells": [cell(summary, m, k) for k in range(len(summary.metrics))],
    }


def cell(summary: Summary, m: int, k: int) -> dict[str, Any] | None:
    """The mean, its interval, and whether it beats the control; None without a value."""
    mean, low, high, count = (table[m, k] for table in (summary.mean, summary.low, summary.high, summary.count))
    if np.isnan(mean):
        return None

    def number(value: float) -> str:
        return summary.spell(float(value), k)

    told = f"{number(mean)}" + ("" if np.isnan(low) else f" [{number(low)}, {number(high)}]") + f", {count} images"
    if summary.methods[m] != summary.control and summary.pairs[m, k] > 1:
        ends = f"[{number(summary.gain_low[m, k])}, {number(summary.gain_high[m, k])}]"
        told += f"; better than {summary.control} by {number(summary.gain[m, k])} {ends}, {summary.pairs[m, k]} pairs"
    most = int(summary.count[m].max())
    mark, kind, words = SIGNS[int(summary.effect[m, k])]
    return {
        "told": told,
        "value": number(mean),
        "mark": mark,
        "kind": kind,
        "words": words,
        "missing": f"{count} of {most}" if count < most else "",
        "bar": bar(summary, m, k),
    }


def bar(summary: Summary, m: int, k: int) -> dict[str, Any]:
    """Mean and interval between the least and the largest of the column; the control as a thin line."""
    ends = np.concatenate([summary.low[:, k], summary.high[:, k], summary.mean[:, k]])
    least, most = float(np.nanmin(ends)), float(np.nanmax(ends))

    def x(value: float) -> float:
        return 4 + (WIDE - 8) * ((value - least) / (most - least) if most > least else 0.5)

    low, high = float(summary.low[m, k]), float(summary.high[m, k])
    control = float(summary.mean[summary.methods.index(summary.control), k])
    return {
        "wide": WIDE,
        "high": HIGH,
        "colour": shade(line_colour(summary.methods[m])),
        "mean": f"{x(float(summary.mean[m, k])):.1f}",
        "control": f"{x(control):.1f}" if np.isfinite(control) else None,
        "low": f"{x(low):.1f}" if np.isfinite(low) else None,
        "width": f"{max(1.0, x(high) - x(low)):.1f}",
    }


# ----------------------------------------------------------------------------------------------- curves and examples


def curves(board: Board) -> list[dict[str, Any]]:
    """The mean curves of every metric that has some."""
    drawn = []
    for metric, asked in board.plan.metrics.items():
        if lines := board.mean_curves(metric):
            places = [place for one in lines.values() for place in one.at]
            across = SHARE if 0 <= min(places) and max(places) <= 1 else ""
            better = asked.declared.direction(asked.values)
            figure = curves_figure(lines, metric, better=better, across=across, up="mean of all images")
            drawn.append({"drawn": inline_svg(figure, f"curves of {metric}"), "summary": asked.declared.summary})
    return drawn


def examples(board: Board, summary: Summary) -> dict[str, Any]:
    """A few images × methods, in the order of the table."""
    chosen = [board.examples[n] for n in sorted(board.examples) if board.examples[n].maps]
    names = [summary.methods[m] for m in summary.order]
    names = [name for name in names if any(name in one.maps for one in chosen)]
    options = [next(changed_options(one.maps[name]) for one in chosen if name in one.maps) for name in names]
    return {"example_methods": list(zip(names, options)), "examples": [example(one, names) for one in chosen if names]}


def example(one: Example, names: Iterable[str]) -> dict[str, Any]:
    maps = [drawn_map(one, name) if name in one.maps else None for name in names]
    return {"photo": data_uri(one.photo), "name": one.name, "target": one.target, "maps": maps}


def drawn_map(one: Example, name: str) -> dict[str, str]:
    """A map on its image, and what it shows in words."""
    map = one.maps[name]
    values = map.map[0].numpy()
    ends = limits(values, map.signed, is_level(map.method))
    drawn = overlay(values, one.photo, map.signed, limits=ends, control=is_control(name))
    return {"drawn": data_uri(drawn), "said": f"{name}, {in_words(map)}"}


def in_words(attribution: Attribution) -> str:
    """`highest at the upper left: 0.42`."""
    map = attribution.map[0].numpy()
    if not np.isfinite(map).any():
        return "no number in this map"
    y, x = np.unravel_index(int(np.nanargmax(np.where(np.isfinite(map), map, -np.inf))), map.shape)
    rows, columns = ("upper", "middle", "lower"), ("left", "centre", "right")
    where = f"{rows[int(3 * y // map.shape[0])]} {columns[int(3 * x // map.shape[1])]}"
    return f"highest at the {where}: {compact(float(map[y, x]))}"


def making(board: Board) -> list[str]:
    """Every setting, line by line."""
    about, plan = board.about, board.plan
    return [
        f"model    {about.name} on {about.device}, {about.size[0]}×{about.size[1]}",
        f"data     {board.data.source}: {len(board.data)} images, {int(board.done.sum())} measured",
        f"target   {plan.target if plan.target is not None else 'the label where it is known, else top-1'}",
        f"seed     {plan.seed}",
        *(f"method   {name} {json.dumps(plain(asked.values))}" for name, asked in plan.methods.items()),
        *(f"metric   {name} {json.dumps(plain(asked.values))}" for name, asked in plan.metrics.items()),
    ]
