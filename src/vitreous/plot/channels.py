"""Channels of a head: the query, the key, and what flows from where to where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vitreous.plot import colour
from vitreous.plot.explained import Inspected
from vitreous.plot.heads import COLUMN as LEFT
from vitreous.plot.heads import GAP, fitted
from vitreous.plot.overlay import bare, enlarged, overlay, paint, reduced
from vitreous.plot.panel import LEGEND, MARGIN, STRIP, framed, shape, sign
from vitreous.plot.sheet import BODY, HEAD, LABEL, QUIET, SMALL, Sheet, compact

AREA = 2.6  # of an image, in square inches
COLUMN = 1.6  # at least; inches, as all lengths below
APART = 0.14  # between columns
TITLE = 0.5
NAMES = 0.36  # above the columns
LINE = 0.17
ROW_HEAD = 0.4  # what is said of a channel, above its images
BELOW = 0.1
FOOTER = 0.3
FEW, TABLE = 4, 12  # channels in the table, at least and at most
HEADS = (
    ("query", "bright: q > 0"),
    ("key", "bright: k > 0"),
    ("flows from", "orange: to q⁺, blue: to q⁻"),
    ("flows to", "orange: from k⁺, blue: from k⁻"),
)


@runtime_checkable
class Channel(Protocol):
    """One channel of one head, measured."""

    @property
    def layer(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def channel(self) -> int: ...
    @property
    def score(self) -> float: ...
    @property
    def effect(self) -> float: ...
    @property
    def pattern(self) -> str: ...
    @property
    def reads(self) -> str: ...
    @property
    def label(self) -> str: ...


@runtime_checkable
class QK(Inspected, Protocol):
    """`vitreous.inspect.qk`."""

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def heads(self) -> tuple[int, ...]: ...
    @property
    def where(self) -> str: ...
    @property
    def centred(self) -> bool: ...
    @property
    def ranking(self) -> Sequence[Channel]: ...
    @property
    def shown(self) -> tuple[int, ...]: ...
    @property
    def q(self) -> np.ndarray: ...
    @property
    def k(self) -> np.ndarray: ...
    @property
    def leaving(self) -> np.ndarray: ...
    @property
    def arriving(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Rows:
    """Where the images stand: four for each channel, under what is said of it."""

    count: int
    width: float  # of an image
    height: float

    @property
    def column(self) -> float:
        return max(self.width, COLUMN)

    @property
    def above(self) -> float:
        return MARGIN + TITLE + NAMES

    @property
    def step(self) -> float:
        return ROW_HEAD + self.height + LEGEND + BELOW

    @property
    def right(self) -> float:
        return self.x(len(HEADS)) - APART

    def x(self, column: int) -> float:
        return MARGIN + LEFT + GAP + column * (self.column + APART)

    def y(self, row: int) -> float:
        return self.above + row * self.step


def channels_figure(view: QK, *, cells: bool = True) -> Figure:
    """The image and the first of the ranking at the left; at the right a row for each channel shown."""
    rows = Rows(len(view.shown), *shape(view.photo, AREA))
    table = rows.above + fitted(view.photo)[1] + 0.2
    fits = int((rows.y(rows.count) - table) / LINE) - 2
    listed = min(TABLE, max(FEW, fits), len(view.ranking))
    left = table + (listed + 3) * LINE
    sheet = Sheet(rows.right + MARGIN, max(left, rows.y(rows.count)) + FOOTER + MARGIN / 2)
    room = rows.right - MARGIN
    sheet.text(f"{view.where.capitalize()} of {view.origin}", MARGIN, MARGIN + 0.07, room, HEAD)
    keys = ", keys less their mean" if view.centred else ""
    told = f"queries and keys through a sigmoid{keys}; where their signs agree, information flows from key to query"
    sheet.text(told, MARGIN, MARGIN + 0.26, room, QUIET)
    for c, (name, under) in enumerate(HEADS):
        sheet.text(name, rows.x(c), rows.above - NAMES + 0.07, rows.column, BODY)
        sheet.text(under, rows.x(c), rows.above - NAMES + 0.23, rows.column + APART / 2, SMALL)
    for r, place in enumerate(view.shown):
        draw_words(sheet, view, place, rows, rows.y(r))
        draw_channel(sheet, view, place, rows, rows.y(r) + ROW_HEAD, cells)
    draw_left(sheet, view, rows.above, listed)
    sign(sheet, view.model, view.image, view.version)
    return sheet.figure


def draw_words(sheet: Sheet, view: QK, place: int, rows: Rows, y: float) -> None:
    """Which channel it is, its pattern and score, and who reads whom."""
    one, x = view.ranking[place], rows.x(0)
    name = one.label if several(view) else f"channel {one.channel}"
    rank = f"score {one.score:.2f}, number {place + 1} of {len(view.ranking)}, effect {compact(one.effect)}"
    sheet.text(f"{name}: {pattern(one)}", x, y + 0.1, rows.right - x, HEAD)
    wide = sheet.measure(f"{name}: {pattern(one)}", HEAD)
    sheet.text(rank, rows.right, y + 0.1, rows.right - x - wide - 0.1, QUIET, "right")
    sheet.text(one.reads, x, y + 0.27, rows.right - x, LABEL)


def draw_channel(sheet: Sheet, view: QK, place: int, rows: Rows, y: float, cells: bool) -> None:
    """Query and key through a sigmoid, then both ends of the flow over the image."""
    for c, values in enumerate((view.q[place], view.k[place])):
        through, end = sigmoid(values)
        drawn = bare(
            through, False, cells=cells, limits=(0.5 - end, 0.5 + end), size=enlarged(reduced(view.photo).size)
        )
        ends = compact(float(np.log((0.5 + end) / (0.5 - end))))
        draw_picture(sheet, rows, c, y, drawn, False, ends)
    for c, values in enumerate((view.leaving[place], view.arriving[place]), 2):
        limits = colour.limits(values, True)
        drawn = overlay(values, reduced(view.photo), True, cells=cells, limits=limits)
        draw_picture(sheet, rows, c, y, drawn, True, compact(limits[1]))


def draw_picture(sheet: Sheet, rows: Rows, column: int, y: float, picture: Image.Image, signed: bool, end: str) -> None:
    """An image, and under it its colours from −end over 0 to end."""
    x = rows.x(column)
    framed(sheet, picture, x, y, rows.width, rows.height)
    y += rows.height + 0.06
    ramp = paint(np.linspace(0, 1, 256), signed, False)
    sheet.image(ramp[None].astype(np.uint8), x, y, rows.column, STRIP)
    y += STRIP + 0.09
    sheet.text(f"−{end}", x, y, rows.column / 2, SMALL)
    sheet.text("0", x + rows.column / 2, y, rows.column, SMALL, "center")
    sheet.text(end, x + rows.column, y, rows.column / 2, SMALL, "right")


def sigmoid(values: np.ndarray) -> tuple[np.ndarray, float]:
    """1/(1+e⁻ˣ), and how far from ½ its colours end: less than ½, however large x is."""
    through = 1 / (1 + np.exp(-values.astype(np.float64)))
    far = colour.limits(through - 0.5, True)[1] if np.ptp(through) or through.flat[0] != 0.5 else 0.25
    return through, min(far, 0.5 - 1e-6)


def draw_left(sheet: Sheet, view: QK, y: float, listed: int) -> None:
    """The image, and under it the best channels."""
    sheet.text("photo", MARGIN, y - 0.13, LEFT, BODY)
    framed(sheet, view.photo, MARGIN, y, *fitted(view.photo))
    y += fitted(view.photo)[1] + 0.2
    sheet.text("channels that part the image best", MARGIN, y + LINE / 2, LEFT + GAP / 2, SMALL)
    middle = MARGIN + (1.0 if several(view) else 0.62)
    sheet.text("layer·head·ch." if several(view) else "channel", MARGIN, y + 1.5 * LINE, middle - MARGIN, SMALL)
    sheet.text("pattern", middle, y + 1.5 * LINE, LEFT, SMALL)
    sheet.text("score", MARGIN + LEFT, y + 1.5 * LINE, LEFT, SMALL, "right")
    for i, one in enumerate(view.ranking[:listed]):
        at = y + (i + 2.5) * LINE
        name = f"{one.layer}·{one.head}·{one.channel}" if several(view) else str(one.channel)
        sheet.text(name, MARGIN, at, middle - MARGIN, LABEL)
        sheet.text(pattern(one), middle, at, LEFT, LABEL)
        sheet.text(f"{one.score:.2f}", MARGIN + LEFT, at, LEFT, LABEL, "right")


def several(view: QK) -> bool:
    """Whether these channels belong to more than one head."""
    return len(view.layers) > 1 or len(view.heads) > 1


def pattern(one: Channel) -> str:
    return "no pattern" if one.pattern == "none" else one.pattern
