"""Methods against each other: scatter of their scores, and correlations as numbers on colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure

from vitreous._support.words import number
from vitreous.errors import InputError
from vitreous.plot.colour import SIGNED, is_control, line_colour
from vitreous.plot.sheet import BAR, BODY, GREY, HEAD, INK, LABEL, PALE, QUIET, SMALL, Align, Sheet, Style, printable

MOST_PAIRED = 8  # methods whose pairs can be read
EDGE = 0.16  # around everything; inches, as all lengths below
TITLE = 0.62  # the title and a line under it
CELL, WHOLE, LEAST_CELL = 1.5, 8.4, 1.02  # one pair, all of them, and the least that can be read
GAP = 0.07
TICKS = 0.24  # the numbers at the left and below
STEPS = 56  # of a density, from end to end
LEAST_WIDTH = 5.2  # a title needs this
LONGEST = 1.7  # a method's name
LEGEND = 0.42
CROWD = LinearSegmentedColormap.from_list("crowd", ["#D9DEE8", "#7C8AA5", "#2B3852", "#0E1420"])  # few to many tokens
LARGE, MIDDLE = Style(14.0, bold=True), Style(11.0, bold=True)


def fill(r: float) -> str:
    return to_hex(SIGNED(0.5 + r / 2)) if math.isfinite(r) else "#F4F5F7"


def ink(r: float) -> str:
    """Readable on the fill."""
    red, green, blue = (int(fill(r)[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#FFFFFF"


# --------------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Grid:
    """Where the pairs stand."""

    methods: int

    @property
    def cell(self) -> float:
        return min(CELL, max(LEAST_CELL, WHOLE / self.methods))

    @property
    def wide(self) -> float:
        return self.methods * (self.cell + GAP) - GAP

    @property
    def width(self) -> float:
        return max(LEAST_WIDTH, self.wide + TICKS + 2 * EDGE)

    @property
    def left(self) -> float:
        return EDGE + TICKS + (self.width - self.wide - TICKS - 2 * EDGE) / 2

    def at(self, row: int, column: int) -> tuple[float, float]:
        return self.left + column * (self.cell + GAP), TITLE + row * (self.cell + GAP)


def pairs_figure(
    methods: Sequence[str],
    tokens: Float[np.ndarray, "M T"],
    signed: Sequence[bool],
    within: Float[np.ndarray, "M M"],
    pooled: Float[np.ndarray, "M M"],
    sparsity: Float[np.ndarray, "M"],
    published: Mapping[frozenset[str], float],
) -> Figure:
    """`tokens` on the scale −1…1; where `signed` is false, zero stands at the edge."""
    count = len(methods)
    if not 2 <= count <= MOST_PAIRED:
        raise InputError(f"{count} methods: pairs can be drawn of 2 to {MOST_PAIRED}")
    grid = Grid(count)
    sheet = Sheet(grid.width, TITLE + grid.wide + TICKS + EDGE)
    room = sheet.width - 2 * EDGE
    sheet.text("Scores of methods against each other", EDGE, 0.19, room, HEAD)
    said = "tokens by score ÷ the image's largest |score| · above the diagonal: Pearson r"
    sheet.text(said, EDGE, 0.4, room, QUIET)
    for row in range(count):
        for column in range(count):
            x, y = grid.at(row, column)
            if row > column:
                draw_crowd(sheet, tokens[[column, row]], (signed[column], signed[row]), x, y, grid.cell)
            elif row < column:
                pair = frozenset((methods[row], methods[column]))
                draw_r(sheet, within[row, column], pooled[row, column], published.get(pair), x, y, grid.cell)
            else:
                draw_method(sheet, methods[row], tokens[row], signed[row], sparsity[row], x, y, grid.cell)
    draw_ticks(sheet, grid, signed)
    return sheet.figure


def span(signed: bool) -> tuple[float, float]:
    return (-1.0 if signed else 0.0), 1.0


def draw_crowd(
    sheet: Sheet, tokens: Float[np.ndarray, "2 T"], signed: tuple[bool, bool], x: float, y: float, cell: float
) -> None:
    """How many tokens have which two scores: darker is more, on a log scale; pale lines through zero."""
    outline(sheet, x, y, cell)
    both = tokens[:, np.isfinite(tokens).all(0)]
    crowd, _, _ = np.histogram2d(both[0], both[1], bins=STEPS, range=[span(signed[0]), span(signed[1])])
    if not crowd.any():
        sheet.text("no token", x + cell / 2, y + cell / 2, cell, SMALL, "center")
        return
    if signed[0]:
        sheet.axes.plot([x + cell / 2] * 2, [y, y + cell], color=PALE, linewidth=0.5, zorder=1)
    if signed[1]:
        sheet.axes.plot([x, x + cell], [y + cell / 2] * 2, color=PALE, linewidth=0.5, zorder=1)
    depth = np.log1p(crowd.T[::-1]) / np.log1p(crowd.max())
    seen = CROWD(depth)
    seen[depth == 0] = (1, 1, 1, 0)
    sheet.image(seen, x, y, cell, cell)


def outline(sheet: Sheet, x: float, y: float, cell: float) -> None:
    corners = [x, x + cell, x + cell, x, x], [y, y, y + cell, y + cell, y]
    sheet.axes.plot(*corners, color=PALE, linewidth=0.5, zorder=1)


def draw_r(
    sheet: Sheet, within: float, pooled: float, published: float | None, x: float, y: float, cell: float
) -> None:
    """The r within an image large, that over all tokens under it, on the colour of the first."""
    sheet.box(x, y, cell, cell, fill(within))
    colour, middle = ink(within), x + cell / 2
    lines = [(number(within), LARGE, 0.27), ("within an image", SMALL, 0.43)]
    lines += [(number(pooled), MIDDLE, 0.61), ("all tokens", SMALL, 0.74)]
    if published is not None:
        lines.append((f"published {number(published)}", SMALL, 0.91))
    shift = 0.0 if published is not None else 0.05
    for words, style, height in lines:
        sheet.text(words, middle, y + (height + shift) * cell, cell, Style(style.size, colour, style.bold), "center")


def draw_method(
    sheet: Sheet,
    name: str,
    tokens: Float[np.ndarray, "T"],
    signed: bool,
    sparsity: float,
    x: float,
    y: float,
    cell: float,
) -> None:
    """Its name, its sparsity, and how often which score comes, on a log scale."""
    sheet.box(x, y, cell, cell, "#F4F5F7")
    style = Style(BODY.size, GREY if is_control(name) else INK, bold=True)
    lines = [name] if sheet.measure(printable(name), style) <= cell - 0.1 else halves(name)
    for i, part in enumerate(lines):
        sheet.text(part, x + 0.05, y + 0.12 + 0.15 * i, cell - 0.07, style)
    under = 0.14 + 0.15 * len(lines)
    sheet.text(f"sparsity {number(sparsity)}", x + 0.05, y + under, cell - 0.07, SMALL)
    counts, _ = np.histogram(tokens[np.isfinite(tokens)], bins=STEPS // 2, range=span(signed))
    if not counts.any():
        sheet.text("no map", x + cell / 2, y + 0.7 * cell, cell, SMALL, "center")
        return
    most, wide = min(0.56 * cell, cell - under - 0.1), cell / len(counts)
    for i, tall in enumerate(most * np.log1p(counts) / np.log1p(counts.max())):
        sheet.box(x + i * wide, y + cell - tall, wide * 1.02, float(tall), line_colour(name))


def halves(name: str) -> list[str]:
    """A long name on two lines, broken after an underscore near its middle."""
    breaks = [i + 1 for i, letter in enumerate(name[:-1]) if letter == "_"]
    if not breaks:
        return [name]
    at = min(breaks, key=lambda place: abs(place - len(name) / 2))
    return [name[:at], name[at:]]


def draw_ticks(sheet: Sheet, grid: Grid, signed: Sequence[bool]) -> None:
    """The ends and the zero of each scale, once: at the left of the rows and under the columns."""
    for i, has_sign in enumerate(signed):
        x, y = grid.at(i, i)
        marks: list[tuple[str, float, Align]] = [("−1" if has_sign else "0", 0.0, "left"), ("1", 1.0, "right")]
        if has_sign:
            marks.append(("0", 0.5, "center"))
        for words, where, align in marks:
            inside = x + 0.02 + where * (grid.cell - 0.04)
            sheet.text(words, inside, grid.at(grid.methods, 0)[1] + 0.06, 0.3, SMALL, align)
            if i:
                up = y + (1 - where) * grid.cell + {"left": -0.06, "right": 0.06, "center": 0.0}[align]
                sheet.text(words, grid.left - 0.06, up, 0.3, SMALL, "right")


# -------------------------------------------------------------------------------------------------------------- matrix


def correlation_figure(
    methods: Sequence[str], within: Float[np.ndarray, "M M"], pooled: Float[np.ndarray, "M M"]
) -> Figure:
    """Below the diagonal the mean r within an image, above it the r over all tokens."""
    count = len(methods)
    if not count:
        raise InputError("there is no method to correlate")
    cell = 0.62 if count <= 6 else 0.52 if count <= 12 else 0.42
    style = LABEL if cell > 0.45 else SMALL
    longest = min(LONGEST, max(Sheet(1.0, 1.0).measure(printable(name, style), style) for name in methods))
    left, above = EDGE + longest + 0.1, TITLE + longest + 0.1
    sheet = Sheet(max(LEAST_WIDTH - 0.7, left + count * cell + EDGE), above + count * cell + LEGEND + EDGE)
    sheet.text("Correlation of methods", EDGE, 0.19, sheet.width - 2 * EDGE, HEAD)
    said = "Pearson r · below the diagonal: mean within an image · above: all tokens"
    sheet.text(said, EDGE, 0.4, sheet.width - 2 * EDGE, QUIET)
    for i, name in enumerate(methods):
        own = Style(style.size, GREY if is_control(name) else INK)
        sheet.text(name, left - 0.08, above + (i + 0.5) * cell, longest, own, "right")
        upright(sheet, name, left + (i + 0.5) * cell, above - 0.07, longest, own)
        for j in range(count):
            r, x, y = float(within[i, j] if i > j else pooled[i, j]), left + j * cell, above + i * cell
            sheet.box(x + 0.01, y + 0.01, cell - 0.02, cell - 0.02, BAR if i == j else fill(r))
            if i != j:
                sheet.text(number(r), x + cell / 2, y + cell / 2, cell, Style(style.size, ink(r)), "center")
    draw_scale(sheet, left, above + count * cell + 0.14)
    return sheet.figure


def upright(sheet: Sheet, words: str, x: float, y: float, room: float, style: Style) -> None:
    """One line read from below, beginning at `y`, shortened to `room` inches."""
    short = sheet.shorten(printable(words, style), room, style)
    drawn = sheet.axes.text(x, y, short, color=style.ink, ha="center", va="bottom", rotation=90, zorder=3)
    drawn.set_fontproperties(style.font)
    drawn.set_parse_math(False)
    drawn.set_usetex(False)


def draw_scale(sheet: Sheet, x: float, y: float) -> None:
    """What the colours mean."""
    ramp = SIGNED(np.linspace(0, 1, 257))[None, :, :3]
    sheet.image(ramp, x, y, 1.4, 0.1)
    marks: list[tuple[str, float, Align]] = [("−1", 0.0, "left"), ("0", 0.7, "center"), ("r = 1", 1.4, "right")]
    for words, where, align in marks:
        sheet.text(words, x + where, y + 0.2, 0.5, SMALL, align)
