"""Outlier tokens: where they are in an image, the attention that they take by layer, and the units behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitreous._support.words import count_of, percent
from vitreous.plot import colour
from vitreous.plot.colour import LINES
from vitreous.plot.curves import frame, spread
from vitreous.plot.explained import Inspected
from vitreous.plot.panel import LEGEND, MARGIN, Panel, framed, shape, sign
from vitreous.plot.sheet import BAR, BODY, GREY, HEAD, LABEL, PALE, QUIET, SMALL, Sheet

AREA = 4.8  # of a map, in square inches
LEAST = 1.9  # a column; inches, as all lengths below
GAP = 0.28
TITLE = 0.5
NAME = 0.24
FOOTER = 0.3
CHART = 2.3  # the width of the chart, without the numbers at its left and the names at its right
NUMBERS, NAMES = 0.42, 0.98
UNITS = 2.1  # the width of the list of units
ROW = 0.2
SHOWN = 10
MARK, HALO = "white", "black"


@runtime_checkable
class UnitLike(Protocol):
    """A hidden unit of an MLP."""

    @property
    def layer(self) -> int: ...
    @property
    def unit(self) -> int: ...
    @property
    def outliers(self) -> float: ...
    @property
    def others(self) -> float: ...


@runtime_checkable
class Registers(Inspected, Protocol):
    """`vitreous.inspect.registers`."""

    @property
    def images(self) -> tuple[str, ...]: ...
    @property
    def shown(self) -> int: ...
    @property
    def ratio(self) -> float: ...
    @property
    def layer(self) -> int: ...
    @property
    def onset(self) -> int | None: ...
    @property
    def readout(self) -> str: ...
    @property
    def ratios(self) -> np.ndarray: ...
    @property
    def outliers(self) -> np.ndarray: ...
    @property
    def affected(self) -> np.ndarray: ...
    @property
    def even_share(self) -> float: ...
    @property
    def read_share(self) -> np.ndarray: ...
    @property
    def mean_share(self) -> np.ndarray: ...
    @property
    def units(self) -> Sequence[UnitLike]: ...
    def share(self, side: np.ndarray) -> np.ndarray: ...


def outliers_figure(view: Registers, *, cells: bool = False) -> Figure:
    """The image and its norms with the outliers framed, the attention that they take, and the units."""
    width, height = shape(view.photo, AREA)
    column, tall = max(width, LEAST), max(height, 1.7)
    above = MARGIN + TITLE + NAME
    xs = [MARGIN, MARGIN + column + GAP, MARGIN + 2 * (column + GAP) + NUMBERS]
    right = xs[2] + CHART + NAMES + GAP
    sheet = Sheet(right + UNITS + MARGIN, above + tall + LEGEND + 0.2 + FOOTER + MARGIN / 2)
    titled(sheet, view)
    room = (column, column, CHART + NAMES, UNITS)
    names = ("photo", f"norms after layer {view.layer} ÷ median", "attention to outliers by layer", units_name(view))
    for x, name, wide in zip((xs[0], xs[1], xs[2] - NUMBERS, right), names, room):
        sheet.text(name, x, above - NAME + 0.1, wide, BODY)
    framed(sheet, view.photo, xs[0], above, width, height)
    map = view.ratios[view.shown, view.layer]
    ends = colour.limits(map, False, level=True)
    Panel.unsigned(map, view.photo, cells, ends).draw(sheet, xs[1], above, width, height, column)
    for x in xs[:2]:
        mark(sheet, view, x, above, width, height)
    draw_shares(sheet, view, xs[2], above, tall)
    draw_units(sheet, view.units[:SHOWN], right, above, min(ROW, (tall + LEGEND) / (SHOWN + 1)))
    sign(sheet, view.model, view.image, view.version)
    return sheet.figure


def titled(sheet: Sheet, view: Registers) -> None:
    room = sheet.width - 2 * MARGIN
    sheet.text(f"Outlier tokens of {view.origin}", MARGIN, MARGIN + 0.07, room, HEAD)
    here = int(view.outliers[view.shown].sum())
    told = f"framed: {count_of(here, 'token')} of more than {view.ratio:g} times the median norm of the patches"
    if len(view.images) > 1:
        told += f"; charts: {int(view.affected.sum())} of {len(view.images)} images have outliers"
    sheet.text(told, MARGIN, MARGIN + 0.26, room, QUIET)


def units_name(view: Registers) -> str:
    return "units behind them" if view.onset is None else f"units behind them, layers 0–{view.onset}"


def mark(sheet: Sheet, view: Registers, x: float, y: float, width: float, height: float) -> None:
    """A frame around every outlier."""
    scale = min(width / view.photo.width, height / view.photo.height)
    outliers = view.outliers[view.shown]
    high, wide = view.photo.height * scale / outliers.shape[0], view.photo.width * scale / outliers.shape[1]
    for row, column in np.argwhere(outliers):
        for ink, line in ((HALO, 2.2), (MARK, 1.0)):
            place = (x + column * wide, y + row * high)
            sheet.axes.add_patch(
                Rectangle(place, wide, high, facecolor="none", edgecolor=ink, linewidth=line, zorder=4)
            )


def draw_shares(sheet: Sheet, view: Registers, x: float, y: float, tall: float) -> None:
    """Lines named at their ends: the read-out, all tokens, and what even attention would give."""
    if not view.affected.any():
        sheet.text("no outliers", x - NUMBERS, y + 0.1, CHART, QUIET)
        return
    width, height = sheet.width, sheet.height
    axes = sheet.figure.add_axes((x / width, 1 - (y + tall) / height, CHART / width, tall / height))
    frame(axes)
    lines = [
        (view.readout, view.share(view.read_share), LINES[1]),
        ("all tokens", view.share(view.mean_share), LINES[0]),
    ]
    layers = np.arange(len(lines[0][1]))
    for _, share, fill in lines:
        axes.plot(layers, share, color=fill, linewidth=1.6)
    axes.axhline(view.even_share, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)))
    top = 1.08 * max(view.even_share, *(float(share.max()) for _, share, _ in lines))
    axes.set_ylim(0, top)
    axes.set_xlim(-0.3, len(layers) - 0.7)
    axes.set_xticks(layers[:: max(1, -(-len(layers) // 12))])
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.yaxis.set_major_formatter(lambda value, _: percent(value))
    axes.axvline(view.onset or 0, color=PALE, linewidth=0.8)
    start, early = x + CHART * ((view.onset or 0) + 0.3) / (len(layers) - 0.4), (view.onset or 0) < len(layers) / 2
    sheet.text("they appear", start + (0.05 if early else -0.05), y + 0.07, CHART, SMALL, "left" if early else "right")
    ends = [(name, float(share[-1]), fill) for name, share, fill in lines] + [("if even", view.even_share, GREY)]
    ends.sort(key=lambda one: -one[1])
    wanted = [y + tall * (1 - end / top) for _, end, _ in ends]
    for (name, _, fill), start, place in zip(ends, wanted, spread(wanted, 0.16, y, y + tall)):
        sheet.axes.plot([x + CHART + 0.02, x + CHART + 0.12], [start, place], color=fill, linewidth=0.7)
        sheet.text(name, x + CHART + 0.16, place, NAMES - 0.16, QUIET if fill == GREY else LABEL)
    sheet.text("layer", x + CHART / 2, y + tall + 0.32, CHART, QUIET, "center")


def draw_units(sheet: Sheet, units: Sequence[UnitLike], x: float, y: float, row: float) -> None:
    """A bar for each: its mean |activation| at outliers, and dark in it that at the other patches."""
    if not units:
        sheet.text("none", x, y + 0.1, UNITS, QUIET)
        return
    most, left, room = max(unit.outliers for unit in units), x + 0.66, UNITS - 1.06
    for i, unit in enumerate(units):
        middle = y + (i + 0.5) * row
        sheet.text(f"{unit.layer} / {unit.unit}", x, middle, 0.64, LABEL)
        thick = row - 0.07
        sheet.box(left, middle - thick / 2, room * unit.outliers / most, thick, BAR)
        sheet.box(left, middle - thick / 2, room * unit.others / most, thick, GREY)
        sheet.text(f"{unit.outliers:.1f}", x + UNITS, middle, 0.38, LABEL, "right")
    words = "layer / unit: |activation| at outliers"
    sheet.text(words, x, y + len(units) * row + 0.1, UNITS, SMALL)
    sheet.text("(dark: at other patches)", x, y + len(units) * row + 0.24, UNITS, SMALL)
