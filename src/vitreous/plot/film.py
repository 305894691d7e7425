"""How the maps of the same images change while a network is trained: a row for each image, a column for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vitreous.errors import InputError
from vitreous.plot.colour import LINES
from vitreous.plot.curves import frame
from vitreous.plot.explained import Explained
from vitreous.plot.overlay import reduced, side_by_side
from vitreous.plot.panel import MARGIN, Panel, footer, framed, heading
from vitreous.plot.sheet import LABEL, QUIET, Sheet

ROWS, COLUMNS = 8, 8  # images and steps in one figure
CELL, GAP = 1.25, 0.06  # inches, as all lengths below
HEADS, FOOTER = 0.42, 0.26
STEPS = 0.22  # the line that names the steps
CHART, ABOVE, BELOW, LEFT = 1.4, 0.45, 0.35, 0.5
LEAST_WIDTH = 4.6


def film_figure(
    looks: Sequence[Explained], steps: Sequence[int], moved: Mapping[str, Sequence[tuple[int, float]]]
) -> Figure:
    """Maps at some of the steps, each in its own colour scale, and `moved`, lines of (step, value), under them."""
    if not looks:
        raise InputError("there is no map to draw")
    columns, rows = evenly(len(looks), COLUMNS), min(len(looks[0]), ROWS)
    photos = [shown(looks[0], i) for i in range(rows)]
    before = 1 if photos[0] is not None else 0
    lines = {name: line for name, line in moved.items() if len(line) > 1}
    chart = ABOVE + CHART + BELOW if lines else 0.0
    high = STEPS + rows * (CELL + GAP)
    wide = 2 * MARGIN + (before + len(columns)) * (CELL + GAP)
    sheet = Sheet(max(LEAST_WIDTH, wide), MARGIN + HEADS + high + chart + FOOTER + MARGIN / 2)
    heading(sheet, looks[0], MARGIN, MARGIN, sheet.width - 2 * MARGIN, target=True)
    top = MARGIN + HEADS
    for c, column in enumerate(columns):
        x = MARGIN + (before + c) * (CELL + GAP)
        sheet.text(f"step {steps[column]}", x, top + STEPS / 2, CELL, LABEL)
        for r in range(rows):
            panel = Panel.of(looks[column], r, photos[r], False)
            framed(sheet, panel.picture, x, top + STEPS + r * (CELL + GAP), CELL, CELL)
    for r, photo in enumerate(photos):
        if photo is not None:
            framed(sheet, photo, MARGIN, top + STEPS + r * (CELL + GAP), CELL, CELL)
    if lines:
        draw_chart(sheet, lines, top + high)
    footer(sheet, looks[0], f"{len(looks[0])} images")
    return sheet.figure


def draw_chart(sheet: Sheet, lines: Mapping[str, Sequence[tuple[int, float]]], top: float) -> None:
    """One line for each name, its name above the chart in its colour."""
    wide = sheet.width - 2 * MARGIN - LEFT
    foot = sheet.height - top - ABOVE - CHART
    axes = sheet.figure.add_axes(
        (
            (MARGIN + LEFT) / sheet.width,
            foot / sheet.height,
            wide / sheet.width,
            CHART / sheet.height,
        )
    )
    frame(axes)
    x = MARGIN + LEFT
    for (name, line), colour in zip(lines.items(), LINES):
        at, values = np.asarray(line, dtype=float).T
        axes.plot(at, values, color=colour, linewidth=1.4)
        sheet.axes.plot([x, x + 0.2], [top + 0.26, top + 0.26], color=colour, linewidth=1.4)
        sheet.text(name, x + 0.26, top + 0.26, 2.2, QUIET)
        x += 0.45 + sheet.measure(name, QUIET)
    sheet.text("step", MARGIN + LEFT + wide / 2, top + ABOVE + CHART + 0.28, wide, QUIET, "center")


def row_of_maps(look: Explained, most: int = ROWS) -> Image.Image:
    """The maps of the first images side by side, each over its image."""
    count = min(len(look), most)
    return side_by_side([Panel.of(look, i, shown(look, i), False).picture for i in range(count)])


def shown(look: Explained, index: int) -> Image.Image | None:
    """What the map is drawn on, in the size of a small panel."""
    return None if look.views is None else reduced(look.views[index])


def evenly(count: int, most: int) -> list[int]:
    """At most so many of the numbers 0 … count − 1: the first, the last and some between them."""
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).round().astype(int).tolist()
