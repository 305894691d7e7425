"""Mean curves of methods in one chart: each line named at its end, its interval a light band, controls in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitreous.errors import InputError
from vitreous.plot.colour import is_control, line_colour
from vitreous.plot.sheet import GREY, HEAD, LABEL, PALE, QUIET, Sheet
from vitreous.registry import Better

WIDTH, LEFT, NAMES = 6.2, 0.72, 1.75  # inches: the sheet, the numbers at its left, the names at the right
LEAST_HEIGHT, ABOVE, UNDER = 2.3, 0.62, 0.5
LINE = 0.15  # one name
DASHES = ("-", (0, (5, 1.6)), (0, (1.5, 1.4)), (0, (6, 1.5, 1.5, 1.5)))
BAND = 0.16  # how much of a band is seen where it is the only one
TOGETHER = 0.25  # of the chart's height: nearer ends cannot be told apart


@dataclass(frozen=True, eq=False)
class Curve:
    """One method's mean curve with its interval."""

    at: Sequence[float]
    mean: Float[np.ndarray, "T"]
    low: Float[np.ndarray, "T"]
    high: Float[np.ndarray, "T"]


def curves_figure(
    curves: Mapping[str, Curve], title: str, *, better: Better, across: str = "", up: str = "mean score"
) -> Figure:
    """The curves of one metric, by method; `across` and `up` say what the axes are."""
    if not curves:
        raise InputError("there is no curve to draw")
    height = max(LEAST_HEIGHT, LINE * (len(curves) + 1))
    sheet = Sheet(WIDTH, ABOVE + height + UNDER)
    sheet.text(title, 0.1, 0.17, WIDTH - 0.2, HEAD)
    sheet.text(f"{up}, {better} is better", 0.1, 0.38, WIDTH - 0.2, QUIET)
    wide = WIDTH - LEFT - NAMES
    place = (LEFT / WIDTH, UNDER / sheet.height, wide / WIDTH, height / sheet.height)
    axes = sheet.figure.add_axes(place)
    frame(axes)
    styles, faint = dashes(list(curves)), BAND / (1 + len(curves) / 8)
    for name, curve in sorted(curves.items(), key=lambda item: not is_control(item[0])):  # controls lie underneath
        colour = line_colour(name)
        axes.fill_between(curve.at, curve.low, curve.high, color=colour, alpha=faint, linewidth=0)
        axes.plot(curve.at, curve.mean, color=colour, linestyle=styles[name], linewidth=1.4)
    axes.set_xlim(min(c.at[0] for c in curves.values()), max(c.at[-1] for c in curves.values()))
    name_lines(sheet, axes, curves, styles, height)
    sheet.text(across, LEFT + wide / 2, sheet.height - 0.12, wide, QUIET, "center")
    return sheet.figure


def frame(axes: Axes) -> None:
    """Two quiet axes and a few pale lines."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(PALE)
    axes.tick_params(colors=GREY, labelsize=LABEL.size, length=0, pad=4)
    axes.grid(axis="y", color=PALE, linewidth=0.4, alpha=0.6)
    axes.locator_params(nbins=5)
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:.6g}".replace("-", "−", 1) if value < 0 else f"{value:.6g}"
    )
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontfamily(LABEL.font.get_family())


def dashes(names: Sequence[str]) -> dict[str, object]:
    """A line pattern for each, so that two of one colour can be told apart."""
    used: dict[str, int] = {}
    found: dict[str, object] = {}
    for name in sorted(names, key=lambda one: (one != "random", one)):
        number = used.get(line_colour(name), 0)
        used[line_colour(name)] = number + 1
        found[name] = DASHES[number % len(DASHES)]
    return found


def name_lines(
    sheet: Sheet, axes: Axes, curves: Mapping[str, Curve], styles: Mapping[str, object], height: float
) -> None:
    """Names at the right: beside the ends of their lines, or by height on the whole where all lines end together."""
    low, high = axes.get_ylim()
    ends = {name: last(curve.mean) for name, curve in curves.items()}
    apart = max(ends.values()) - min(ends.values()) > TOGETHER * (high - low)
    level = ends if apart else {name: float(np.nanmean(curve.mean)) for name, curve in curves.items()}
    names = sorted(level, key=lambda name: -level[name])
    wanted = [ABOVE + height * (1 - (level[name] - low) / (high - low)) for name in names]
    x = WIDTH - NAMES
    for name, start, y in zip(names, wanted, spread(wanted, LINE, ABOVE, ABOVE + height)):
        colour = line_colour(name)
        if apart:
            sheet.axes.plot([x + 0.03, x + 0.17], [start, y], color=colour, linewidth=0.6, alpha=0.7)
        sheet.axes.plot([x + 0.17, x + 0.42], [y, y], color=colour, linestyle=styles[name], linewidth=1.4)
        sheet.text(name, x + 0.47, y, NAMES - 0.5, QUIET if is_control(name) else LABEL)


def last(mean: np.ndarray) -> float:
    known = mean[np.isfinite(mean)]
    return float(known[-1]) if known.size else 0.0


def spread(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Rising places near the wanted ones, at least `apart` from their neighbours: pushed down, then back up."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, low, places[-1] + apart if places else low))
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], places[i + 1] - apart if i + 1 < len(places) else high)
    return places
