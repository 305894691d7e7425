"""Paper measured in inches from the upper left corner, and the words on it.

Every piece is put at its place, so nothing moves when a label is long: it is shortened to the room it has. Nothing here
touches pyplot or any other global state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from PIL import Image

Align = Literal["left", "center", "right"]

DPI = 200
FONT = "DejaVu Sans"  # comes with matplotlib, so a figure is the same everywhere
INK, GREY, PALE, BAR = "#1A1C1F", "#5F6570", "#B4B9C2", "#DCE1E8"


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
