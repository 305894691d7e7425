"""The size of cdam on tokens of little, some and much attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from vitreous._support.words import finite
from vitreous.errors import InputError
from vitreous.plot.colour import line_colour
from vitreous.plot.curves import frame, spread
from vitreous.plot.pairs import EDGE, TITLE
from vitreous.plot.sheet import GREY, HEAD, LABEL, QUIET, SMALL, Sheet, Style

MARKS = (0, 1, 5, 20, 50, 100)  # per cent, on a scale of square roots


@dataclass(frozen=True)
class Bin:
    """Tokens of similar attention, and the size of cdam on them; all relative to the largest in their image."""

    low: float
    high: float
    tokens: int
    images: int
    mean: float
    most: float  # 95 of 100 are below
    large: float  # share of tokens with 5 % or more

    @property
    def name(self) -> str:
        low, high = (f"{100 * end:g}" for end in (self.low, self.high))
        return f"< {high} %" if not self.low else f"> {low} %" if self.high >= 1 else f"{low}–{high} %"

    @property
    def numbers(self) -> dict[str, float | int | None]:
        """As JSON can hold it."""
        return {
            "from": self.low,
            "to": self.high,
            "tokens": self.tokens,
            "images": self.images,
            "mean": finite(self.mean),
            "percentile_95": finite(self.most),
            "share_5_percent": finite(self.large),
        }


def percent(value: float) -> str:
    """0.63, 5.1, 51, 100."""
    return f"{100 * value:.0f}" if value >= 0.1 else f"{100 * value:.2g}"


def attention_figure(rows: Sequence[Bin], average: float, nothing: float) -> Figure:
    """The mean and the 95th percentile of |cdam| on tokens of little to much attention, on a scale of square roots."""
    if not any(row.tokens for row in rows):
        raise InputError("there is no token to draw")
    width, left, right, above, tall, under = 6.5, 0.88, 1.42, TITLE + 0.06, 2.6, 0.92
    sheet = Sheet(width, above + tall + under)
    wide = width - left - right
    sheet.text("cdam where attention is small", EDGE, 0.19, width - 2 * EDGE, HEAD)
    sheet.text("|cdam|, % of the largest in its image, on a square-root scale", EDGE, 0.4, width - 2 * EDGE, QUIET)
    axes = sheet.figure.add_axes((left / width, under / sheet.height, wide / width, tall / sheet.height))
    frame(axes)
    top = 1.08 * max(row.most for row in rows if row.tokens)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylim(0, math.sqrt(top))
    axes.set_xticks([])
    marks = [mark for mark in MARKS if mark <= 100 * top]
    axes.set_yticks([math.sqrt(mark / 100) for mark in marks], [""] * len(marks))
    for mark in marks:
        sheet.text(f"{mark}", left - 0.06, above + tall * (1 - math.sqrt(mark / 100 / top)), left, QUIET, "right")
    for level, dashes in ((average, "-"), (nothing, (0, (3, 2)))):
        axes.axhline(math.sqrt(level), color=GREY, linewidth=0.8, linestyle=dashes, zorder=1)
    for i, row in enumerate(rows):
        if row.tokens:
            draw_bin(axes, i, row)
    draw_counts(sheet, rows, left, above + tall, wide / len(rows))
    name_levels(sheet, rows, average, nothing, left + wide + 0.08, lambda v: above + tall * (1 - math.sqrt(v / top)))
    return sheet.figure


def draw_bin(axes: Axes, at: int, row: Bin) -> None:
    """A dot at the mean, with its number, and a line up to the 95th percentile."""
    colour, mean, most = line_colour("cdam"), math.sqrt(row.mean), math.sqrt(row.most)
    axes.plot([at, at], [mean, most], color=colour, linewidth=1.4, alpha=0.45, solid_capstyle="butt", zorder=2)
    axes.plot([at], [mean], "o", color=colour, markersize=6, zorder=3, clip_on=False)
    axes.plot([at], [most], "_", color=colour, markersize=11, markeredgewidth=1.4, zorder=3, clip_on=False)
    said = axes.text(at + 0.11, mean, percent(row.mean), color=colour, va="center_baseline", zorder=4)
    said.set_fontproperties(LABEL.font)
    said.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def draw_counts(sheet: Sheet, rows: Sequence[Bin], left: float, y: float, step: float) -> None:
    """Under each place: how much attention, how many tokens, and how many of them have a cdam that counts."""
    for i, row in enumerate(rows):
        x = left + (i + 0.5) * step
        sheet.text(row.name, x, y + 0.13, step, LABEL, "center")
        sheet.text(f"{row.tokens:,}", x, y + 0.3, step, SMALL, "center")
        sheet.text(f"{percent(row.large)} %" if row.tokens else "–", x, y + 0.45, step, SMALL, "center")
    sheet.text("tokens", left - 0.06, y + 0.3, left, SMALL, "right")
    sheet.text("with ≥ 5 %", left - 0.06, y + 0.45, left, SMALL, "right")
    said = "attention, relative to the largest in the image"
    sheet.text(said, left + len(rows) * step / 2, y + 0.7, len(rows) * step, QUIET, "center")


def name_levels(
    sheet: Sheet, rows: Sequence[Bin], average: float, nothing: float, x: float, height: Callable[[float], float]
) -> None:
    """At the right: which mark is the mean, which the 95th percentile, and what the two lines are."""
    last, own = max((row for row in rows if row.tokens), key=lambda row: row.low), line_colour("cdam")
    named = [
        (height(last.most), "95th percentile", own),
        (height(last.mean), "mean", own),
        (height(average), f"mean of all {percent(average)} %", GREY),
        (height(nothing), f"{100 * nothing:g} %", GREY),
    ]
    named.sort(key=lambda one: one[0])
    for (_, words, colour), y in zip(named, spread([y for y, _, _ in named], 0.15, 0.0, height(0.0))):
        sheet.text(words, x, y, sheet.width - x - 0.04, Style(LABEL.size, colour))
