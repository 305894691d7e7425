"""What a patch reads and who reads it, over the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vitreous._support.words import percent
from vitreous.plot.explained import Inspected
from vitreous.plot.overlay import reduced
from vitreous.plot.panel import LEGEND, MARGIN, Panel, framed, shape, sign
from vitreous.plot.sheet import BAR, BODY, GREY, HEAD, LABEL, QUIET, SMALL, Sheet

AREA, SMALL_AREA = 5.6, 1.5  # of a map, in square inches
LEAST = 1.9  # a column; inches, as all lengths below
GAP = 0.2
TITLE = 0.5
NAME = 0.24
SHARE = 0.2  # a line of the shares
FOOTER = 0.3
ACROSS = 8  # layers in a line
MARK, HALO = "white", "black"


@runtime_checkable
class Flow(Inspected, Protocol):
    """`vitreous.inspect.flow`."""

    @property
    def patch(self) -> tuple[int, int] | None: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def who(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def sizes(self) -> np.ndarray: ...
    @property
    def reads(self) -> np.ndarray: ...
    @property
    def read_by(self) -> np.ndarray: ...
    @property
    def reads_parts(self) -> np.ndarray: ...
    @property
    def read_by_parts(self) -> np.ndarray: ...
    @property
    def read_by_all(self) -> np.ndarray: ...


def patch_flow(view: Flow, *, cells: bool = False) -> Figure:
    """One layer: the image, what it reads, who reads it, and under both their shares."""
    width, height = shape(view.photo, AREA)
    column = max(width, LEAST)
    above, below = MARGIN + TITLE + NAME, 0.3 + (len(view.parts) + 1) * SHARE
    sheet = Sheet(2 * MARGIN + 3 * column + 2 * GAP, above + height + LEGEND + below + FOOTER + MARGIN / 2)
    titled(sheet, view)
    xs = [MARGIN + i * (column + GAP) for i in range(3)]
    for x, name in zip(xs, ("photo", f"what {view.who} reads", f"who reads {view.who}")):
        sheet.text(name, x, above - NAME + 0.1, column, BODY)
    framed(sheet, view.photo, xs[0], above, width, height)
    mark(sheet, view, xs[0], above, width, height)
    for x, map in zip(xs[1:], (view.reads[0], view.read_by[0])):
        Panel.unsigned(map, view.photo, cells).draw(sheet, x, above, width, height, column)
        mark(sheet, view, x, above, width, height)
    y = above + height + LEGEND + 0.2
    for i, name in enumerate(("", *view.parts)):
        said = "share of attention" if not i else f"{name} ({percent(view.sizes[i - 1])} of the tokens)"
        sheet.text(said, xs[0], y + (i + 0.5) * SHARE, column, QUIET if not i else LABEL)
    draw_shares(sheet, xs[1], y, column, view.reads_parts[0], "sums to 100%")
    told = f"{view.read_by_all[0]:.2g} × the average token"
    draw_shares(sheet, xs[2], y, column, view.read_by_parts[0], told)
    sign(sheet, view.model, view.image, view.version)
    return sheet.figure


def patch_strips(view: Flow, *, cells: bool = False) -> Figure:
    """Many layers: a strip of what it reads and a strip of who reads it, some layers a line."""
    photo, large = reduced(view.photo), shape(view.photo, 2 * SMALL_AREA)
    strips = Strips(len(view.layers), *shape(view.photo, SMALL_AREA), MARGIN + max(large[0], LEAST) + GAP)
    height = max(strips.y(strips.layers - 1, 1) + strips.row, MARGIN + TITLE + NAME + large[1] + GAP)
    sheet = Sheet(strips.right + MARGIN, height + FOOTER + MARGIN / 2)
    titled(sheet, view)
    above = MARGIN + TITLE + NAME
    sheet.text("photo", MARGIN, above - NAME + 0.1, large[0], BODY)
    framed(sheet, view.photo, MARGIN, above, *large)
    mark(sheet, view, MARGIN, above, *large)
    for i, layer in enumerate(view.layers):
        x = strips.x(i)
        for way, maps in enumerate((view.reads, view.read_by)):
            y = strips.y(i, way)
            first = "" if i % strips.across else ": read by" if way else ": reads"
            said = f"layer {layer}{first}"
            sheet.text(said, x, y - NAME + 0.12, strips.column, LABEL)
            picture = Panel.unsigned(maps[i], photo, cells).picture
            framed(sheet, picture, x, y, strips.width, strips.height)
            mark(sheet, view, x, y, strips.width, strips.height)
            sheet.text(brief(view, i, way), x, y + strips.height + 0.11, strips.column, SMALL)
    sign(sheet, view.model, view.image, view.version)
    return sheet.figure


@dataclass(frozen=True)
class Strips:
    """Where the maps stand: for each line of layers, what is read above who reads."""

    layers: int
    width: float  # of a map
    height: float
    start: float  # where the first column begins

    @property
    def across(self) -> int:
        """As even as can be: twelve are six and six."""
        lines = -(-self.layers // ACROSS)
        return -(-self.layers // lines)

    @property
    def column(self) -> float:
        return max(self.width, 1.2)

    @property
    def row(self) -> float:
        return NAME + self.height + 0.2

    @property
    def right(self) -> float:
        return self.x(self.across - 1) + self.column

    def x(self, index: int) -> float:
        return self.start + index % self.across * (self.column + GAP / 2)

    def y(self, index: int, way: int) -> float:
        """The upper edge of a map."""
        line = index // self.across
        return MARGIN + TITLE + NAME + (2 * line + way) * self.row + line * GAP


def titled(sheet: Sheet, view: Flow) -> None:
    who = view.who[0].upper() + view.who[1:]
    sheet.text(f"{who} in {view.where} of {view.origin}", MARGIN, MARGIN + 0.07, sheet.width - 2 * MARGIN, HEAD)
    told = "attention from patch to patch; each map has its own limits"
    sheet.text(told, MARGIN, MARGIN + 0.26, sheet.width - 2 * MARGIN, QUIET)


def mark(sheet: Sheet, view: Flow, x: float, y: float, width: float, height: float) -> None:
    """A frame around the patch; the read-out has no place."""
    if view.patch is None:
        return
    scale = min(width / view.photo.width, height / view.photo.height)
    (row, column), (h, w) = view.patch, view.reads.shape[1:]
    high, wide = view.photo.height * scale / h, view.photo.width * scale / w
    for ink, line in ((HALO, 2.4), (MARK, 1.2)):
        place = (x + column * wide, y + row * high)
        frame = Rectangle(place, wide, high, facecolor="none", edgecolor=ink, linewidth=line, zorder=4)
        sheet.axes.add_patch(frame)


def draw_shares(sheet: Sheet, x: float, y: float, width: float, shares: np.ndarray, told: str) -> None:
    """A bar for each part, and a line about the whole."""
    sheet.text(told, x, y + SHARE / 2, width, QUIET)
    room = width - 0.5
    for i, share in enumerate(shares, 1):
        thick = SHARE - 0.06
        sheet.box(x, y + i * SHARE + 0.03, room, thick, BAR)
        sheet.box(x, y + i * SHARE + 0.03, room * min(1.0, float(share)), thick, GREY)
        sheet.text(percent(float(share)), x + width, y + (i + 0.5) * SHARE, 0.45, LABEL, "right")


def brief(view: Flow, index: int, way: int) -> str:
    """The main number under a small map."""
    if way:
        return f"{view.read_by_all[index]:.2g} × the average"
    shares = dict(zip(view.parts, view.reads_parts[index]))
    if view.patch is None:
        return f"patches {percent(shares['patches'])}"
    return f"itself {percent(shares['itself'])}, near {percent(shares.get('neighbours', 0.0))}"
