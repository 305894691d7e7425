"""Every head of a model: where the read-out looks, how wide, and how much of it at patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure

from vitreous._support.words import percent
from vitreous.plot import colour
from vitreous.plot.explained import Inspected
from vitreous.plot.heads import COLUMN, ENDS, FOOTER, FRAME, GAP, KEY, NAME, ROW_NAME, THICK, TITLE, fitted
from vitreous.plot.overlay import bare, paint
from vitreous.plot.panel import MARGIN, STRIP, framed, shape, sign
from vitreous.plot.sheet import BAR, DPI, GREY, HEAD, LABEL, QUIET, SMALL, Sheet, compact

TALL = 8.5  # all layers together; inches, as all lengths below
LEAST, MOST = 0.5, 1.05  # from head to head, where they are square
APART = 0.1  # between heads
NUMBER = 0.15  # the line under a map
BETWEEN = 0.3  # between columns of layers
LINE = 0.15  # of the notes
SCALE = 0.45  # the colours that all heads share
LEAST_WIDTH = 5.0
FEW = 4  # layers that are never parted
NOTES = (
    ("under each map: how wide it is,", "as a share of all patches"),
    ("bar: attention to patches; what", "is missing reads other tokens"),
)


@runtime_checkable
class Heads(Inspected, Protocol):
    """`vitreous.inspect.heads`."""

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def readout(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def maps(self) -> np.ndarray: ...
    @property
    def patches(self) -> np.ndarray: ...
    @property
    def width(self) -> np.ndarray: ...
    @property
    def extremes(self) -> tuple[tuple[int, int], tuple[int, int]]: ...


@dataclass(frozen=True)
class Grid:
    """Where the heads stand: a row for each layer, in one or more columns of layers."""

    layers: int
    heads: int
    folds: int
    left: float
    above: float
    width: float  # of one
    height: float

    @property
    def rows(self) -> int:
        return -(-self.layers // self.folds)

    @property
    def step(self) -> float:
        return self.width + APART

    @property
    def row(self) -> float:
        return self.height + THICK + NUMBER + APART

    @property
    def fold(self) -> float:
        """From one column of layers to the next."""
        return self.heads * self.step - APART + BETWEEN + ROW_NAME

    @property
    def right(self) -> float:
        return self.left + self.folds * self.fold - BETWEEN - ROW_NAME

    @property
    def bottom(self) -> float:
        return self.above + self.rows * self.row

    def x(self, layer: int, head: int = 0) -> float:
        return self.left + layer // self.rows * self.fold + head * self.step

    def y(self, layer: int) -> float:
        return self.above + layer % self.rows * self.row


def head_grid(view: Heads, *, same_scale: bool = False, cells: bool = False) -> Figure:
    """The image at the left, every head's map at the right; the narrowest and the widest are framed."""
    layers, heads = view.maps.shape[:2]
    folds = max(1, round((layers / heads) ** 0.5)) if layers > FEW else 1
    pitch = min(MOST, max(LEAST, TALL / -(-layers // folds)))
    cell = shape(view.photo, (pitch - APART) ** 2)
    above = MARGIN + TITLE + 2 * KEY + 0.1
    grid = Grid(layers, heads, folds, MARGIN + COLUMN + GAP + ROW_NAME, above + NAME, *cell)
    ends = colour.limits(view.maps, False) if same_scale else None
    left = NAME + fitted(view.photo)[1] + 0.15 + 3 * len(NOTES) * LINE + (SCALE if ends else 0)
    sheet = Sheet(max(LEAST_WIDTH, grid.right + MARGIN), max(grid.bottom, above + left + APART) + FOOTER + MARGIN / 2)
    sheet.text(view.title, MARGIN, MARGIN + 0.07, sheet.width - 2 * MARGIN, HEAD)
    sheet.text(f"what {view.readout} reads", MARGIN, MARGIN + 0.26, sheet.width - 2 * MARGIN, QUIET)
    draw_key(sheet, view)
    draw_left(sheet, view, above, ends)
    draw_names(sheet, grid, view.layers)
    draw_heads(sheet, grid, view, ends, cells)
    sign(sheet, view.model, view.image, view.version)
    return sheet.figure


def draw_key(sheet: Sheet, view: Heads) -> None:
    """Which heads are framed, and how wide they are."""
    for i, (place, fill, said) in enumerate(zip(view.extremes, ENDS, ("most focused", "widest"))):
        y = MARGIN + TITLE + (i + 0.5) * KEY
        layer, head = place
        width = view.width[view.layers.index(layer), head]
        sheet.box(MARGIN, y - 0.05, 0.1, 0.1, fill)
        words = f"{said}: layer {layer}, head {head} ({percent(width)} of the patches)"
        sheet.text(words, MARGIN + 0.16, y, sheet.width - 2 * MARGIN - 0.16, QUIET)


def draw_left(sheet: Sheet, view: Heads, y: float, ends: tuple[float, float] | None) -> None:
    """The image, what the numbers mean, and the colours where all heads share them."""
    sheet.text("photo", MARGIN, y + NAME / 2 - 0.02, COLUMN, LABEL)
    framed(sheet, view.photo, MARGIN, y + NAME, *fitted(view.photo))
    y += NAME + fitted(view.photo)[1] + 0.15
    for i, line in enumerate(line for note in NOTES for line in (*note, "")):
        sheet.text(line, MARGIN, y + (i + 0.5) * LINE, COLUMN, SMALL)
    y += 3 * len(NOTES) * LINE
    if ends:
        sheet.text("one scale for all heads", MARGIN, y + LINE / 2, COLUMN, SMALL)
        ramp = paint(np.linspace(0, 1, 256), False, False)
        sheet.image(ramp[None].astype(np.uint8), MARGIN, y + 0.22, COLUMN, STRIP)
        sheet.text(compact(ends[0]), MARGIN, y + 0.22 + STRIP + 0.09, COLUMN / 2, SMALL)
        sheet.text(f"≥ {compact(ends[1])}", MARGIN + COLUMN, y + 0.22 + STRIP + 0.09, COLUMN / 2, SMALL, "right")


def draw_names(sheet: Sheet, grid: Grid, layers: tuple[int, ...]) -> None:
    """Layers at the left of their rows, heads above each column of layers."""
    names = [f"head {h}" for h in range(grid.heads)]
    short = max(sheet.measure(name, SMALL) for name in names) > grid.step - 0.02
    y = grid.above - 0.09
    for row in range(0, grid.layers, grid.rows):
        if short:
            sheet.text("head", grid.x(row) - ROW_NAME, y, ROW_NAME, SMALL)
        for h, name in enumerate(names):
            middle = grid.x(row, h) + grid.width / 2
            sheet.text(str(h) if short else name, middle, y, grid.step, SMALL, "center")
    for row, layer in enumerate(layers):
        sheet.text(f"layer {layer}", grid.x(row) - ROW_NAME, grid.y(row) + grid.height / 2, ROW_NAME - 0.05, SMALL)


def draw_heads(sheet: Sheet, grid: Grid, view: Heads, ends: tuple[float, float] | None, cells: bool) -> None:
    """Every head's map; under it a bar for what falls on patches, and how wide it is."""
    size = round(grid.width * DPI), round(grid.height * DPI)
    frames = dict(zip(view.extremes[::-1], ENDS[::-1]))  # one head alone is the most focused
    patches, widths = view.patches, view.width
    for row, head in np.ndindex(*widths.shape):
        map = view.maps[row, head]
        if np.isnan(map).all():
            continue
        x, y, width, height = grid.x(row, head), grid.y(row), grid.width, grid.height
        fill = frames.get((view.layers[row], head))
        if fill is not None:
            sheet.box(x - FRAME, y - FRAME, width + 2 * FRAME, height + 2 * FRAME, fill)
        sheet.image(bare(map, False, cells=cells, size=size, limits=ends), x, y, width, height)
        y += height + FRAME + 0.01
        sheet.box(x, y, width, THICK, BAR)
        sheet.box(x, y, width * min(1.0, float(patches[row, head])), THICK, fill or GREY)
        sheet.text(percent(float(widths[row, head])), x + width / 2, y + THICK + NUMBER / 2, grid.step, SMALL, "center")
