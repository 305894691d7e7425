"""Clusters of patches: a contact sheet of one, and the scores of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from vitreous._support.words import number
from vitreous.errors import InputError
from vitreous.plot.overlay import enlarge, overlay
from vitreous.plot.panel import MARGIN, framed
from vitreous.plot.sheet import BAR, GREY, HEAD, INK, LABEL, PALE, QUIET, SMALL, Sheet
from vitreous.types import Box

CELL, GAP = 1.12, 0.1  # inches, as all lengths below
TITLE, NAMES, LINE = 0.5, 0.98, 0.17
CONTEXT = 1.5  # patches around a patch that are seen with it
LEFT, WIDE, RIGHT = 2.4, 4.0, 1.5
SHORT = 0.19  # from bar to bar


@dataclass(frozen=True, eq=False)
class Tile:
    """An image of a cluster: its map, and which of its patches belong to the cluster, the most relevant first."""

    name: str
    photo: Image.Image
    map: Float[np.ndarray, "h w"]
    places: Sequence[int]
    box: Box | None = None  # the part of the image that the patches cover: top, left, bottom, right, as shares

    @property
    def cell(self) -> tuple[float, float]:
        """The width and height of a patch of the photo, in pixels."""
        top, left, bottom, right = self.box or (0.0, 0.0, 1.0, 1.0)
        (h, w), (wide, high) = self.map.shape, self.photo.size
        return (right - left) * wide / w, (bottom - top) * high / h

    def rectangle(self, place: int) -> tuple[float, float, float, float]:
        """The pixels of a patch of the photo: left, top, right, bottom."""
        (wide, high), (row, column) = self.cell, divmod(place, self.map.shape[1])
        top, left = (self.box or (0.0, 0.0))[:2]
        x, y = left * self.photo.width + column * wide, top * self.photo.height + row * high
        return x, y, x + wide, y + high

    @property
    def close(self) -> Image.Image:
        """The most relevant patch with what is around it; at an edge, more of the other side."""
        first, window = self.rectangle(self.places[0]), []
        for axis in (0, 1):
            whole = self.photo.size[axis]
            size = min(float(whole), (1 + 2 * CONTEXT) * self.cell[axis])
            start = min(max(0.0, first[axis] - CONTEXT * self.cell[axis]), whole - size)
            window.append((start, start + size))
        (left, right), (top, bottom) = window
        shape = 224, max(1, round(224 * (bottom - top) / (right - left)))
        return self.photo.resize(shape, Image.Resampling.BICUBIC, (left, top, right, bottom))

    @property
    def marked(self) -> Image.Image:
        """The image with its patches of the cluster outlined."""
        large = enlarge(self.photo.convert("RGB")).copy()
        scale, pen = large.width / self.photo.width, ImageDraw.Draw(large)
        for ink, thick in (("black", 5), ("white", 2)):
            for place in self.places:
                pen.rectangle([round(scale * edge) for edge in self.rectangle(place)], outline=ink, width=thick)
        return large


def contact_figure(tiles: Sequence[Tile], title: str, told: str) -> Figure:
    """A column for each image: the patch with its surroundings, the image with all patches of the cluster, the map."""
    if not tiles:
        raise InputError("there is no image to show")
    height = max(tile.photo.height / tile.photo.width for tile in tiles) * CELL
    sheet = Sheet(
        2 * MARGIN + NAMES + max(3, len(tiles)) * (CELL + GAP), MARGIN + TITLE + 3 * (height + GAP) + LINE + 0.2
    )
    room = sheet.width - 2 * MARGIN
    sheet.text(title, MARGIN, MARGIN + 0.07, room, HEAD)
    sheet.text(told, MARGIN, MARGIN + 0.27, room, QUIET)
    for row, words in enumerate(("patch", "image", "map")):
        sheet.text(words, MARGIN, MARGIN + TITLE + row * (height + GAP) + height / 2, NAMES - 0.1, LABEL)
    for i, tile in enumerate(tiles):
        x = MARGIN + NAMES + i * (CELL + GAP)
        mapped = overlay(tile.map, tile.photo, signed=bool((tile.map < 0).any()), box=tile.box)
        for row, picture in enumerate((tile.close, tile.marked, mapped)):
            framed(sheet, picture, x, MARGIN + TITLE + row * (height + GAP), CELL, height)
        sheet.text(tile.name.rpartition("/")[2], x, MARGIN + TITLE + 3 * (height + GAP) + 0.06, CELL, SMALL)
    return sheet.figure


def scores_figure(bars: Sequence[tuple[str, float, float, float]], alarms: Sequence[bool]) -> Figure:
    """A line for each cluster: its score and interval; alarms are dark."""
    if not bars:
        raise InputError("there is no score to draw")
    sheet = Sheet(LEFT + WIDE + RIGHT, MARGIN + TITLE + SHORT * len(bars) + 0.4)
    sheet.text("Scores of the clusters", MARGIN, MARGIN + 0.07, sheet.width - 2 * MARGIN, HEAD)
    about = "added probability in images of other classes, less that of ordinary parts of the class"
    sheet.text(about, MARGIN, MARGIN + 0.27, sheet.width - 2 * MARGIN, QUIET)
    values = np.array([bar[1:] for bar in bars], np.float64)
    known = values[np.isfinite(values)]
    low, high = min(0.0, float(known.min())), max(0.05, float(known.max()))

    def x(value: float) -> float:
        return LEFT + WIDE * (value - low) / (high - low)

    top, bottom = MARGIN + TITLE, MARGIN + TITLE + SHORT * len(bars)
    sheet.axes.plot([x(0), x(0)], [top - 0.04, bottom], color=PALE, linewidth=0.8, zorder=1)
    for i, ((name, score, start, end), alarm) in enumerate(zip(bars, alarms)):
        y, ink = top + SHORT * (i + 0.5), INK if alarm else GREY
        sheet.text(name, LEFT - 0.12, y, LEFT - MARGIN - 0.12, LABEL, "right")
        if np.isfinite(start) and np.isfinite(end):
            sheet.axes.plot([x(start), x(end)], [y, y], color=ink if alarm else BAR, linewidth=2.0, zorder=2)
        sheet.axes.plot([x(score)], [y], color=ink, marker="o", markersize=4, zorder=3)
        sheet.text(number(score) + ("  alarm" if alarm else ""), LEFT + WIDE + 0.12, y, RIGHT, SMALL)
    for value in dict.fromkeys((low, 0.0, high)):
        sheet.text(number(value), x(value), bottom + 0.12, 0.6, SMALL, "center")
    return sheet.figure
