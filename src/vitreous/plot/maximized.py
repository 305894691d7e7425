"""What a unit answers to most: the image, how its activation rose, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitreous.errors import InputError
from vitreous.plot.colour import LINES
from vitreous.plot.curves import frame
from vitreous.plot.panel import MARGIN, framed, shape, sign, spell
from vitreous.plot.sheet import BODY, HEAD, QUIET, SMALL, Sheet

AREA, SMALL_AREA = 12.0, 4.0  # of an image alone and of one among several, in square inches
HEADS = 0.5  # inches, as all lengths below
GAP = 0.3
LINE = 0.16
CURVE = 1.45  # height of the chart
SIDE = 2.35  # width of what stands beside the image
FOOTER = 0.3
LEAST_HEIGHT = 3.4  # of the image and of what stands beside it
ACROSS, MOST = 5, 25  # images in a row, and in a figure
CLIMB = LINES[1]


@runtime_checkable
class Maximized(Protocol):
    """What `vitreous.maximize` found."""

    @property
    def titles(self) -> tuple[str, ...]: ...
    @property
    def seeds(self) -> tuple[int, ...]: ...
    @property
    def activation(self) -> Tensor: ...
    @property
    def start(self) -> Tensor: ...
    @property
    def final(self) -> Tensor: ...
    @property
    def border_ratio(self) -> Tensor: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def usual(self) -> Mapping[str, Any]: ...
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> str: ...
    def picture(self, index: int = 0) -> Image.Image: ...
    def __len__(self) -> int: ...


def maximized_figure(found: Maximized) -> Figure:
    """One unit with its chart and its options, or a sheet of several."""
    if not len(found):
        raise InputError("there is no image to draw")
    return alone(found) if len(found) == 1 else together(found)


def alone(found: Maximized) -> Figure:
    picture = found.picture()
    width, height = shape(picture, AREA)
    sheet = Sheet(
        MARGIN + width + GAP + SIDE + MARGIN, MARGIN + HEADS + max(height, LEAST_HEIGHT) + FOOTER + MARGIN / 2
    )
    room = sheet.width - 2 * MARGIN
    sheet.text(found.titles[0], MARGIN, MARGIN + 0.07, room, HEAD)
    sheet.text(f"the image that this unit of {found.model} answers to most", MARGIN, MARGIN + 0.27, room, QUIET)
    x, y = MARGIN + width + GAP, MARGIN + HEADS
    framed(sheet, picture, MARGIN, y, width, height)
    sheet.text(f"activation {rise(found, 0)}", x, y + 0.05, SIDE, BODY)
    sheet.text("line: its random views, dot: the image", x, y + 0.05 + LINE, SIDE, SMALL)
    draw_climb(sheet, found, x, y + 0.4)
    y += 0.4 + CURVE + 0.56
    sheet.text(f"energy of patch borders {found.border_ratio[0]:.2f}", x, y, SIDE, BODY)
    sheet.text("over that inside; 1: no checkerboard", x, y + LINE, SIDE, SMALL)
    for i, words in enumerate(sheet.wrap(told(used(found)), SIDE * BODY.size / SMALL.size)):
        sheet.text(words, x, y + 0.46 + i * 0.14, SIDE, SMALL)
    sign(sheet, found.model, f"seed {found.seeds[0]}", found.version)
    return sheet.figure


def together(found: Maximized) -> Figure:
    """An image for each unit in rows, under each its activation."""
    count = min(len(found), MOST)
    lines = -(-count // ACROSS)
    across = -(-count // lines)
    width, height = shape(found.picture(), SMALL_AREA)
    column, row = max(width, 1.7), 0.24 + height + 0.42
    sheet = Sheet(2 * MARGIN + across * (column + 0.2) - 0.2, MARGIN + HEADS + lines * row - 0.1 + FOOTER + MARGIN / 2)
    room = sheet.width - 2 * MARGIN
    sheet.text(f"What units of {found.model} answer to most", MARGIN, MARGIN + 0.07, room, HEAD)
    more = f"; {len(found) - count} more are not shown" if len(found) > count else ""
    sheet.text((told(changed(found)) or "usual options") + more, MARGIN, MARGIN + 0.27, room, QUIET)
    for i in range(count):
        x, y = MARGIN + i % across * (column + 0.2), MARGIN + HEADS + i // across * row
        sheet.text(found.titles[i], x, y + 0.08, column, BODY)
        framed(sheet, found.picture(i), x, y + 0.24, width, height)
        seed = f" · seed {found.seeds[i]}" if len(set(found.seeds)) > 1 else ""
        said = f"{rise(found, i)} · borders {found.border_ratio[i]:.2f}{seed}"
        sheet.text(said, x, y + 0.24 + height + 0.12, column, SMALL)
    sign(sheet, found.model, f"{len(found)} images", found.version)
    return sheet.figure


def rise(found: Maximized, index: int) -> str:
    """The unit's activation on the first and on the last image."""
    return f"{digits(found.start[index])} → {digits(found.final[index])}"


def digits(value: Tensor) -> str:
    return f"{value:.{1 if value.abs() >= 10 else 2}f}".replace("-", "−", 1)


def draw_climb(sheet: Sheet, found: Maximized, x: float, y: float) -> None:
    """Activation over steps: a line for the random views, a dot for the image itself."""
    curve = found.activation[0].numpy()
    left, wide = 0.34, SIDE - 0.34
    place = ((x + left) / sheet.width, 1 - (y + CURVE) / sheet.height, wide / sheet.width, CURVE / sheet.height)
    axes = sheet.figure.add_axes(place)
    frame(axes)
    at = np.arange(1, len(curve) + 1)
    axes.plot(at, curve, color=CLIMB, linewidth=1.2)
    axes.plot([len(curve)], [float(found.final[0])], "o", color=CLIMB, markersize=3.5, clip_on=False)
    axes.set_xlim(0, len(curve))
    sheet.text("step", x + left + wide / 2, y + CURVE + 0.3, wide, SMALL, "center")


def used(found: Maximized) -> dict[str, Any]:
    """The options that had an effect."""
    without = ("seed",) if found.options["canvas"] == "fourier" else ("seed", "decay")
    return {name: value for name, value in found.options.items() if name not in without and value}


def changed(found: Maximized) -> dict[str, Any]:
    """The options that differ from their defaults."""
    usual = found.usual
    return {name: value for name, value in found.options.items() if name != "seed" and usual.get(name) != value}


def told(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={spell(value)}" for name, value in options.items())
