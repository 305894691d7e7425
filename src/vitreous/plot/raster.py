"""A sheet as pixels. Everything lies where matplotlib puts it, in a quarter of its time or less."""

from __future__ import annotations

from math import ceil, floor

import numpy as np
from PIL import Image

from vitreous.plot.letters import line_of, width_of
from vitreous.plot.sheet import DPI, Box, Picture, Sheet, Words

SHARE = {"left": 0.0, "center": 0.5, "right": 1.0}  # of a line's width that lies before its place


def drawn(sheet: Sheet, dpi: float | int = DPI) -> Image.Image:
    """All pieces of a sheet on white."""
    paper = Paper(sheet, dpi)
    for piece in sheet.layers:
        if isinstance(piece, Box):
            paper.fill(piece)
        elif isinstance(piece, Picture):
            paper.place(piece)
        else:
            paper.write(piece)
    return paper.image


class Paper:
    """The pixels of a sheet. The rows are counted from the lower edge, as in matplotlib."""

    def __init__(self, sheet: Sheet, dpi: float | int) -> None:
        size = int(sheet.width * dpi), int(sheet.height * dpi)
        self.image = Image.new("RGB", size, "white")
        self.dpi, self.above = dpi, size[1] - sheet.height * dpi

    def edges(self, piece: Box | Picture) -> tuple[int, int, int, int]:
        """Left, upper, right and lower edge on whole pixels."""
        x, y = piece.x * self.dpi, piece.y * self.dpi + self.above
        right, lower = x + piece.width * self.dpi, y + piece.height * self.dpi
        return floor(x + 0.5), ceil(y - 0.5), floor(right + 0.5), ceil(lower - 0.5)

    def fill(self, box: Box) -> None:
        left, upper, right, lower = self.edges(box)
        if left < right and upper < lower:
            self.image.paste(box.fill, (left, upper, right, lower))

    def place(self, picture: Picture) -> None:
        """An image, resized; the cells of one that is enlarged by far stay sharp."""
        left, upper, right, lower = self.edges(picture)
        size = max(1, right - left), max(1, lower - upper)
        held = picture.pixels
        image = held if isinstance(held, Image.Image) else Image.fromarray(np.asarray(held))
        sharp = all(stays_sharp(pixels, given) for pixels, given in zip(size, image.size))
        clear = "A" in image.getbands() or "transparency" in image.info
        image = image.convert("RGBA" if clear else "RGB")
        image = image.resize(size, Image.Resampling.NEAREST if sharp else Image.Resampling.HAMMING)
        self.image.paste(image, (left, upper), image if clear else None)

    def write(self, said: Words) -> None:
        line = line_of(said.words, said.style, self.dpi)
        before = SHARE[said.align] * width_of(said.words, said.style, self.dpi) if said.align != "left" else 0.0
        x, baseline = said.x * self.dpi - before, said.y * self.dpi + self.above + line.middle
        self.image.paste(said.style.ink, (round(x) + line.left, round(baseline) - line.above), line.mask)


def stays_sharp(pixels: int, given: int) -> bool:
    """Whether so many pixels show so many given ones without a filter: as they are, doubled, or enlarged by far."""
    return pixels > 3 * given or pixels in (given, 2 * given)
