"""The similarity of heads and saliency over many images: by class, image by image, and by layer, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from vitreous.errors import InputError
from vitreous.plot.colour import LINES
from vitreous.plot.curves import frame, spread
from vitreous.plot.sheet import GREY, HEAD, LABEL, PALE, QUIET, SMALL, Sheet, Style

UP = "cosine of attention and saliency"
LEFT, NAMES = 0.6, 1.6  # inches, as all lengths: the numbers at the left, the names at the right
ABOVE, UNDER = 0.82, 0.5
HEIGHT = 3.1
LEAST, MOST = 4.2, 11.7  # of a plane's width
PITCH = 0.075  # from head to head, where there is room
LINE = 0.16
TINY = Style(6.0, GREY)
UPRIGHT = 0.068  # a number in that type that stands on its end


@dataclass(frozen=True, eq=False)
class Group:
    """A class: how many images it has, some of them, and the mean of all."""

    name: str
    images: int
    samples: Float[np.ndarray, "n L H"]
    mean: Float[np.ndarray, "L H"]


class Plane:
    """A chart on its sheet: two axes in data units, words around them in inches."""

    def __init__(self, wide: float, title: str, up: str, *, names: float = NAMES, above: float = ABOVE) -> None:
        self.wide, self.above, self.right = wide, above, LEFT + wide
        self.sheet = Sheet(LEFT + wide + names, above + HEIGHT + UNDER)
        self.sheet.text(title, 0.1, 0.17, self.sheet.width - 0.2, HEAD)
        self.sheet.text(up, 0.1, 0.37, self.sheet.width - 0.2, QUIET)
        width, height = self.sheet.width, self.sheet.height
        self.axes = self.sheet.figure.add_axes((LEFT / width, UNDER / height, wide / width, HEIGHT / height))
        frame(self.axes)
        self.axes.locator_params(axis="y", nbins=7)

    @property
    def bottom(self) -> float:
        return self.above + HEIGHT

    def limits(self, across: tuple[float, float], up: np.ndarray, *, zero: bool = False) -> None:
        """Where the axes begin and end: `up` holds every number that must be seen."""
        known = up[np.isfinite(up)]
        low, top = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        pad = 0.06 * (top - low) or 0.05
        self.axes.set_xlim(*across)
        self.axes.set_ylim(0 if zero else low - pad, top + pad)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            low, top = axis.get_view_interval()
            axis.set_ticks([tick for tick in axis.get_majorticklocs() if low <= tick <= top])

    def x(self, value: float) -> float:
        """Inches from the sheet's left edge."""
        low, high = self.axes.get_xlim()
        return LEFT + self.wide * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Inches from the sheet's upper edge."""
        low, high = self.axes.get_ylim()
        return self.above + HEIGHT * (high - value) / (high - low)

    def row(self, words: Sequence[str], at: Sequence[float], y: float) -> None:
        """Words in a line, centred at places of the x axis; every second, third … where there is no room for all."""
        need = max(self.sheet.measure(word, SMALL) for word in words) + 0.06
        apart = min((abs(self.x(b) - self.x(a)) for a, b in pairwise(at)), default=need)
        step = max(1, int(np.ceil(need / apart)))
        for word, place in zip(words[::step], at[::step]):
            self.sheet.text(word, self.x(place), y, need, SMALL, "center")

    def name(self, names: Sequence[tuple[str, float, str]]) -> None:
        """Lines named at their right ends: (name, height of the end, colour); further lines of a name are quiet."""
        order = sorted(names, key=lambda one: -one[1])
        lines = max(name.count("\n") + 1 for name, _, _ in names)
        wanted = [self.y(end) for _, end, _ in order]
        places = spread(wanted, LINE * lines + 0.04 * (lines > 1), self.above, self.bottom)
        for (name, end, fill), y in zip(order, places):
            x = self.right
            self.sheet.axes.plot([x + 0.04, x + 0.2], [self.y(end), y], color=fill, linewidth=0.7, alpha=0.7)
            self.sheet.axes.plot([x + 0.2, x + 0.38], [y, y], color=fill, linewidth=1.8)
            for i, words in enumerate(name.split("\n")):
                room = self.sheet.width - x - 0.5
                self.sheet.text(words, x + 0.43, y + i * 0.14, room, QUIET if i else LABEL)

    def foot(self, words: str) -> None:
        """What the x axis is."""
        self.sheet.text(words, LEFT + self.wide / 2, self.sheet.height - 0.13, self.wide, QUIET, "center")


# ----------------------------------------------------------------------------------------------------------- by class


def class_figure(groups: Sequence[Group]) -> Figure:
    """Every image's scores over the heads 1 … L·H: thin lines in the class's colour, the class mean thick."""
    if not groups or not all(group.samples.size for group in groups):
        raise InputError("there is no image to draw")
    layers, heads = groups[0].mean.shape
    index = np.arange(1, layers * heads + 1)
    plane = Plane(
        width(layers * heads, 0.06),
        "Similarity of every head, image by image",
        UP,
        names=room_for([group.name for group in groups]),
    )
    for group, fill in zip(groups, LINES):
        lines = group.samples.reshape(len(group.samples), -1)
        faint = float(np.clip(8 / len(lines), 0.16, 0.5))
        plane.axes.plot(index, lines.T, color=fill, linewidth=0.5, alpha=faint, zorder=2)
    for group, fill in zip(groups, LINES):
        marker = "o" if layers * heads == 1 else None
        plane.axes.plot(index, group.mean.ravel(), color=fill, linewidth=1.8, marker=marker, markersize=3, zorder=3)
    seen = np.concatenate([group.samples.ravel() for group in groups] + [group.mean.ravel() for group in groups])
    plane.limits((0.5, layers * heads + 0.5), seen)
    edges = np.arange(layers + 1) * heads + 0.5
    mark_layers(plane, edges)
    first = [str(int(edge + 0.5)) for edge in edges[:-1]]
    plane.row(first, [edge + 0.5 for edge in edges[:-1]], plane.bottom + 0.1)
    plane.foot("head, numbered through the layers (the first of each is written)")
    plane.name(
        [(f"{group.name}\n{told(group)}", float(group.mean.flat[-1]), fill) for group, fill in zip(groups, LINES)]
    )
    return plane.sheet.figure


def told(group: Group) -> str:
    """How many images are drawn."""
    shown = len(group.samples)
    return f"{shown} of {group.images:,} images" if shown < group.images else f"{shown} image{'s' if shown > 1 else ''}"


def room_for(names: Sequence[str]) -> float:
    """At the right of a plane, in type of 8 points."""
    return 0.55 + float(np.clip(0.075 * max(map(len, names)), 1.05, 2.0))


def mark_layers(plane: Plane, edges: np.ndarray) -> None:
    """Pale lines between the layers, their names above."""
    plane.axes.set_xticks([])
    for edge in edges[1:-1]:
        plane.axes.axvline(edge, color=PALE, linewidth=0.6, zorder=1)
    middles = (edges[1:] + edges[:-1]) / 2
    names = [f"layer {i}" for i in range(len(middles))]
    room = plane.x(float(edges[1])) - plane.x(float(edges[0]))
    if max(plane.sheet.measure(name, SMALL) for name in names) + 0.06 > room:
        names = [str(i) for i in range(len(middles))]
        plane.sheet.text("layer", LEFT - 0.05, ABOVE - 0.14, LEFT, SMALL, "right")
    plane.row(names, middles.tolist(), ABOVE - 0.14)


def width(slots: int, pitch: float = PITCH) -> float:
    """The width of a plane for this many heads."""
    return float(np.clip(pitch * slots, LEAST, MOST))


# ----------------------------------------------------------------------------------------------------------- by layer


def layer_figure(mean: Float[np.ndarray, "L H"], ends: Float[np.ndarray, "2 L H"], images: int) -> Figure:
    """The heads of each layer from the lowest to the highest mean, with intervals and the layer's mean as a step."""
    if not mean.size:
        raise InputError("there is no head to draw")
    layers, heads = mean.shape
    plane = Plane(
        width(layers * (heads + 1)),
        "Similarity of every head, sorted inside its layer",
        f"{UP}, mean of {images:,} image{'s' if images > 1 else ''}",
    )
    order = np.argsort(mean, axis=1, kind="stable")
    edges = np.arange(layers + 1) * (heads + 1.0)
    plane.limits((0.0, float(edges[-1])), np.stack([mean, *ends]))
    dot = min(2.2, 72 * (plane.x(1.0) - plane.x(0.0)))  # points: neighbours do not cover each other
    for layer, sorted_heads in enumerate(order):
        x = edges[layer] + 1 + np.arange(heads)
        low, middle, high = (values[layer, sorted_heads] for values in (ends[0], mean, ends[1]))
        plane.axes.fill_between(x, low, high, color=LINES[0], alpha=0.2, linewidth=0, zorder=2)
        plane.axes.vlines(x, low, high, color=LINES[0], alpha=0.5, linewidth=0.4 * dot, zorder=2)
        plane.axes.plot(x, middle, color=LINES[0], linewidth=0.45 * dot, marker="o", markersize=dot, zorder=3)
    plane.axes.stairs(mean.mean(1), edges, baseline=None, color=LINES[1], linewidth=1.3, zorder=2.5)
    mark_layers(plane, edges)
    number_heads(plane, order, edges)
    plane.foot("heads, the lowest mean of each layer first")
    last = order[-1]
    plane.name(
        [
            ("mean of a head", float(mean[-1, last[-1]]), LINES[0]),
            ("mean of its layer", float(mean[-1].mean()), LINES[1]),
        ]
    )
    return plane.sheet.figure


def number_heads(plane: Plane, order: np.ndarray, edges: np.ndarray) -> None:
    """Which head each point is, under it: all of them, or the ends of each layer where there is no room."""
    layers, heads = order.shape
    apart, y = plane.x(1.0) - plane.x(0.0), plane.bottom + 0.11
    flat = plane.sheet.measure(str(heads - 1), TINY) + 0.03 <= apart
    if flat or apart >= UPRIGHT:
        for layer, place in np.ndindex(layers, heads):
            x = plane.x(float(edges[layer]) + 1 + place)
            drawn = plane.sheet.axes.text(x, y, str(order[layer, place]), color=GREY, ha="center", va="center")
            drawn.set(fontproperties=TINY.font, rotation=0 if flat else 90)
    else:
        said = [f"{layer[0]}…{layer[-1]}" for layer in order]
        if max(plane.sheet.measure(words, TINY) for words in said) + 0.03 > apart * (heads + 1):
            return
        for words, edge in zip(said, edges):
            x = plane.x(float(edge) + (heads + 1) / 2)
            plane.sheet.text(words, x, y, apart * (heads + 1), TINY, "center")
    plane.sheet.text("head", LEFT - 0.05, y, LEFT, TINY, "right")
