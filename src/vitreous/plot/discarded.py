"""Rollout with more and more discarded: a sheet of all maps, and an animation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vitreous._support.files import write_whole
from vitreous._support.words import percent
from vitreous.errors import InputError
from vitreous.plot.explained import Inspected
from vitreous.plot.gif import gif_bytes
from vitreous.plot.overlay import overlay, reduced
from vitreous.plot.panel import LEGEND, MARGIN, Panel, framed, shape, sign
from vitreous.plot.raster import drawn
from vitreous.plot.sheet import BAR, BODY, GREY, HEAD, LABEL, QUIET, SMALL, Sheet

AREA = 1.9  # of a map, in square inches
COLUMN = 1.15  # at least; inches, as all lengths below
GAP = 0.16
NAME = 0.22
BELOW = 0.1
TITLE = 0.5
FOOTER = 0.3
ACROSS = 7
FRAME = 5.0  # of the image in a frame, in square inches
DOTS = 150  # to the inch, in the animation
HOLD, STEP = 1200, 280  # milliseconds: the first and the last frame, and the others
MOST = 2_000_000  # bytes of an animation
SMALLEST = 200  # pixels: it is not made much smaller than this


@runtime_checkable
class Discard(Inspected, Protocol):
    """`vitreous.inspect.discard`."""

    @property
    def heads(self) -> str: ...
    @property
    def ratios(self) -> tuple[float, ...]: ...
    @property
    def maps(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Grid:
    """Where the maps stand; the image is the first."""

    count: int
    width: float
    height: float

    @property
    def across(self) -> int:
        """As even as can be: 21 are three times seven."""
        lines = -(-self.count // ACROSS)
        return max(3, -(-self.count // lines))

    @property
    def column(self) -> float:
        return max(self.width, COLUMN)

    @property
    def row(self) -> float:
        return NAME + self.height + LEGEND + BELOW

    def place(self, index: int) -> tuple[float, float]:
        line, column = divmod(index, self.across)
        return MARGIN + column * (self.column + GAP), MARGIN + TITLE + line * self.row


def contact_sheet(view: Discard, *, cells: bool = False) -> Figure:
    """The image, then a map for each share that is discarded, each between its own limits."""
    grid, photo = Grid(1 + len(view.maps), *shape(view.photo, AREA)), reduced(view.photo)
    right = grid.place(grid.across - 1)[0] + grid.column
    bottom = grid.place(len(view.maps))[1] + grid.row
    sheet = Sheet(right + MARGIN, bottom + FOOTER + MARGIN / 2)
    sheet.text(f"Rollout through all layers of {view.origin}", MARGIN, MARGIN + 0.07, right - MARGIN, HEAD)
    sheet.text(told(view), MARGIN, MARGIN + 0.26, right - MARGIN, QUIET)
    x, y = grid.place(0)
    sheet.text("photo", x, y + NAME / 2 - 0.02, grid.column, LABEL)
    framed(sheet, view.photo, x, y + NAME, grid.width, grid.height)
    for i, (ratio, map) in enumerate(zip(view.ratios, view.maps), 1):
        x, y = grid.place(i)
        sheet.text(f"discard {ratio:.2g}", x, y + NAME / 2 - 0.02, grid.column, LABEL)
        Panel.unsigned(map, photo, cells).draw(sheet, x, y + NAME, grid.width, grid.height, grid.column)
    sign(sheet, view.model, view.image, view.version)
    return sheet.figure


def told(view: Discard) -> str:
    return f"{view.heads} of the heads, the smallest attentions of each layer set to zero"


def frames(view: Discard, *, cells: bool = False) -> list[Image.Image]:
    """A frame for each share: the map over the image, and how much is discarded."""
    return [frame(view, ratio, map, cells) for ratio, map in zip(view.ratios, view.maps)]


def frame(view: Discard, ratio: float, map: np.ndarray, cells: bool) -> Image.Image:
    width, height = shape(view.photo, FRAME)
    room = max(width, 2.2)
    margin, top, bottom = 0.12, 0.44, 0.42
    sheet = Sheet(room + 2 * margin, top + height + bottom)
    sheet.text(f"rollout, {view.heads} of the heads", margin, 0.14, room, BODY)
    sheet.text(view.origin, margin, 0.31, room, SMALL)
    framed(sheet, overlay(map, reduced(view.photo), False, cells=cells), margin, top, width, height)
    y = top + height + 0.14
    sheet.text(f"discarded: {percent(ratio)}", margin, y, room, LABEL)
    sheet.box(margin, y + 0.11, room, 0.06, BAR)
    sheet.box(margin, y + 0.11, room * ratio, 0.06, GREY)
    return drawn(sheet, DOTS)


def save_gif(pictures: list[Image.Image], path: Path, told: Mapping[str, Any] | None = None) -> None:
    """Write an animation, with smaller frames where it would be a large file."""
    if not pictures:
        raise InputError(f"{path}: there is no frame to write")
    written = animated(pictures, told)
    while len(written) > MOST and min(pictures[0].size) > SMALLEST:
        size = round(0.85 * pictures[0].width), round(0.85 * pictures[0].height)
        pictures = [picture.resize(size, Image.Resampling.LANCZOS) for picture in pictures]
        written = animated(pictures, told)
    write_whole(path, written)


def animated(pictures: list[Image.Image], told: Mapping[str, Any] | None = None) -> bytes:
    """The frames one after the other; the first and the last stay longer."""
    return gif_bytes(pictures, [HOLD, *[STEP] * (len(pictures) - 2), HOLD][: len(pictures)], told)
