"""A leaderboard as one page: the table, curves, examples, what failed, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from vitreous._support.statistics import FEW, LEVEL, Summary
from vitreous.attribution import plain
from vitreous.evaluation.report.page import data_uri, inline_svg, shade, shell, text
from vitreous.plot.colour import is_control, is_level, limits, line_colour
from vitreous.plot.curves import Curve, curves_figure
from vitreous.plot.overlay import overlay
from vitreous.plot.panel import changed_options
from vitreous.plot.sheet import compact
from vitreous.version import VERSION

if TYPE_CHECKING:
    from vitreous.attribution import Attribution
    from vitreous.evaluation.results import Board, Example

WIDE, HIGH = 96, 18  # pixels of an interval
SIGNS = {1: ("▲", "better", "better than random"), -1: ("▼", "worse", "worse than random"), 0: ("", "unclear", "")}
THUMB = 264  # pixels of an example: twice what is seen
SHARE = "share of the patches"


def page(board: Board, summary: Summary) -> str:
    """The whole page; it asks nothing of the network."""
    foot = f"<footer>vitreous {VERSION}</footer>"
    return shell(f"{board.about.name}: which method to believe", f"{body(board, summary)}\n{making(board)}\n{foot}")


def body(board: Board, summary: Summary) -> str:
    """Everything but how it was made."""
    parts = (head(board, summary), table(board, summary), curves(board), examples(board, summary), troubles(board))
    return "\n".join(part for part in parts if part)


def head(board: Board, summary: Summary) -> str:
    done = int(board.done.sum())
    told = [board.about.name, board.data.source, f"{done} image{'' if done == 1 else 's'}"]
    if board.accuracy is not None:
        told.append(f"the model is right on {board.accuracy:.0%} of the labelled ones")
    warned = "".join(f'<p class="warn">{text(note)}</p>' for note in board.notes())
    return (
        f"<header><h1>Which method to believe</h1>\n<p class=quiet>{text(' · '.join(told))}</p>\n"
        f"<p class=lead>{text(conclusion(summary))}</p>\n{warned}</header>"
    )


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


def table(board: Board, summary: Summary) -> str:
    """Methods by mean rank; every metric with its interval drawn on the metric's own scale."""
    aside = [metric for metric, judged in zip(summary.metrics, summary.judged) if not judged]
    note = (
        f"Means with {LEVEL:.0%} bootstrap intervals over images; the thin line is {summary.control}. "
        "▲ better and ▼ worse than it: the interval of the paired difference leaves zero out, each on its own. "
        "Cost: in plain forward passes of the same batch."
    )
    if aside:
        note += f" Outside ranks and verdicts, for they describe a map but cannot tell a right one: {', '.join(aside)}."
    heads = "".join(metric_head(board, summary, k) for k in range(len(summary.metrics)))
    rows = "\n".join(row(board, summary, m) for m in summary.order)
    return (
        f"<section><h2>Leaderboard</h2>\n<p class=quiet>{text(note)}</p>\n<div class=scroll tabindex=0>"
        "<table class=board><thead><tr><th scope=col>method<th scope=col class=number>mean rank"
        f"<th scope=col class=number>cost<small>× forward</small>{heads}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody></table></div></section>"
    )


def metric_head(board: Board, summary: Summary, k: int) -> str:
    metric = board.plan.metrics[summary.metrics[k]]
    return (
        f'<th scope=col title="{text(metric.declared.summary)}">{text(summary.metrics[k])}'
        f"<small>{summary.better[k]} is better</small>"
    )


def row(board: Board, summary: Summary, m: int) -> str:
    name = summary.methods[m]
    cost = board.costs().get(name)
    rank = summary.mean_rank[m]
    why = board.refused.get((name, ""))
    said = summary.verdict(m) if why is None else f"could not be measured: {why}"
    kind = " class=control" if is_control(name) else ""
    cells = "".join(f"<td>{cell(summary, m, k)}" for k in range(len(summary.metrics)))
    price = "–" if cost is None else f'<span title="{compact(cost.seconds)} s an image">{cost.ratio:.1f}</span>'
    return (
        f'<tr{kind}><td><span class=dot style="background:{shade(line_colour(name))}"></span>'
        f"<span class=name>{text(name)}</span><small>{text(said)}</small>"
        f"<td class=number>{'–' if np.isnan(rank) else f'{rank:.1f}'}<td class=number>{price}{cells}</tr>"
    )


def cell(summary: Summary, m: int, k: int) -> str:
    """The mean, its interval, and whether it beats the control."""
    mean, low, high = summary.mean[m, k], summary.low[m, k], summary.high[m, k]
    if np.isnan(mean):
        return "<span class=unclear>–</span>"
    mark, kind, words = SIGNS[int(summary.effect[m, k])]

    def number(value: float) -> str:
        return summary.spell(float(value), k)

    told = f"{number(mean)}" + ("" if np.isnan(low) else f" [{number(low)}, {number(high)}]")
    told += f", {summary.count[m, k]} images"
    if summary.methods[m] != summary.control and summary.pairs[m, k] > 1:
        ends = f"[{number(summary.gain_low[m, k])}, {number(summary.gain_high[m, k])}]"
        told += f"; better than {summary.control} by {number(summary.gain[m, k])} {ends}, {summary.pairs[m, k]} pairs"
    few = int(summary.count[m].max())
    missing = f"<small>{summary.count[m, k]} of {few}</small>" if summary.count[m, k] < few else ""
    sign = f' <span class={kind} title="{words}">{mark}</span>' if mark else ""
    return (
        f'<div class=cell title="{text(told)}">{bar(summary, m, k)}'
        f"<span class=value>{number(mean)}{sign}{missing}</span></div>"
    )


def bar(summary: Summary, m: int, k: int) -> str:
    """Mean and interval between the least and the largest of the column; the control as a thin line."""
    ends = np.concatenate([summary.low[:, k], summary.high[:, k], summary.mean[:, k]])
    least, most = float(np.nanmin(ends)), float(np.nanmax(ends))

    def x(value: float) -> float:
        return 4 + (WIDE - 8) * ((value - least) / (most - least) if most > least else 0.5)

    colour = shade(line_colour(summary.methods[m]))
    mean, low, high = summary.mean[m, k], summary.low[m, k], summary.high[m, k]
    control = summary.mean[summary.methods.index(summary.control), k]
    middle = HIGH / 2
    drawn = [f'<line x1="0" x2="{WIDE}" y1="{middle}" y2="{middle}" stroke="var(--bar)"/>']
    if np.isfinite(control):
        drawn.append(
            f'<line x1="{x(control):.1f}" x2="{x(control):.1f}" y1="1" y2="{HIGH - 1}" stroke="var(--c8a8f98)"/>'
        )
    if np.isfinite(low):
        where = f'x="{x(low):.1f}" y="{middle - 3}" width="{max(1.0, x(high) - x(low)):.1f}" height="6" rx="3"'
        drawn.append(f'<rect {where} fill="{colour}" opacity="0.35"/>')
    drawn.append(f'<circle cx="{x(mean):.1f}" cy="{middle}" r="3" fill="{colour}"/>')
    return f'<svg width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" aria-hidden="true">{"".join(drawn)}</svg>'


# ----------------------------------------------------------------------------------------------- curves and examples


def curves(board: Board) -> str:
    drawn = []
    for metric, asked in board.plan.metrics.items():
        kept = {name: board.curves[name, metric] for name in board.methods if (name, metric) in board.curves}
        shown = {name: Curve(one.at, one.mean, *one.interval) for name, one in kept.items() if one.count.any()}
        if shown:
            places = [place for one in shown.values() for place in one.at]
            across = SHARE if 0 <= min(places) and max(places) <= 1 else ""
            better = asked.declared.direction(asked.values)
            figure = curves_figure(shown, metric, better=better, across=across, up="mean of all images")
            caption = f"<figcaption>{text(asked.declared.summary)}</figcaption>"
            drawn.append(f"<figure>{inline_svg(figure, f'curves of {metric}')}{caption}</figure>")
    note = f"Lines are means over images, bands their {LEVEL:.0%} intervals; controls are grey."
    inside = "\n".join(drawn)
    return (
        f"<section><h2>Curves</h2>\n<p class=quiet>{note}</p>\n<div class=curves>{inside}</div></section>"
        if drawn
        else ""
    )


def examples(board: Board, summary: Summary) -> str:
    """A few images × methods, in the order of the table."""
    shown = [board.examples[n] for n in sorted(board.examples) if board.examples[n].maps]
    names = [summary.methods[m] for m in summary.order]
    names = [name for name in names if any(name in one.maps for one in shown)]
    if not names:
        return ""
    heads = "".join(f"<th scope=col>{text(name)}<small>{text(changed(shown, name))}</small>" for name in names)
    rows = "\n".join(example(one, names) for one in shown)
    note = "Best mean rank first. Signed maps: orange is evidence, blue speaks against; limits are each map's own."
    return (
        f"<section><h2>Examples</h2>\n<p class=quiet>{note}</p>\n<div class=scroll tabindex=0><table class=maps>"
        f"<thead><tr><th scope=col>image{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div></section>"
    )


def changed(shown: Iterable[Example], name: str) -> str:
    return next(changed_options(one.maps[name]) for one in shown if name in one.maps)


def example(one: Example, names: Iterable[str]) -> str:
    photo = f'<img src="{data_uri(one.photo)}" alt="{text(one.name)}">'
    cells = [f"<td>{photo}<small>{text(one.name)}</small><small>{text(one.target)}</small>"]
    for name in names:
        if name in one.maps:
            map = one.maps[name]
            values = map.map[0].numpy()
            ends = limits(values, map.signed, is_level(map.method))
            drawn = overlay(values, one.photo, map.signed, limits=ends, control=is_control(name))
            said = f"{name}, {in_words(map)}"
            cells.append(f'<td><img src="{data_uri(drawn)}" alt="{text(said)}" title="{text(said)}">')
        else:
            cells.append("<td class=none>no map")
    return f"<tr>{''.join(cells)}</tr>"


def in_words(attribution: Attribution) -> str:
    """`highest at the upper left: 0.42`."""
    map = attribution.map[0].numpy()
    if not np.isfinite(map).any():
        return "no number in this map"
    y, x = np.unravel_index(int(np.nanargmax(np.where(np.isfinite(map), map, -np.inf))), map.shape)
    rows, columns = ("upper", "middle", "lower"), ("left", "centre", "right")
    where = f"{rows[int(3 * y // map.shape[0])]} {columns[int(3 * x // map.shape[1])]}"
    return f"highest at the {where}: {compact(float(map[y, x]))}"


def troubles(board: Board) -> str:
    failed = board.failures()
    if not failed:
        return ""
    listed = "\n".join(f"<li>{text(said)}</li>" for said in failed)
    return f"<section><h2>What could not be measured</h2>\n<ul>{listed}</ul></section>"


def making(board: Board) -> str:
    """Every setting, and the words of the verdicts."""
    about, plan = board.about, board.plan
    lines = [
        f"model    {about.name} on {about.device}, {about.size[0]}×{about.size[1]}",
        f"data     {board.data.source}: {len(board.data)} pictures, {int(board.done.sum())} measured",
        f"target   {plan.target if plan.target is not None else 'the label where it is known, else top-1'}",
        f"seed     {plan.seed}",
        *(f"method   {name} {json.dumps(plain(asked.values))}" for name, asked in plan.methods.items()),
        *(f"metric   {name} {json.dumps(plain(asked.values))}" for name, asked in plan.metrics.items()),
    ]
    return (
        f"<section><h2>How it was made</h2>\n<pre>{text(chr(10).join(lines))}</pre>\n"
        "<p class=quiet>leaderboard.parquet: every value; leaderboard.csv: the table; leaderboard.json: all settings; "
        "curves.parquet: the mean curves.</p></section>"
    )
