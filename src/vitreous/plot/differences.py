"""How far apart two models' maps of each image are, against the noise of their own maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from vitreous.errors import InputError
from vitreous.plot.colour import LINES
from vitreous.plot.curves import frame
from vitreous.plot.sheet import GREY, HEAD, PALE, QUIET, Sheet

WIDTH, HEIGHT = 5.2, 4.6  # inches
LEFT, RIGHT, ABOVE, UNDER = 0.62, 0.2, 0.72, 0.52


def differences_figure(
    distance: Sequence[float], noise: Sequence[float], same: Sequence[bool], title: str = "Distance of the maps"
) -> Figure:
    """A point for each image; `same`: whether its answer stayed."""
    if not len(distance):
        raise InputError("there is no image to draw")
    sheet = Sheet(WIDTH, HEIGHT)
    sheet.text(title, 0.1, 0.17, WIDTH - 0.2, HEAD)
    sheet.text("above the line: farther apart than noise explains", 0.1, 0.4, WIDTH - 0.2, QUIET)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - ABOVE - UNDER
    axes = sheet.figure.add_axes((LEFT / WIDTH, UNDER / HEIGHT, wide / WIDTH, high / HEIGHT))
    frame(axes)
    x, y, kept = np.asarray(noise, float), np.asarray(distance, float), np.asarray(same, bool)
    end = 1.05 * max(float(x.max()), float(y.max()), 1e-6)
    axes.plot([0, end], [0, end], color=GREY, linewidth=0.8)
    faint = 0.75 if len(x) < 400 else 0.3
    for these, colour in ((kept, LINES[0]), (~kept, LINES[1])):
        axes.scatter(x[these], y[these], s=14, color=colour, alpha=faint, linewidths=0)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.02 * end, end)
    axes.grid(axis="x", color=PALE, linewidth=0.4, alpha=0.6)
    sheet.text(
        "what noise explains: the largest distance under augmentation",
        LEFT + wide / 2,
        HEIGHT - 0.12,
        wide,
        QUIET,
        "center",
    )
    sheet.text("distance of A's map and B's", LEFT, ABOVE - 0.12, wide, QUIET)
    return sheet.figure
