"""Figures for papers and notebooks: photos, maps with their legends, and where they came from.

A figure is one sheet measured in inches from the upper left corner; every piece is put at its place, so nothing moves
when a label is long: it is shortened to the room it has. Nothing here touches pyplot or any other global state.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from PIL import Image

from vitreous.attribution import FIGURES, Attribution
from vitreous.errors import InputError, OptionError
from vitreous.plot import colour
from vitreous.plot.overlay import bare, overlay, paint
from vitreous.registry import METHODS

Align = Literal["left", "center", "right"]

DPI = 200
FONT = "DejaVu Sans"  # comes with matplotlib, so a figure is the same everywhere
INK, GREY, PALE, BAR = "#1A1C1F", "#5F6570", "#B4B9C2", "#DCE1E8"

MARGIN = 0.25  # inches, as everything below
GAP = 0.2  # between columns
LINE = 0.17  # one line of text
HEADS = 0.42  # a column's name and its options
LEGEND = 0.26  # the strip and its numbers; a signed map's words need one line more
WORDS = 0.13
STRIP = 0.055
FOOTER = 0.26
BELOW = 0.14  # under a panel with its legend
BETWEEN = 0.14  # between wrapped lines of panels, besides
AREA = 3.6  # of a panel, in square inches, whatever its shape
LEAST_COLUMN = 1.5
LEAST_WIDTH = 3.6  # of a sheet
ROW_HEAD = 1.15
LEFT = 1.65  # the best classes need this width
BEST_ROW = 0.2  # one of the best classes
ACROSS = 5  # methods side by side
MOST = 16  # images in one figure
BEST = 5  # classes shown


@dataclass(frozen=True)
class Style:
    """How a line of text looks."""

    size: float  # points
    ink: str = INK
    bold: bool = False

    @cached_property
    def font(self) -> FontProperties:
        return FontProperties(family=FONT, size=self.size, weight="bold" if self.bold else "normal")


HEAD, BODY, LABEL = Style(10.0, bold=True), Style(9.0), Style(8.0)
QUIET, SMALL = Style(8.0, GREY), Style(7.5, GREY)


class Sheet:
    """Paper of a size, with a ruler."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
        self.figure.set_layout_engine("none")
        self.renderer = FigureCanvasAgg(self.figure).get_renderer()  # type: ignore[no-untyped-call]
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)

    def image(self, picture: Image.Image | np.ndarray, x: float, y: float, width: float, height: float) -> None:
        where = (x, x + width, y + height, y)
        pixels = np.asarray(picture)
        self.axes.imshow(pixels, extent=where, aspect="auto", origin="upper", interpolation="antialiased", zorder=2)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="none"))

    def text(self, words: str, x: float, y: float, room: float, style: Style = BODY, align: Align = "left") -> None:
        """One line, its middle at `y`, shortened to `room` inches."""
        words = self.shorten(printable(words, style), room, style)
        if words:
            drawn = self.axes.text(x, y, words, color=style.ink, ha=align, va="center_baseline", zorder=3)
            drawn.set_fontproperties(style.font)
            drawn.set_parse_math(False)  # a label may hold a dollar sign
            drawn.set_usetex(False)

    def measure(self, words: str, style: Style = BODY) -> float:
        """Inches from the first letter to the last."""
        return float(self.renderer.get_text_width_height_descent(words, style.font, False)[0]) / DPI

    def shorten(self, words: str, room: float, style: Style = BODY) -> str:
        """The words, or as much of them as fits with an ellipsis."""
        if self.measure(words, style) <= room:
            return words
        fits, fails = 0, len(words)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            short = self.measure(words[:middle].rstrip() + "…", style) <= room
            fits, fails = (middle, fails) if short else (fits, middle)
        return words[:fits].rstrip() + "…"

    def wrap(self, words: str, room: float) -> list[str]:
        """Lines of whole words."""
        lines = [""]
        for word in words.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and self.measure(longer) > room:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines


@cache
def drawable(letter: str, style: Style) -> bool:
    return get_font(findfont(style.font)).get_char_index(ord(letter)) != 0


def printable(words: str, style: Style = BODY) -> str:
    """One line, with a box for each letter the font does not have."""
    return "".join(letter if drawable(letter, style) else "□" for letter in " ".join(words.split()))


def compact(number: float) -> str:
    """0.0042, 1.3e-05, −12, 340."""
    text = f"{number:.2g}" if abs(number) < 100 or abs(number) >= 1e5 else f"{number:.0f}"
    return "0" if number == 0 else text.replace("-", "−", 1) if number < 0 else text


def changed_options(attribution: Attribution) -> str:
    """The options that differ from their defaults; all of them where the method is not known here."""
    known = attribution.method in METHODS
    fields: Mapping[str, Any] = METHODS[attribution.method].options.model_fields if known else {}
    defaults = {name: settled(field.default) for name, field in fields.items()}
    values = {name: settled(value) for name, value in attribution.options.items()}
    return ", ".join(f"{k}={spell(v)}" for k, v in values.items() if k not in defaults or defaults[k] != v)


def settled(value: Any) -> Any:
    """JSON knows no tuples: (3, 4) comes back from a file as [3, 4]."""
    return tuple(settled(v) for v in value) if isinstance(value, list | tuple) else value


def spell(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(spell(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Panel:
    """One map, coloured, with the numbers its colours stand for."""

    photo: Image.Image | None
    picture: Image.Image
    ends: tuple[float, float]
    span: tuple[float, float] | None  # smallest and largest value; None: no number at all
    signed: bool
    control: bool

    @classmethod
    def of(cls, attribution: Attribution, index: int, photo: Image.Image | None, cells: bool) -> Panel:
        """The map over its photo, or alone where there is none."""
        map = attribution.map[index].detach().float().cpu().numpy()
        signed, control = attribution.signed, colour.is_control(attribution.method)
        ends = colour.limits(map, signed)
        if photo is None:
            picture = bare(map, signed, cells=cells, limits=ends, control=control)
        else:
            picture = overlay(map, photo, signed, cells=cells, limits=ends, control=control)
        numbers = map[np.isfinite(map)]
        span = (float(numbers.min()), float(numbers.max())) if numbers.size else None
        return cls(photo, picture, ends, span, signed, control)

    def draw(self, sheet: Sheet, x: float, y: float, width: float, height: float, column: float) -> None:
        """The picture, and under it the legend."""
        framed(sheet, self.picture, x, y, width, height)
        y += height + 0.06
        ramp = paint(np.linspace(0, 1, 256), self.signed, self.control)
        sheet.image(ramp[None].astype(np.uint8), x, y, column, STRIP)
        self.numbers(sheet, x, y + STRIP + 0.09, column)

    def numbers(self, sheet: Sheet, x: float, y: float, room: float) -> None:
        """What the ends of the strip mean; "≥" where the map goes beyond them."""
        if self.span is None or self.span == (0, 0):
            said = "no number in this map" if self.span is None else "0 everywhere"
            sheet.text(said, x, y, room, SMALL)
            return
        (low, high), (least, most) = self.ends, self.span
        margin = 0.05 * (high - low)
        left = ("≤ " if least < low - margin else "") + compact(low)
        right = ("≥ " if most > high + margin else "") + compact(high)
        sheet.text(left, x, y, room / 2, SMALL)
        sheet.text(right, x + room, y, room / 2, SMALL, "right")
        if self.signed:
            if room - sheet.measure(left, SMALL) - sheet.measure(right, SMALL) > 0.5:
                sheet.text("0", x + room / 2, y, room, SMALL, "center")
            sheet.text("against", x, y + WORDS, room / 2, SMALL)
            sheet.text("evidence", x + room, y + WORDS, room / 2, SMALL, "right")


def framed(sheet: Sheet, picture: Image.Image, x: float, y: float, width: float, height: float) -> None:
    """A picture with a hairline around it, fitted into the room from the upper left."""
    scale = min(width / picture.width, height / picture.height)
    width, height = picture.width * scale, picture.height * scale
    line = 0.004
    sheet.box(x - line, y - line, width + 2 * line, height + 2 * line, PALE)
    sheet.image(picture, x, y, width, height)


def shape(picture: Image.Image, area: float = AREA) -> tuple[float, float]:
    """Width and height of a panel for pictures of this shape."""
    aspect = min(4.0, max(0.25, picture.width / picture.height))
    return (area * aspect) ** 0.5, (area / aspect) ** 0.5


def footer(sheet: Sheet, attribution: Attribution, image: str) -> None:
    """Model, image, version; long names lose letters in the middle."""
    parts = [printable(attribution.model), printable(image), f"vitreous {attribution.version}"]
    room = sheet.width - 2 * MARGIN
    while sheet.measure(" · ".join(parts), SMALL) > room and max(map(len, parts[:2])) > 8:
        longest = 0 if len(parts[0]) >= len(parts[1]) else 1
        letters = parts[longest].replace("…", "")
        half = len(letters) // 2
        parts[longest] = f"{letters[:half]}…{letters[half + 1 :]}"
    sheet.text(" · ".join(parts), MARGIN, sheet.height - MARGIN, room, SMALL)


def legend_height(signed: bool) -> float:
    return LEGEND + (WORDS if signed else 0)


def attribution_figure(attribution: Attribution, *, cells: bool = False) -> Figure:
    """One method: each image's photo and map, or the map alone where the photos are not known."""
    count = len(attribution)
    if count == 0:
        raise InputError("this attribution holds no map, so there is nothing to draw")
    shown = min(count, MOST)
    across = 1 if shown == 1 else 2 if shown <= 4 else 3 if shown <= 9 else 4
    views = attribution.views
    panels = [Panel.of(attribution, i, views[i] if views else None, cells) for i in range(shown)]
    width, height = shape(panels[0].picture, 5.5 if shown == 1 else AREA if shown <= 4 else 2.6)
    column = max(width, LEAST_COLUMN)
    before = width + 0.08 if views else 0.0
    label = LINE + 0.06 if count > 1 else 0.0
    step = label + height + legend_height(attribution.signed) + BELOW
    lines = -(-shown // across)
    more = LINE if count > shown else 0.0
    sheet = Sheet(
        max(LEAST_WIDTH, 2 * MARGIN + across * (before + column) + (across - 1) * 1.5 * GAP),
        MARGIN + HEADS + lines * step + more + FOOTER + MARGIN / 2,
    )
    heading(sheet, attribution, MARGIN, MARGIN, sheet.width - 2 * MARGIN, target=True)
    for i, panel in enumerate(panels):
        x = MARGIN + (i % across) * (before + column + 1.5 * GAP)
        y = MARGIN + HEADS + (i // across) * step
        if label:
            sheet.text(image_label(attribution, i), x, y + LINE / 2, before + column, LABEL)
        if panel.photo is not None:
            framed(sheet, panel.photo, x, y + label, width, height)
        panel.draw(sheet, x + before, y + label, width, height, column)
    if more:
        sheet.text(f"… and {count - shown} more", MARGIN, MARGIN + HEADS + lines * step + LINE / 2, 3.0, QUIET)
    footer(sheet, attribution, attribution.names[0] if count == 1 else f"{count} images")
    return sheet.figure


def image_label(attribution: Attribution, index: int) -> str:
    """The image's name, and its target where each image has its own."""
    name, each = attribution.names[index], (attribution.target or "").split(";")
    return f"{name} · target {each[index]}" if len(each) == len(attribution) > 1 else name


def heading(sheet: Sheet, attribution: Attribution, x: float, y: float, room: float, *, target: bool = False) -> None:
    """The method's name, under it what was asked of it."""
    told = [changed_options(attribution)]
    if target and attribution.target and ";" not in attribution.target:
        told.insert(0, f"target {attribution.target}")
    sheet.text(attribution.method, x, y + 0.07, room, HEAD)
    sheet.text(" · ".join(t for t in told if t), x, y + 0.25, room, QUIET)


@dataclass(frozen=True)
class Matrix:
    """Where everything stands in a figure of targets × methods, which wraps after a few methods."""

    rows: int
    columns: int
    panel: tuple[float, float]
    photo: tuple[float, float]  # (0, 0): there is none
    best: int  # classes to show: beside the photo where there is one row, else under it
    titled: bool  # are there row heads?
    legend: float

    @property
    def beside(self) -> bool:
        return self.rows == 1

    @property
    def left(self) -> float:
        """Width of the photo's column."""
        under = self.best and not self.beside
        return max(self.photo[0], LEFT) if under or self.photo[0] else 0.0

    @property
    def heads(self) -> float:
        """Width of the row heads."""
        return LEFT if self.beside and self.best else ROW_HEAD if self.titled else 0.0

    @property
    def head_lines(self) -> int:
        """How many lines a row head may have."""
        return 2 if self.beside and self.best else 4

    @property
    def place_of_best(self) -> tuple[float, float, float]:
        """Left, upper edge and width of the best classes."""
        if self.beside:
            return self.head, MARGIN + HEADS + (self.head_lines * LINE + 0.1 if self.titled else 0), self.heads
        return MARGIN, MARGIN + HEADS + (self.photo[1] + 0.12 if self.photo[1] else 0), self.left

    @property
    def lines(self) -> int:
        return -(-self.columns // ACROSS)

    @property
    def across(self) -> int:
        """Methods in a line, as even as can be: eight are four and four."""
        return -(-self.columns // self.lines)

    @property
    def column(self) -> float:
        return max(self.panel[0], LEAST_COLUMN)

    @property
    def row(self) -> float:
        return self.panel[1] + self.legend + BELOW

    @property
    def line(self) -> float:
        """Height of one line of methods: their heads and a row for each target."""
        return HEADS + self.rows * self.row + BETWEEN

    @property
    def start(self) -> float:
        """Where the first method's column begins."""
        return self.head + (self.heads + GAP if self.heads else 0)

    @property
    def head(self) -> float:
        return MARGIN + (self.left + 1.5 * GAP if self.left else 0)

    @property
    def width(self) -> float:
        return max(LEAST_WIDTH, self.start + self.across * (self.column + GAP) - GAP + MARGIN)

    @property
    def height(self) -> float:
        """Of everything but the margins and the footer."""
        best = self.place_of_best[1] - MARGIN + self.best * BEST_ROW + BELOW
        return max(self.lines * self.line - BETWEEN, HEADS + self.photo[1] + BELOW, best if self.best else 0)

    def x(self, column: int) -> float:
        return self.start + column % self.across * (self.column + GAP)

    def y(self, column: int, row: int = 0) -> float:
        """The upper edge of a panel; its column's head stands above the first row."""
        return MARGIN + column // self.across * self.line + HEADS + row * self.row


def explanation_figure(
    attributions: Sequence[Sequence[Attribution | None]],
    *,
    photo: Image.Image | None = None,
    top: Sequence[tuple[str, float]] = (),
    rows: Sequence[str] = (),
    cells: bool = False,
) -> Figure:
    """One image: a row for each target, a column for each method; None where a method does not depend on the target.

    `photo` stands at the left, by default what the model saw; maps without views of their own are drawn on it. `top`:
    the model's best classes. `rows`: the row heads.
    """
    columns = [c for c in zip_longest(*attributions) if any(a is not None for a in c)]
    heads = [next(a for a in c if a is not None) for c in columns]
    if not heads:
        raise InputError("there is no attribution to draw")
    seen: dict[Any, Image.Image] = {}
    panels = [[None if a is None else Panel.of(a, 0, view(a, photo, seen), cells) for a in c] for c in columns]
    first = next(p for p in panels[0] if p is not None)
    shown, best = photo or first.photo, top[:BEST]
    matrix = Matrix(
        rows=len(attributions),
        columns=len(columns),
        panel=shape(first.picture),
        photo=shape(shown) if shown else (0.0, 0.0),
        best=len(best),
        titled=any(rows),
        legend=legend_height(any(h.signed for h in heads)),
    )
    sheet = Sheet(matrix.width, MARGIN + matrix.height + FOOTER + MARGIN / 2)
    if shown:
        sheet.text(heads[0].names[0], MARGIN, MARGIN + 0.07, matrix.left)
        framed(sheet, shown, MARGIN, MARGIN + HEADS, *matrix.photo)
    draw_best(sheet, best, *matrix.place_of_best)
    draw_row_heads(sheet, matrix, rows)
    for c, column in enumerate(panels):
        heading(sheet, heads[c], matrix.x(c), matrix.y(c) - HEADS, matrix.column)
        draw_column(sheet, matrix, c, column)
    footer(sheet, heads[0], heads[0].names[0])
    return sheet.figure


def draw_column(sheet: Sheet, matrix: Matrix, c: int, panels: Sequence[Panel | None]) -> None:
    """One method's maps; a remark in place of a map that would be the first row's again."""
    for r, panel in enumerate(panels):
        x, y = matrix.x(c), matrix.y(c, r)
        if panel is not None:
            panel.draw(sheet, x, y, *matrix.panel, matrix.column)
        elif panels[0] is not None:
            sheet.text("same for every target", x, y + 0.08, matrix.column, SMALL)


def view(attribution: Attribution, photo: Image.Image | None, seen: dict[Any, Image.Image]) -> Image.Image | None:
    """What to draw the map on; a picture that many maps share is read and cropped once."""
    views = attribution.views
    if views is None:
        return photo
    if not isinstance(views.sources, list | tuple):  # a tensor: cheap, and each look at it makes a new object
        return views[0]
    source = views.sources[0]
    key = source if isinstance(source, str | Path) else id(source), id(views.preprocess)
    if key not in seen:
        seen[key] = views[0]
    return seen[key]


def draw_best(sheet: Sheet, best: Sequence[tuple[str, float]], x: float, y: float, width: float) -> None:
    """The model's best classes: a bar behind each label."""
    for i, (label, probability) in enumerate(best):
        above, thick = y + i * BEST_ROW, BEST_ROW - 0.03
        sheet.box(x, above, width * min(1.0, max(0.0, probability)), thick, BAR)
        said = f"{probability:.2f}" if probability >= 0.005 else "<0.01"
        sheet.text(label, x + 0.04, above + thick / 2, width - 0.48, LABEL)
        sheet.text(said, x + width, above + thick / 2, 0.4, QUIET, "right")


def draw_row_heads(sheet: Sheet, matrix: Matrix, rows: Sequence[str]) -> None:
    """The targets, at the left of each line of panels; a long label loses words before the last, the probability."""
    for line in range(matrix.lines if matrix.titled else 0):
        above = matrix.y(line * matrix.across)
        sheet.text("target", matrix.head, above - HEADS + 0.25, matrix.heads, QUIET)
        for r, words in enumerate(rows[: matrix.rows]):
            lines = sheet.wrap(printable(words), matrix.heads)
            while len(lines) > matrix.head_lines:
                *kept, _, last = [w for w in " ".join(lines).split() if w != "…"]
                lines = sheet.wrap(" ".join([*kept, "…", last]), matrix.heads)
            for i, said in enumerate(lines):
                sheet.text(said, matrix.head, above + r * matrix.row + 0.08 + i * LINE, matrix.heads)


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    return rendered(figure, "png")


def rendered(figure: Figure, kind: str) -> bytes:
    """The whole sheet, whatever the user's matplotlib settings say about saving."""
    buffer = io.BytesIO()
    whole = figure.bbox_inches
    figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches=whole, transparent=False)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> None:
    """Write the file in one step: it is there whole, or not at all."""
    path = Path(path)
    if path.suffix.lower() not in FIGURES:
        raise OptionError(f"{path}: cannot draw a {path.suffix or 'file without ending'}; use {', '.join(FIGURES)}")
    data = rendered(figure, path.suffix.lower().removeprefix("."))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem[:40]}.{uuid.uuid4().hex[:12]}.part")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
