"""Ablations: a grid of layers and heads, bars with intervals, and predicted against true changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitreous.errors import InputError
from vitreous.plot.colour import LINES, SIGNED
from vitreous.plot.curves import frame
from vitreous.plot.sheet import GREY, HEAD, INK, LABEL, PALE, QUIET, SMALL, Sheet

LEFT, ABOVE, UNDER, RIGHT = 0.75, 0.66, 0.55, 0.3  # inches, as all lengths
CELL = 0.42
BAR_PITCH = 0.34
CHART = 3.0
NAMED = 6  # points of the scatter figure that have their name
NUMBERED = 480  # cells at most that show their number


class Part(NamedTuple):
    """One part: the mean change and its interval."""

    name: str
    mean: float
    low: float
    high: float


def grid_figure(mean: Float[np.ndarray, "P"], parts: Sequence[int], title: str, unit: str) -> Figure:
    """The heads of each layer in a row, the first layer below; blue is a loss."""
    if not len(mean):
        raise InputError("there is no part to draw")
    layers, widest = len(parts), max(parts)
    grid = np.full((layers, widest), np.nan)
    start = 0
    for layer, count in enumerate(parts):
        grid[layer, :count] = mean[start : start + count]
        start += count
    wide, high = widest * CELL, layers * CELL * 0.62
    width = max(LEFT + wide + RIGHT, 4.4)
    sheet = Sheet(width, ABOVE + high + UNDER)
    sheet.text(title, 0.1, 0.17, width - 0.2, HEAD)
    sheet.text(f"{unit}; blue: a loss, orange: a gain", 0.1, 0.37, width - 0.2, QUIET)
    most = float(np.nanmax(np.abs(grid))) if np.isfinite(grid).any() else 1.0
    axes = placed(sheet, wide, high)
    axes.imshow(grid, cmap=SIGNED, vmin=-(most or 1), vmax=most or 1, aspect="auto", origin="lower")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks(range(widest))
    axes.set_yticks(range(layers))
    axes.tick_params(colors=GREY, labelsize=LABEL.size, length=0)
    if grid.size <= NUMBERED:
        for (layer, head), value in np.ndenumerate(grid):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 * most else INK
                words = f"{value:.2g}".replace("-", "−") if abs(value) < 99.5 else f"{value:.0f}".replace("-", "−")
                axes.text(head, layer, words, ha="center", va="center", color=ink, fontsize=6)
    sheet.text("layer", LEFT - 0.1, ABOVE - 0.1, LEFT, SMALL, "right")
    sheet.text("head", LEFT + wide / 2, sheet.height - 0.15, wide, QUIET, "center")
    return sheet.figure


def placed(sheet: Sheet, wide: float, high: float) -> Axes:
    width, height = sheet.width, sheet.height
    return sheet.figure.add_axes((LEFT / width, UNDER / height, wide / width, high / height))


def inside(axes: Axes) -> None:
    """No tick beyond the ends of an axis."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        axis.set_ticks([tick for tick in axis.get_majorticklocs() if low <= tick <= high])


def bars_figure(
    names: Sequence[str],
    mean: Float[np.ndarray, "P"],
    ends: Float[np.ndarray, "2 P"],
    title: str,
    unit: str,
    one: str,
) -> Figure:
    """One bar for each MLP or layer, with its interval."""
    if not len(mean):
        raise InputError("there is no part to draw")
    wide = max(3.2, BAR_PITCH * len(names))
    sheet = Sheet(LEFT + wide + RIGHT, ABOVE + CHART + UNDER)
    sheet.text(title, 0.1, 0.17, sheet.width - 0.2, HEAD)
    sheet.text(f"{unit}, mean and 95 % interval", 0.1, 0.37, sheet.width - 0.2, QUIET)
    axes = placed(sheet, wide, CHART)
    frame(axes)
    x = np.arange(len(names))
    axes.bar(x, mean, width=0.7, color=[LINES[0] if value < 0 else LINES[4] for value in mean], alpha=0.85, zorder=2)
    known = np.isfinite(ends).all(0)
    axes.vlines(x[known], ends[0][known], ends[1][known], color=INK, linewidth=1.0, zorder=3)
    axes.axhline(0, color=GREY, linewidth=0.7, zorder=1)
    axes.set_xlim(-0.6, len(names) - 0.4)
    inside(axes)
    axes.set_xticks(x)
    axes.set_xticklabels(names)
    sheet.text(one, LEFT + wide / 2, sheet.height - 0.15, wide, QUIET, "center")
    return sheet.figure


def scatter_figure(
    names: Sequence[str],
    predicted: Float[np.ndarray, "P"],
    true: Float[np.ndarray, "P"],
    ends: Float[np.ndarray, "2 P"],
    unit: str,
    said: str,
) -> Figure:
    """A point for each part: predicted to the right, true upwards with its interval; the line is exact."""
    if not len(true):
        raise InputError("there is no part to draw")
    wide = 3.6
    sheet = Sheet(LEFT + wide + RIGHT, ABOVE + wide + UNDER)
    sheet.text("Predicted and true", 0.1, 0.17, sheet.width - 0.2, HEAD)
    sheet.text(f"{unit}; {said}", 0.1, 0.37, sheet.width - 0.2, QUIET)
    axes = placed(sheet, wide, wide)
    frame(axes)
    axes.grid(axis="x", color=PALE, linewidth=0.4, alpha=0.6)
    known = np.isfinite(ends).all(0)
    axes.vlines(predicted[known], ends[0][known], ends[1][known], color=LINES[0], alpha=0.35, linewidth=0.8, zorder=2)
    axes.scatter(predicted, true, s=14, color=LINES[0], zorder=3)
    low, high = float(min(predicted.min(), true.min(), 0)), float(max(predicted.max(), true.max(), 0))
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    inside(axes)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.6g}".replace("-", "−", 1))
    for i in np.argsort(-np.abs(true))[:NAMED]:
        axes.annotate(names[i], (predicted[i], true[i]), (4, 3), textcoords="offset points", fontsize=6, color=GREY)
    sheet.text("predicted", LEFT + wide / 2, sheet.height - 0.15, wide, QUIET, "center")
    sheet.text("true", LEFT - 0.1, ABOVE - 0.1, LEFT, SMALL, "right")
    return sheet.figure
