"""Paper measured in inches from the upper left corner: boxes, images and words, each put at its place.

Nothing moves when a label is long: it is shortened to the room it has. A sheet only remembers its pieces. `raster`
draws them as pixels; `Sheet.figure` is the same sheet as a figure of matplotlib, for vector files and for charts.
Nothing here touches pyplot or any other global state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from vitreous.plot.letters import (
    BAR,
    BODY,
    GREY,
    HEAD,
    INK,
    LABEL,
    PALE,
    QUIET,
    SMALL,
    Style,
    printable,
    width_of,
)

__all__ = [
    "BAR",
    "BODY",
    "DPI",
    "GREY",
    "HEAD",
    "INK",
    "LABEL",
    "PALE",
    "QUIET",
    "SMALL",
    "Align",
    "Box",
    "Picture",
    "Piece",
    "Sheet",
    "Style",
    "Words",
    "compact",
    "printable",
]

Align = Literal["left", "center", "right"]

DPI = 200


@dataclass(frozen=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, stretched over its room."""

    pixels: Image.Image | np.ndarray
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Words:
    """One line of text that fits, its middle at `y`."""

    words: str
    x: float
    y: float
    style: Style
    align: Align


Piece = Box | Picture | Words
LAYERS = (Box, Picture, Words)  # from the lowest


class Sheet:
    """Paper of a size, with a ruler."""

    def __init__(self, width: float | int, height: float | int) -> None:
        self.width, self.height = width, height
        self.pieces: list[Piece] = []
        self.canvas: Figure | None = None

    @property
    def figure(self) -> Figure:
        """The sheet as a figure of matplotlib, made when it is first asked for; it may be drawn on."""
        if self.canvas is None:
            self.canvas = blank(self.width, self.height)
            for piece in self.pieces:
                put(self.canvas.axes[0], piece)
        return self.canvas

    @property
    def axes(self) -> Axes:
        """All of the figure, in inches from the upper left corner."""
        return self.figure.axes[0]

    @property
    def layers(self) -> list[Piece]:
        """All pieces in the order in which they cover each other."""
        return sorted(self.pieces, key=lambda piece: LAYERS.index(type(piece)))

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if self.canvas is not None:
            put(self.canvas.axes[0], piece)

    def image(self, picture: Image.Image | np.ndarray, x: float, y: float, width: float, height: float) -> None:
        self.add(Picture(picture, x, y, width, height))

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.add(Box(x, y, width, height, fill))

    def text(self, words: str, x: float, y: float, room: float, style: Style = BODY, align: Align = "left") -> None:
        """One line, its middle at `y`, shortened to `room` inches."""
        words = self.shorten(printable(words, style), room, style)
        if words:
            self.add(Words(words, x, y, style, align))

    def measure(self, words: str, style: Style = BODY) -> float:
        """Inches from the first letter to the last."""
        return width_of(words, style, DPI) / DPI

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


def blank(width: float, height: float) -> Figure:
    """A figure of matplotlib whose only axes are the ruler of a sheet."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    figure.set_layout_engine("none")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return figure


def put(axes: Axes, piece: Piece) -> None:
    """Draw one piece with matplotlib."""
    if isinstance(piece, Box):
        place = (piece.x, piece.y)
        axes.add_patch(Rectangle(place, piece.width, piece.height, facecolor=piece.fill, edgecolor="none", zorder=1))
    elif isinstance(piece, Picture):
        where = (piece.x, piece.x + piece.width, piece.y + piece.height, piece.y)
        pixels = np.asarray(piece.pixels)
        axes.imshow(pixels, extent=where, aspect="auto", origin="upper", interpolation="antialiased", zorder=2)
    else:
        align, ink = piece.align, piece.style.ink
        drawn = axes.text(piece.x, piece.y, piece.words, color=ink, ha=align, va="center_baseline", zorder=3)
        drawn.set_fontproperties(piece.style.font)
        drawn.set_parse_math(False)  # a label may hold a dollar sign
        drawn.set_usetex(False)


def compact(number: float) -> str:
    """0.0042, 1.3e-05, −12, 340."""
    text = f"{number:.2g}" if abs(number) < 100 or abs(number) >= 1e5 else f"{number:.0f}"
    return "0" if number == 0 else text.replace("-", "−", 1) if number < 0 else text
