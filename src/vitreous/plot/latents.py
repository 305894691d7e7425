"""A contact sheet of latents: the patches where each is largest, and the images they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from vitreous.plot.overlay import overlay
from vitreous.plot.panel import MARGIN, framed, sign
from vitreous.plot.sheet import BODY, HEAD, QUIET, SMALL, Sheet
from vitreous.types import Box
from vitreous.version import VERSION

SIDE = 0.95  # inches, of a crop and of an image
GAP = 0.08
LINE = 0.17
HEADS = 0.5
FOOTER = 0.3
WORDS = 2.3  # the column of words
PIXELS = 224  # the long side of an image on a sheet
FRAME = (255, 255, 255)


@dataclass(frozen=True, eq=False)
class Shown:
    """One latent: its title, a few lines on it, and patches with their images."""

    title: str
    lines: Sequence[str]
    patches: Sequence[tuple[Image.Image, Image.Image]]


def on_image(photo: Image.Image, map: np.ndarray, most: float, patch: int, box: Box | None = None) -> Image.Image:
    """An image with the latent's own activation over it, and a frame around the patch where it is largest."""
    drawn = overlay(map, photo, False, cells=True, limits=(0.0, most or 1.0), box=box)
    rows, columns = map.shape
    y, x = divmod(patch, columns)
    top, left, bottom, right = box or (0.0, 0.0, 1.0, 1.0)
    high, wide = (bottom - top) * drawn.height / rows, (right - left) * drawn.width / columns
    corner = left * drawn.width + x * wide, top * drawn.height + y * high
    lines = ImageDraw.Draw(drawn)
    lines.rectangle((*corner, corner[0] + wide, corner[1] + high), outline=FRAME, width=max(2, drawn.width // 120))
    drawn.thumbnail((PIXELS, PIXELS))
    return drawn


def latents_figure(shown: Sequence[Shown], title: str, about: str, model: str) -> Sheet:
    """A row for each latent: words, then each patch with context above the image that it is in."""
    across = max((len(one.patches) for one in shown), default=1)
    row = 2 * SIDE + 3 * GAP
    width = 2 * MARGIN + WORDS + across * (SIDE + GAP)
    sheet = Sheet(width, MARGIN + HEADS + len(shown) * row + FOOTER + MARGIN / 2)
    room = width - 2 * MARGIN
    sheet.text(title, MARGIN, MARGIN + 0.07, room, HEAD)
    sheet.text(about, MARGIN, MARGIN + 0.27, room, QUIET)
    for r, one in enumerate(shown):
        y = MARGIN + HEADS + r * row
        sheet.text(one.title, MARGIN, y + 0.08, WORDS - 0.1, BODY)
        for i, words in enumerate(one.lines):
            sheet.text(words, MARGIN, y + 0.1 + (i + 1) * LINE, WORDS - 0.1, SMALL)
        for c, (crop, image) in enumerate(one.patches):
            x = MARGIN + WORDS + c * (SIDE + GAP)
            framed(sheet, crop, x, y, SIDE, SIDE)
            framed(sheet, image, x, y + SIDE + GAP, SIDE, SIDE)
    sign(sheet, model, f"{len(shown)} latents", VERSION)
    return sheet
