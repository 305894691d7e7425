"""Lines of text: how they look, how wide they are, and their pixels. One font, so a figure is the same everywhere.

What is measured is what is drawn: both come from the layout that matplotlib's font library makes of a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import ceil

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg, get_hinting_flag
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from PIL import Image

FONT = "DejaVu Sans"  # comes with matplotlib
ASCENT = 1556 / 2048  # of the font, in parts of its size: what a line's middle is the middle of
INK, GREY, PALE, BAR = "#1A1C1F", "#5F6570", "#B4B9C2", "#DCE1E8"
AROUND = 4  # pixels around a line: letters may reach beyond their room
REMEMBERED = 4096  # lines; labels, names and words come again in every figure


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


@dataclass(frozen=True, eq=False)
class Line:
    """The pixels of a line of text, and where they stand beside its baseline."""

    mask: Image.Image  # how much ink each pixel has
    left: int  # pixels from where the line begins to its first pixel
    above: int  # rows above the baseline
    middle: float  # from the middle of the line down to the baseline


@lru_cache(REMEMBERED)
def width_of(words: str, style: Style, dpi: float | int) -> float:
    """Pixels from the first letter to the last."""
    return float(laid_out(words, style, dpi).get_width_height()[0]) / 64


@lru_cache(REMEMBERED)
def line_of(words: str, style: Style, dpi: float | int) -> Line:
    font = laid_out(words, style, dpi)
    (wide, high), descent = (size / 64 for size in font.get_width_height()), font.get_descent() / 64
    baseline = AROUND + ceil(high - descent)
    paper = RendererAgg(ceil(wide) + 2 * AROUND, baseline + ceil(descent) + AROUND, dpi)  # type: ignore[no-untyped-call]
    paper.draw_text(paper.new_gc(), AROUND, baseline, words, style.font, 0)  # type: ignore[no-untyped-call]
    mask = Image.fromarray(np.asarray(paper.buffer_rgba())[..., 3])  # type: ignore[no-untyped-call]
    return Line(mask, -AROUND, baseline, max(high - descent, ASCENT * style.size * dpi / 72) / 2)


def laid_out(words: str, style: Style, dpi: float | int) -> FT2Font:
    """This thread's font, which holds the line until the next."""
    font = get_font(findfont(style.font))
    font.clear()
    font.set_size(style.size, dpi)
    font.set_text(words, 0.0, flags=get_hinting_flag())  # type: ignore[no-untyped-call]
    return font


@cache
def drawable(letter: str, style: Style) -> bool:
    return get_font(findfont(style.font)).get_char_index(ord(letter)) != 0


def printable(words: str, style: Style = BODY) -> str:
    """One line, with a box for each letter the font does not have."""
    return "".join(letter if drawable(letter, style) else "□" for letter in " ".join(words.split()))
