"""How far attention spreads: over many images, by layer, and on one image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from vitreous.errors import InputError
from vitreous.plot import colour
from vitreous.plot.curves import spread
from vitreous.plot.overlay import enlarged
from vitreous.plot.panel import LEGEND, MARGIN, Panel, framed, shape
from vitreous.plot.sheet import GREY, HEAD, INK, LABEL, QUIET, Sheet
from vitreous.plot.similarity import Plane

INKS = tuple(to_hex(colour.UNSIGNED(place)) for place in (0.18, 0.42, 0.62, 0.78))  # of the levels, narrow to wide
TOGETHER = ("mean of layers", "min of layers", "max of layers", "rollout")
WIDE = 5.2  # of a chart; inches, as all lengths below
AREA = 1.7  # of a map, in square inches
COLUMN = 1.15  # at least
GAP = 0.16
NAME = 0.22
BELOW = 0.1
TITLE = 0.48
ACROSS, FURTHER = 6, 8  # maps in a line, and where layers are many
MANY = 24  # layers


# ---------------------------------------------------------------------------------------------------------- histogram


def histogram_figure(entropy: Float[np.ndarray, "N"], borders: Float[np.ndarray, "3"], patches: int) -> Figure:
    """The entropy of all images, over the ranges of the four levels."""
    known = entropy[np.isfinite(entropy)]
    if not known.size:
        raise InputError("there is no entropy to draw")
    even = float(np.log(patches))
    title = f"images; even attention over all {patches:,} patches would have {even:.2f} nats"
    plane = Plane(WIDE, "How far attention spreads", title, names=0.3)
    low, high = float(known.min()), float(known.max())
    pad = 0.03 * (high - low) or 0.05
    counts, edges = np.histogram(known, bins_of(known), (low, high) if high > low else (low - pad, high + pad))
    plane.limits((low - pad, high + pad), counts.astype(np.float64), zero=True)
    plane.axes.set_yticks([tick for tick in plane.axes.get_yticks() if tick == round(tick)])
    inner = borders.tolist() if high > low else [high + pad] * len(borders)  # equals are one level
    ends = [low - pad, *inner, high + pad]
    held = set(np.searchsorted(borders, known, side="left").tolist())
    for k in held:
        plane.axes.axvspan(ends[k], ends[k + 1], color=INKS[k], alpha=0.14, linewidth=0, zorder=0)
    plane.axes.stairs(counts, edges, fill=True, color=GREY, alpha=0.75, zorder=2)
    for border in borders if high > low else ():
        plane.axes.axvline(float(border), color=INK, linewidth=0.6, zorder=3)
    name_levels(plane, {k: (ends[k], ends[k + 1]) for k in sorted(held)})
    plane.foot("entropy of the attention, nats")
    return plane.sheet.figure


def bins_of(values: np.ndarray) -> int:
    """Twice the cube root, as Rice's rule says; a few at least, and odd, so that equals stand in the middle."""
    return int(np.clip(2 * len(values) ** (1 / 3), 8, 60)) | 1


def name_levels(plane: Plane, ranges: Mapping[int, tuple[float, float]]) -> None:
    """Above their ranges; pushed aside where these are narrow."""
    wanted = [(plane.x(low) + plane.x(high)) / 2 for low, high in ranges.values()]
    need = plane.sheet.measure("level 4", LABEL) + 0.1
    places = spread(wanted, need, plane.right - plane.wide + need / 2, plane.right - need / 2)
    for k, x, middle in zip(ranges, places, wanted):
        plane.sheet.axes.plot([x, middle], [plane.above - 0.07, plane.above + 0.02], color=INKS[k], linewidth=1.2)
        plane.sheet.text(f"level {k + 1}", x, plane.above - 0.15, need, LABEL, "center")


# ----------------------------------------------------------------------------------------------------------- by layer


def spread_figure(levels: Mapping[int, tuple[np.ndarray, np.ndarray]], patches: int) -> Figure:
    """The mean entropy of every layer [L] and its interval [2 L], a line for each level."""
    if not levels:
        raise InputError("there is no level to draw")
    up = f"mean entropy, nats; {np.log(patches):.2f} is even"
    plane = Plane(WIDE, "Spread of attention by layer", up, names=1.1, above=0.56)
    depth = len(next(iter(levels.values()))[0])
    at = np.arange(depth, dtype=np.float64)
    for level, (mean, ends) in levels.items():
        fill = INKS[level - 1]
        plane.axes.fill_between(at, *ends, color=fill, alpha=0.18, linewidth=0)
        plane.axes.vlines(at, *ends, color=fill, alpha=0.4, linewidth=0.8)
        plane.axes.plot(at, mean, color=fill, linewidth=1.4, marker="o", markersize=2.5)
    pad = 0.1 + 0.01 * depth if depth > 1 else 1.0
    seen = [np.stack([mean, *ends]) for mean, ends in levels.values()]
    plane.limits((-pad, depth - 1 + pad), np.concatenate(seen))
    plane.axes.set_xticks([])
    plane.row([str(i) for i in range(depth)], at.tolist(), plane.bottom + 0.12)
    plane.foot("layer")
    plane.name([(f"level {k}", float(mean[-1]), INKS[k - 1]) for k, (mean, _) in levels.items()])
    return plane.sheet.figure


# -------------------------------------------------------------------------------------------------------- one image


@dataclass(frozen=True)
class Grid:
    """Where the maps stand: lines of layers, then a line of what is made of all layers."""

    layers: int
    width: float  # of a map
    height: float
    start: float  # where the first column begins

    @property
    def across(self) -> int:
        """As even as can be: eight are four and four, and never fewer than the line of all layers."""
        most = ACROSS if self.layers <= MANY else FURTHER
        lines = -(-self.layers // most)
        return max(len(TOGETHER), -(-self.layers // lines))

    @property
    def lines(self) -> int:
        return -(-self.layers // self.across)

    @property
    def column(self) -> float:
        return max(self.width, COLUMN)

    @property
    def row(self) -> float:
        return NAME + self.height + LEGEND + BELOW

    @property
    def right(self) -> float:
        return self.start + self.across * (self.column + GAP) - GAP

    def place(self, index: int) -> tuple[float, float]:
        """Of a layer, or of one of the four after them."""
        layer = index < self.layers
        line, column = divmod(index, self.across) if layer else (self.lines, index - self.layers)
        return self.start + column * (self.column + GAP), MARGIN + TITLE + line * self.row


def example_figure(
    photo: Image.Image,
    panels: Float[np.ndarray, "P h w"],
    title: str,
    told: str,
    *,
    alone: bool = False,
    same_scale: bool = False,
    cells: bool = False,
) -> Figure:
    """The image, a map for each layer, and their mean, minimum, maximum and rollout, each between its own limits.

    `alone`: maps without the image under them. `same_scale`: one pair of limits for all layers, and one for the rest.
    """
    layers = len(panels) - len(TOGETHER)
    if layers < 1 or not panels.size:
        raise InputError(f"maps {list(panels.shape)}: give [L+4 h w], a map for each layer, mean, min, max and rollout")
    size = shape(photo, AREA)
    large = shape(photo, 2 * AREA)
    grid = Grid(layers, *size, MARGIN + large[0] + 2 * GAP)
    height = max(grid.place(len(panels) - 1)[1] + grid.row, MARGIN + TITLE + NAME + large[1] + BELOW)
    sheet = Sheet(grid.right + MARGIN, height + MARGIN - BELOW)
    sheet.text(title, MARGIN, MARGIN + 0.07, sheet.width - 2 * MARGIN, HEAD)
    sheet.text(told, MARGIN, MARGIN + 0.26, sheet.width - 2 * MARGIN, QUIET)
    sheet.text("photo", MARGIN, MARGIN + TITLE + NAME / 2 - 0.02, large[0], LABEL)
    framed(sheet, photo, MARGIN, MARGIN + TITLE + NAME, *large)
    names = [*(f"layer {i}" for i in range(layers)), *TOGETHER]
    common = [colour.limits(part, False) for part in (panels[:layers], panels[layers:])]
    for i, (name, map) in enumerate(zip(names, panels)):
        x, y = grid.place(i)
        ends = common[i >= layers] if same_scale else colour.limits(map, False)
        sheet.text(name, x, y + NAME / 2 - 0.02, grid.column, LABEL)
        panel = Panel.unsigned(map, None if alone else photo, cells, ends, enlarged(photo.size))
        panel.draw(sheet, x, y + NAME, *size, grid.column)
    return sheet.figure
