"""Maps of videos: a strip with a column for each tubelet, the middle frame of each under its map; and a film."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitreous._support.files import write_whole
from vitreous.errors import InputError, OptionError
from vitreous.plot import colour
from vitreous.plot.explained import Explained
from vitreous.plot.gif import gif_bytes
from vitreous.plot.overlay import bare, overlay, side_by_side
from vitreous.plot.panel import MARGIN, Panel, footer, heading, legend_height
from vitreous.plot.sheet import LABEL, QUIET, SMALL, Sheet

COLUMNS = 16  # tubelets in one figure
WIDE, CELL = 11.0, 1.5  # inches, as all lengths below: of a strip, and of a column at most
LEAST_WIDTH = 4.6
NAMES, HEADS, BELOW, FOOTER, LINE = 0.2, 0.42, 0.14, 0.26, 0.17
FRAME_MS = 160  # of a film
MOST = 6_000_000  # bytes of a film
SMALLEST = 160  # pixels: it is not made much smaller than this


def is_video(attribution: Explained) -> bool:
    return attribution.map.ndim == 4


# ------------------------------------------------------------------------------------------------------------- strips


def columns_of(attribution: Explained) -> list[int]:
    """The tubelets that a figure shows: all, or some from the first to the last."""
    count = attribution.map.shape[1]
    return list(range(count)) if count <= COLUMNS else np.linspace(0, count - 1, COLUMNS).round().astype(int).tolist()


def spans(attribution: Explained, frames: int) -> list[tuple[int, int]]:
    """The frames that each map of a video stands for."""
    times: Sequence[tuple[int, int]] = getattr(attribution, "times", ())
    count = attribution.map.shape[1]
    return list(times) or [
        (n * frames // count, max(n * frames // count + 1, (n + 1) * frames // count)) for n in range(count)
    ]


def middle_frames(attribution: Explained, index: int) -> list[Image.Image] | None:
    """The middle frame of each tubelet that is shown; None if the video is not known."""
    if attribution.views is None:
        return None
    frames: list[Image.Image] = attribution.views.frames(index)
    each = spans(attribution, len(frames))
    return [frames[sum(each[n]) // 2] for n in columns_of(attribution)]


def panel_of(attribution: Explained, index: int, cells: bool) -> Panel:
    """The maps of one video as one panel: all tubelets share their colours."""
    maps = attribution.map[index].detach().float().cpu().numpy()  # [T h w]
    signed, control = attribution.signed, colour.is_control(attribution.method)
    ends = colour.limits(maps, signed, colour.is_level(attribution.method))
    frames = middle_frames(attribution, index)
    drawn = []
    for column, number in enumerate(columns_of(attribution)):
        if frames is None:
            drawn.append(bare(maps[number], signed, cells=cells, limits=ends, control=control))
        else:
            under = frames[column]
            drawn.append(overlaid(attribution, maps[number], under, ends, cells))
    numbers = maps[np.isfinite(maps)]
    span = (float(numbers.min()), float(numbers.max())) if numbers.size else None
    return Panel(None if frames is None else side_by_side(frames), side_by_side(drawn), ends, span, signed, control)


def overlaid(
    attribution: Explained, map: np.ndarray, frame: Image.Image, ends: tuple[float, float], cells: bool
) -> Image.Image:
    control = colour.is_control(attribution.method)
    return overlay(map, frame, attribution.signed, cells=cells, limits=ends, control=control, box=attribution.box)


def strip_figure(
    rows: Sequence[tuple[Explained, int, str]], *, cells: bool = False, told: str = "", name: str | None = None
) -> Sheet:
    """The frames, and a strip for each map: an attribution, the number of the video in it, and its row head.

    `told`: a line about the video, such as its best classes.
    """
    if not rows:
        raise InputError("there is no map to draw")
    panels = [panel_of(one, index, cells) for one, index, _ in rows]
    first, number, _ = rows[0]
    shown = columns_of(first)
    aspect = panels[0].picture.width / panels[0].picture.height
    wide = min(WIDE, CELL * len(shown) * max(1.0, aspect / len(shown)))
    high = wide / aspect
    photos = panels[0].photo is not None
    begin = MARGIN + HEADS + NAMES
    steps = [HEADS + high + legend_height(panel.signed) + BELOW for panel in panels]
    height = begin + (high + BELOW if photos else 0) + sum(steps) + FOOTER + MARGIN / 2
    sheet = Sheet(max(LEAST_WIDTH, wide + 2 * MARGIN), height)
    room = sheet.width - 2 * MARGIN
    sheet.text(name or first.names[number], MARGIN, MARGIN + 0.07, room)
    sheet.text(told, MARGIN, MARGIN + 0.25, room, QUIET)
    name_columns(sheet, first, number, shown, wide, MARGIN + HEADS + NAMES / 2)
    y = begin
    if photos and panels[0].photo is not None:
        sheet.image(panels[0].photo, MARGIN, y, wide, high)
        y += high + BELOW
    for (one, _, head), panel, step in zip(rows, panels, steps):
        heading(sheet, one, MARGIN, y, room, target=not head)
        if head:
            sheet.text(head, MARGIN + room, y + 0.07, room / 2, LABEL, "right")
        panel.draw(sheet, MARGIN, y + HEADS, wide, high, min(wide, 3.0))
        y += step
    footer(sheet, first, first.names[number])
    return sheet


def name_columns(sheet: Sheet, first: Explained, number: int, shown: Sequence[int], wide: float, y: float) -> None:
    """The frames of each tubelet, above its column."""
    count = first.map.shape[1]
    frames = len(first.views.frames(number)) if first.views is not None else count
    each, column = spans(first, frames), wide / len(shown)
    for place, tubelet in enumerate(shown):
        start, end = each[tubelet]
        said = f"frame {start}" if end - start == 1 else f"{start}–{end - 1}"
        sheet.text(said if place or end - start == 1 else f"frames {said}", MARGIN + place * column, y, column, SMALL)
    if len(shown) < count:
        sheet.text(f"{len(shown)} of {count} tubelets", MARGIN + wide, MARGIN + 0.25, 2.0, SMALL, "right")


def attribution_strips(attribution: Explained, *, cells: bool = False) -> Sheet:
    """A strip for each of the first videos."""
    shown = range(min(len(attribution), 6))
    heads = [attribution.names[i] if len(attribution) > 1 else "" for i in shown]
    count = len(attribution)
    name = attribution.names[0] if count == 1 else f"{count} videos" + ("" if count <= 6 else ", the first 6")
    return strip_figure([(attribution, i, head) for i, head in zip(shown, heads)], cells=cells, name=name)


# -------------------------------------------------------------------------------------------------------------- films


def film_frames(attribution: Explained, index: int, *, cells: bool = False) -> list[Image.Image]:
    """Every frame that the model saw, under the map of its tubelet."""
    if not is_video(attribution):
        raise OptionError("a film shows the maps of a video; these are of images: use .png, .svg, .pdf or .npz")
    if attribution.views is None:
        raise InputError("this attribution was loaded from a file without its video, which a film shows")
    frames: list[Image.Image] = attribution.views.frames(index)
    maps = attribution.map[index].detach().float().cpu().numpy()
    ends = colour.limits(maps, attribution.signed, colour.is_level(attribution.method))
    owner = {frame: n for n, (start, end) in enumerate(spans(attribution, len(frames))) for frame in range(start, end)}
    return [
        overlaid(attribution, maps[owner[t]], frame, ends, cells) if t in owner else frame.convert("RGB")
        for t, frame in enumerate(frames)
    ]


def save_film(
    attributions: Sequence[Explained], path: Path, told: Mapping[str, Any] | None = None, *, cells: bool = False
) -> None:
    """Write an animated GIF of the first video."""
    write_whole(path, film_bytes(attributions, told, cells=cells))


def film_bytes(
    attributions: Sequence[Explained], told: Mapping[str, Any] | None = None, *, cells: bool = False
) -> bytes:
    """An animated GIF of the first video, several maps side by side; smaller where it would be a large file."""
    films = [film_frames(one, 0, cells=cells) for one in attributions]
    pictures = [side_by_side(together) if len(films) > 1 else together[0] for together in zip(*films)]
    written = gif_bytes(pictures, [FRAME_MS] * len(pictures), told)
    while len(written) > MOST and min(pictures[0].size) > SMALLEST:
        smaller = round(0.8 * pictures[0].width), round(0.8 * pictures[0].height)
        pictures = [one.resize(smaller, Image.Resampling.LANCZOS) for one in pictures]
        written = gif_bytes(pictures, [FRAME_MS] * len(pictures), told)
    return written
