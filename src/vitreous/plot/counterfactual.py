"""What would change a decision: the image, the contrast map, the image after the change, and two probabilities."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from vitreous.plot.curves import frame
from vitreous.plot.explained import Explained
from vitreous.plot.panel import MARGIN, Panel, changed_options, footer, framed, legend_height, shape
from vitreous.plot.sheet import BODY, GREY, HEAD, LABEL, QUIET, Sheet, Style

GAP = 0.25  # inches, as all lengths below
HEADS = 0.42
LINE = 0.17
CHART = 3.4
FOOTER = 0.25
LEFT, UNDER = 0.42, 0.42  # of the chart: its numbers
LEAVES, WANTED = "#2C7BB6", "#D55E00"  # the class that is left, the wanted one
CHANGED = {"tokens": "tokens removed", "pixels": "patches hidden", "exchange": "patches exchanged"}


@runtime_checkable
class Course(Protocol):
    """The probabilities of two classes after 0, 1, 2, … patches are changed."""

    @property
    def source(self) -> tuple[float, ...]: ...
    @property
    def to(self) -> tuple[float, ...]: ...


@runtime_checkable
class Named(Protocol):
    """A class, with its probability before and after the change."""

    @property
    def label(self) -> str: ...
    @property
    def before(self) -> float: ...
    @property
    def after(self) -> float: ...


@runtime_checkable
class Turned(Protocol):
    """What `vitreous.counterfactual` found."""

    @property
    def source(self) -> Named: ...
    @property
    def to(self) -> Named: ...
    @property
    def decision(self) -> Named: ...
    @property
    def sentence(self) -> str: ...
    @property
    def way(self) -> str: ...
    @property
    def map(self) -> Explained: ...
    @property
    def shown(self) -> Image.Image: ...
    @property
    def path(self) -> Course: ...
    @property
    def curve(self) -> Course: ...
    def __len__(self) -> int: ...


def counterfactual_figure(found: Turned, *, cells: bool = False) -> Sheet:
    """The image, the contrast map, the image after the change, and the two probabilities along the way."""
    views = found.map.views
    photo = found.shown if views is None else views[0]
    panel = Panel.of(found.map, 0, photo, cells)
    width, height = shape(photo)
    above = MARGIN + 1.5 * LINE
    row = HEADS + height + legend_height(found.map.signed)
    sheet = Sheet(2 * MARGIN + 3 * (width + GAP) + CHART, above + row + FOOTER + MARGIN)
    sheet.text(found.sentence, MARGIN, MARGIN + 0.07, sheet.width - 2 * MARGIN, HEAD)
    columns = [MARGIN + i * (width + GAP) for i in range(4)]
    heads = [
        (found.map.names[0], f"{found.source.label} {found.source.before:.0%}"),
        (f"{found.source.label} rather than {found.to.label}", method_of(found.map)),
        (f"{len(found)} {CHANGED[found.way]}", f"{found.decision.label} {found.decision.after:.0%}"),
    ]
    for x, (head, under) in zip(columns, heads):
        sheet.text(head, x, above + 0.07, width, BODY)
        sheet.text(under, x, above + 0.25, width, QUIET)
    framed(sheet, photo, columns[0], above + HEADS, width, height)
    panel.draw(sheet, columns[1], above + HEADS, width, height, width)
    framed(sheet, found.shown, columns[2], above + HEADS, width, height)
    footer(sheet, found.map, found.map.names[0])
    chart(sheet, found, columns[3], above, CHART, HEADS + height)
    return sheet


def method_of(found: Explained) -> str:
    return " · ".join(part for part in (found.method, changed_options(found)) if part)


def chart(sheet: Sheet, found: Turned, x: float, y: float, width: float, height: float) -> None:
    """The two probabilities: along the found set (bold) and along the order of the map (thin)."""
    sheet.text(f"probability, by {CHANGED[found.way]}", x, y + 0.07, width, BODY)
    sheet.text(found.source.label, x, y + 0.25, width / 2, Style(LABEL.size, LEAVES))
    sheet.text(found.to.label, x + width / 2, y + 0.25, width / 2, Style(LABEL.size, WANTED))
    top, high = y + HEADS, height - HEADS - UNDER + 0.2
    place = (
        (x + LEFT) / sheet.width,
        1 - (top + high) / sheet.height,
        (width - LEFT) / sheet.width,
        high / sheet.height,
    )
    axes = sheet.figure.add_axes(place)
    for course, thick in ((found.curve, 0.9), (found.path, 2.2)):
        for values, colour in ((course.source, LEAVES), (course.to, WANTED)):
            axes.plot(range(len(values)), values, color=colour, linewidth=thick, alpha=0.55 if thick < 1 else 1)
    axes.axvline(len(found), color=GREY, linewidth=0.7, linestyle=(0, (2, 3)))
    frame(axes)
    axes.set_ylim(0, max(1e-3, *found.curve.source, *found.curve.to, *found.path.to) * 1.05)
    axes.set_xlim(0, max(2, min(len(found.curve.source) - 1, 3 * len(found) + 3)))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    said = "bold: the set found · thin: the map's order"
    sheet.text(said, x + LEFT, top + high + 0.36, width - LEFT, QUIET)
