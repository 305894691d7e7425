"""Words: those of an answer, each with its map; those of a text, in colours and with bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from matplotlib.colors import to_hex
from PIL import Image
from torch import Tensor

from vitreous.errors import InputError
from vitreous.plot.colour import SIGNED, limits
from vitreous.plot.explained import Explained
from vitreous.plot.panel import MARGIN, Panel, changed_options, footer, framed, legend_height, shape, sign
from vitreous.plot.sheet import BAR, BODY, HEAD, QUIET, SMALL, Sheet, compact

ACROSS = 4  # maps in a row
GAP = 0.25  # inches, as all lengths below
LINE = 0.17
HEADS = 0.24  # the word above its map
BELOW = 0.2
FOOTER = 0.25
LEAST_COLUMN = 1.5
ROW = 0.24  # of a bar
NAME = 1.3
BARS = 2.6
NUMBER = 0.6


def answer_figure(
    question: str,
    answer: str,
    maps: Sequence[Explained],
    titles: Sequence[str],
    photo: Image.Image,
    cells: bool = False,
) -> Sheet:
    """The question and the answer, the image, and the map of each word with its probability."""
    if not maps:
        raise InputError("there is no attribution to draw")
    panels = [Panel.of(one, 0, photo, cells) for one in maps]
    width, height = shape(photo)
    column, row = max(width, LEAST_COLUMN), HEADS + height + legend_height(maps[0].signed) + BELOW
    lines = -(-len(maps) // ACROSS)
    across = -(-len(maps) // lines)
    left = MARGIN + column + 1.5 * GAP
    sheet = Sheet(left + max(across, 2) * (column + GAP) - GAP + MARGIN, 1.0)
    room = sheet.width - 2 * MARGIN
    said = sheet.wrap(question, room)[:3] + sheet.wrap(answer, room)[:6]
    asked = len(sheet.wrap(question, room)[:3])
    above = MARGIN + len(said) * LINE + 0.2
    sheet.height = above + lines * row + FOOTER + MARGIN / 2
    for i, line in enumerate(said):
        sheet.text(line, MARGIN, MARGIN + 0.07 + i * LINE, room, HEAD if i < asked else BODY)
    sheet.text(maps[0].names[0], MARGIN, above + 0.07, column, BODY)
    framed(sheet, photo, MARGIN, above + HEADS, width, height)
    sheet.text(maps[0].method, MARGIN, above + HEADS + height + 0.16, column, HEAD)
    sheet.text(changed_options(maps[0]), MARGIN, above + HEADS + height + 0.34, column, QUIET)
    for i, (panel, title) in enumerate(zip(panels, titles)):
        x, y = left + i % across * (column + GAP), above + i // across * row
        sheet.text(title, x, y + 0.07, column, BODY)
        panel.draw(sheet, x, y + HEADS, width, height, width)
    footer(sheet, maps[0], maps[0].names[0])
    return sheet


@runtime_checkable
class Weighed(Protocol):
    """What `vitreous.words` found."""

    @property
    def words(self) -> tuple[str, ...]: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def similarity(self) -> float: ...
    @property
    def method(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def photo(self) -> Image.Image: ...
    @property
    def version(self) -> str: ...


def words_figure(found: Weighed) -> Sheet:
    """The image, the text in the colours of its words, and a bar for each word: to the right for, else against."""
    values = found.values.detach().float().cpu().numpy()
    end = limits(values, True)[1]
    fills = [to_hex(SIGNED(0.5 + 0.5 * float(np.clip(value / end, -1, 1)))) for value in values]
    width, height = shape(found.photo)
    left = MARGIN + width + GAP
    right = NAME + 2 * BARS / 2 + NUMBER
    sheet = Sheet(left + right + MARGIN, 1.0)
    y = coloured(sheet, found.words, fills, left, MARGIN + 0.07, right)
    sheet.text(f"{found.method} · similarity {compact(found.similarity)}", left, y + 0.2, right, QUIET)
    above = y + 0.4
    sheet.height = max(above + len(values) * ROW, MARGIN + height) + FOOTER + MARGIN
    framed(sheet, found.photo, MARGIN, MARGIN, width, height)
    signed = bool((values < 0).any())
    zero = left + NAME + (BARS / 2 if signed else 0)
    reach = (BARS / 2 if signed else BARS) / max(float(np.abs(values).max()), 1e-30)
    for i, (word, value, fill) in enumerate(zip(found.words, values, fills)):
        y, long = above + i * ROW, abs(float(value)) * reach
        sheet.text(word, left, y + ROW / 2, NAME - 0.05, BODY)
        sheet.box(zero - (long if value < 0 else 0), y + 0.04, long, ROW - 0.08, fill)
        sheet.text(compact(float(value)), left + right, y + ROW / 2, NUMBER, SMALL, "right")
    sheet.box(zero - 0.004, above, 0.008, len(values) * ROW, BAR)
    sign(sheet, found.model, found.image, found.version)
    return sheet


def coloured(sheet: Sheet, words: Sequence[str], fills: Sequence[str], x: float, y: float, room: float) -> float:
    """The text, each word on its colour, in lines; the middle of the last line."""
    at = x
    for word, fill in zip(words, fills):
        wide = min(sheet.measure(word) + 0.1, room)
        if at > x and at + wide > x + room:
            at, y = x, y + LINE + 0.07
        sheet.box(at, y - 0.1, wide, 0.2, fill)
        sheet.text(word, at + 0.05, y, wide, BODY)
        at += wide + 0.04
    return y
