"""A map in colour, alone or on its image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageOps

from vitreous.plot import colour
from vitreous.types import Box

LONG_SIDE = 448  # no image is drawn smaller than this
SATURATION, BRIGHTNESS = 0.45, 0.9  # of the image under a map
TINT = 0.35  # on an image the faintest signed value already shows its hue: colours start this far from the middle
EASE = 0.75  # below 1, the middle of an unsigned map is seen better
BLANK = 255  # where a bare map has no number
SIDE, GAP = 224, 4  # pixels: the height of images in a row, and the space between them


def overlay(
    map: np.ndarray,
    photo: Image.Image,
    signed: bool,
    *,
    cells: bool = False,
    limits: tuple[float, float] | None = None,
    control: bool = False,
    strength: float = 0.85,
    box: Box | None = None,
    least: int = LONG_SIDE,
) -> Image.Image:
    """The map over its image, or over a part of it (`box`); where it claims nothing, the image shows.

    `least`: pixels that the long side has at least.
    """
    ends = colour.ends_of(map, signed, limits)
    photo = enlarge(photo.convert("RGB"), least)
    values, known = resample(map, photo.size, cells, box)
    place, alpha = veil(values, ends, signed)
    alpha = (strength * alpha * known).astype(np.float32)
    colours, under = palette(signed, control), base(photo)
    at = entry(place, len(colours))
    tinted = [mixed(under[..., c], colours[:, c][at], alpha) for c in range(3)]
    return Image.merge("RGB", [picture(plane) for plane in tinted])


def mixed(under: np.ndarray, over: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.asarray(under + alpha * (over - under))


def bare(
    map: np.ndarray,
    signed: bool,
    *,
    cells: bool = False,
    limits: tuple[float, float] | None = None,
    control: bool = False,
    size: tuple[int, int] | None = None,
) -> Image.Image:
    """The coloured map alone, at `size` (width, height) or large enough to look at."""
    ends = colour.ends_of(map, signed, limits)
    high, wide = map.shape
    values, known = resample(map, size or enlarged((wide, high)), cells)
    rgb = paint(colour.scale(values, ends), signed, control)
    return picture(np.where(known[..., None] > 0, rgb, BLANK))


def base(photo: Image.Image) -> np.ndarray:
    """The image with less colour and light, so that the map's own stand out, [Y X 3] in 0…255.

    In memory its three planes lie one after the other: numpy computes several times as quickly with them.
    """
    grey = np.asarray(photo.convert("L"), np.float32)
    planes = [BRIGHTNESS * (grey + SATURATION * (np.asarray(plane, np.float32) - grey)) for plane in photo.split()]
    return np.moveaxis(np.stack(planes), 0, -1)


def veil(values: np.ndarray, ends: tuple[float, float], signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Place in the palette and how much of it is seen, [Y X] both: nothing at zero (signed) or at the lower limit."""
    place = colour.scale(values, ends).astype(np.float32)
    if not signed:
        return place, place**EASE
    side = 2 * place - 1
    shown = np.sign(side) * (TINT + (1 - TINT) * np.abs(side))
    return (1 + shown) / 2, np.abs(side)


def paint(place: np.ndarray, signed: bool, control: bool) -> np.ndarray:
    """0…1 to colours, [… 3] in 0…255."""
    colours = palette(signed, control)
    return np.asarray(colours[entry(place, len(colours))])


def entry(place: np.ndarray, count: int) -> np.ndarray:
    """0…1 to the entries of a palette of so many colours."""
    return np.minimum((place * count).astype(np.intp), count - 1)


@cache
def palette(signed: bool, control: bool) -> np.ndarray:
    """The colours of a map from 0 to 1, [n 3] in 0…255."""
    colours = colour.colour_map(signed, control)
    return np.asarray(colours(np.arange(colours.N)), np.float32)[:, :3] * 255


def resample(
    map: np.ndarray, size: tuple[int, int], cells: bool, box: Box | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The map at (width, height), and a mask: 1 where it is finite, else 0."""
    if box is not None:
        return in_box(map, size, cells, box)
    values = np.asarray(map, np.float32)
    known = np.isfinite(values)
    smooth = Image.Resampling.NEAREST if cells else Image.Resampling.BILINEAR
    sized = Image.fromarray(np.where(known, values, 0)).resize(size, smooth)
    return np.asarray(sized), np.asarray(Image.fromarray(known.astype(np.uint8)).resize(size, Image.Resampling.NEAREST))


def in_box(map: np.ndarray, size: tuple[int, int], cells: bool, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """The same for a map that covers a part of the image, or reaches beyond it."""
    top, left, bottom, right = (round(share * size[1 - axis % 2]) for axis, share in enumerate(box))
    whole = [np.zeros(size[::-1], np.float32) for _ in range(2)]
    for canvas, part in zip(whole, resample(map, (right - left, bottom - top), cells)):
        part = part[: size[1] - top, : size[0] - left]
        canvas[top : top + part.shape[0], left : left + part.shape[1]] = part
    return whole[0], whole[1]


def enlarged(size: tuple[int, int], least: int = LONG_SIDE) -> tuple[int, int]:
    """Width and height with a long side of at least so many pixels."""
    factor = max(1.0, least / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def enlarge(photo: Image.Image, least: int = LONG_SIDE) -> Image.Image:
    size = enlarged(photo.size, least)
    return photo if size == photo.size else photo.resize(size, Image.Resampling.BICUBIC)


def reduced(photo: Image.Image) -> Image.Image:
    """The image for small panels: its long side is at most `LONG_SIDE`."""
    return ImageOps.contain(photo, (LONG_SIDE, LONG_SIDE)) if max(photo.size) > LONG_SIDE else photo


def picture(rgb: np.ndarray) -> Image.Image:
    return Image.fromarray((rgb.clip(0, 255) + 0.5).astype(np.uint8))


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Images in a row, at one height."""
    sized = [one.resize((max(1, round(SIDE * one.width / one.height)), SIDE)) for one in pictures]
    whole = Image.new("RGB", (sum(one.width + GAP for one in sized) - GAP, SIDE), "white")
    x = 0
    for one in sized:
        whole.paste(one, (x, 0))
        x += one.width + GAP
    return whole
