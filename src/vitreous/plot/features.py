"""Patch features: principal components as colours, and how similar patches are to one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from vitreous._support.words import percent
from vitreous.plot.overlay import bare, enlarged, paint, reduced
from vitreous.plot.panel import MARGIN, STRIP, framed, shape, sign
from vitreous.plot.sheet import HEAD, LABEL, QUIET, SMALL, Sheet

ROWS = 16  # images in a figure
ACROSS = 6  # layers in a line, of one image
AREAS = ((4, 2.2), (7, 1.5), (10, 1.0), (14, 0.7), (10**6, 0.45))  # columns at most, and the area of a map in them
GAP = 0.1  # inches, as all lengths below
TITLE = 0.66
NAME = 0.34  # layer and numbers above a map
UNDER = 0.17  # a line under a map
FOOTER = 0.32
LEAST = 5.4  # the width of a sheet
BACKGROUND = 0.9  # grey of patches that are no foreground
MARK, HALO = "white", "black"
Place = tuple[int, int]


@runtime_checkable
class Looked(Protocol):
    """A view of the features of several images."""

    @property
    def model(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def views(self) -> Any: ...
    @property
    def title(self) -> str: ...
    @property
    def images(self) -> tuple[str, ...]: ...
    @property
    def layers(self) -> tuple[int, ...]: ...


@runtime_checkable
class Coloured(Looked, Protocol):
    """`vitreous.inspect.features`."""

    @property
    def foreground(self) -> bool: ...
    @property
    def fitted(self) -> bool: ...
    @property
    def what(self) -> str: ...
    @property
    def patches(self) -> int: ...
    @property
    def shares(self) -> Mapping[int, list[float]]: ...
    def colours(self, layer: int, index: int) -> np.ndarray: ...


@runtime_checkable
class Compared(Looked, Protocol):
    """`vitreous.inspect.similarity`."""

    @property
    def centred(self) -> bool: ...
    @property
    def patch(self) -> Place: ...
    @property
    def places(self) -> tuple[Place, ...]: ...
    @property
    def maps(self) -> Mapping[int, list[np.ndarray]]: ...
    def best(self, layer: int, index: int) -> tuple[Place, float]: ...


@dataclass(frozen=True)
class Table:
    """Where the maps stand: a row for each image, a column for each layer; the layers of one image in lines."""

    images: int
    layers: int
    width: float
    height: float
    below: float  # under each map

    @property
    def across(self) -> int:
        """Layers in a line; as even as can be."""
        if self.images > 1 or self.layers <= ACROSS:
            return self.layers
        lines = -(-self.layers // ACROSS)
        return -(-self.layers // lines)

    @property
    def lines(self) -> int:
        return self.images * -(-self.layers // self.across)

    @property
    def head(self) -> float:
        """Above every line of one image; else above the first."""
        return NAME if self.images == 1 else 0.0

    @property
    def top(self) -> float:
        return MARGIN + TITLE + (0.0 if self.images == 1 else NAME)

    @property
    def column(self) -> float:
        return self.width + GAP

    @property
    def right(self) -> float:
        return MARGIN + (self.across + 1) * self.column - GAP + MARGIN

    @property
    def bottom(self) -> float:
        return self.y(0, 0) - self.head + self.lines * self.line

    @property
    def line(self) -> float:
        return self.head + self.height + self.below + GAP

    def x(self, layer: int) -> float:
        return MARGIN + (1 + layer % self.across) * self.column

    def y(self, image: int, layer: int = 0) -> float:
        """The upper edge of a map."""
        return self.top + self.head + (image * -(-self.layers // self.across) + layer // self.across) * self.line


def tabled(view: Looked, below: float) -> Table:
    """A table of maps as large as the number of columns allows."""
    images, layers = min(len(view.images), ROWS), len(view.layers)
    columns = 1 + (min(layers, ACROSS) if images == 1 else layers)
    area = next(area for most, area in AREAS if columns <= most)
    return Table(images, layers, *shape(view.views[0], area), below)


def colours_figure(view: Coloured, *, smooth: bool = False) -> Figure:
    """The images at the left, at the right the components of each layer as red, green and blue."""
    table = tabled(view, UNDER)
    sheet = begun(view, table, *told_of(view))

    def map(image: int, number: int, photo: Image.Image) -> Image.Image:
        return coloured(view.colours(view.layers[number], image), photo.size, smooth)

    def head(number: int) -> str:
        return " · ".join(percent(share) for share in view.shares[view.layers[number]])

    photos(sheet, view, table)
    fill(sheet, view, table, map, head)
    note = "under the name of each layer: the share of the variance along each component, red · green · blue"
    sheet.text(note, MARGIN, table.bottom + 0.1, sheet.width - 2 * MARGIN, SMALL)
    sign(sheet, view.model, signed_by(view), view.version)
    return sheet.figure


def told_of(view: Coloured) -> tuple[str, str]:
    """What the colours are, and of what."""
    many = f"{len(view.images)} images" if len(view.images) > 1 else "one image"
    where = " in the foreground" if view.foreground else ""
    basis = f"one basis for {many} ({view.patches:,} patches)" if view.fitted else "a basis that was given"
    return f"three principal components{where} of {view.what}", f"{basis}: equal colours are equal components"


def similarity_figure(view: Compared, *, cells: bool = False) -> Figure:
    """The images at the left, at the right the cosine of every patch with the framed one; best matches are framed."""
    table = tabled(view, UNDER)
    centred = ", less the mean of all patches" if view.centred else ""
    framed = "framed: the patch, and the most similar one of each image"
    sheet = begun(view, table, f"cosine of the features{centred}", framed)

    def map(image: int, number: int, photo: Image.Image) -> Image.Image:
        size = enlarged(photo.size)
        return bare(view.maps[view.layers[number]][image], True, cells=cells, limits=(-1.0, 1.0), size=size)

    photos(sheet, view, table)
    frame(sheet, table, MARGIN, table.y(0), view.patch, view.views[0].size, fine_grid(view))
    fill(sheet, view, table, map, lambda number: "")
    for image in range(table.images):
        for number, layer in enumerate(view.layers):
            (row, column), cosine = view.best(layer, image)
            x, y, grid = table.x(number), table.y(image, number), view.maps[layer][image].shape
            size = view.views[image].size
            frame(sheet, table, x, y, (row, column), size, (grid[0], grid[1]))
            if image == 0:
                frame(sheet, table, x, y, view.places[number], size, (grid[0], grid[1]), thick=True)
            sheet.text(f"{cosine:.2f} at {row},{column}", x, y + table.height + 0.09, table.width, SMALL)
    legend(sheet, table.bottom + 0.06)
    sign(sheet, view.model, signed_by(view), view.version)
    return sheet.figure


def fine_grid(view: Compared) -> Place:
    """The finest grid of the first image, on which the patch was chosen."""
    found = max((view.maps[layer][0].shape for layer in view.layers), key=np.prod)
    place = view.places[[view.maps[layer][0].shape for layer in view.layers].index(found)]
    times = max(1, round((view.patch[0] + 0.5) / (place[0] + 0.5)))
    return found[0] * times, found[1] * times


# ------------------------------------------------------------------------------------------------------------- pieces


def begun(view: Looked, table: Table, *told: str) -> Sheet:
    """A sheet with its title."""
    sheet = Sheet(max(LEAST, table.right), table.bottom + 0.2 + FOOTER + MARGIN / 2)
    room = sheet.width - 2 * MARGIN
    sheet.text(view.title, MARGIN, MARGIN + 0.07, room, HEAD)
    for i, line in enumerate(told):
        sheet.text(line, MARGIN, MARGIN + 0.26 + 0.16 * i, room, QUIET)
    return sheet


def photos(sheet: Sheet, view: Looked, table: Table) -> None:
    """The images in the first column, their names under them."""
    for i in range(table.images):
        y = table.y(i)
        framed(sheet, reduced(view.views[i]), MARGIN, y, table.width, table.height)
        sheet.text(view.images[i], MARGIN, y + table.height + 0.09, table.width, SMALL)


def fill(
    sheet: Sheet,
    view: Looked,
    table: Table,
    map: Callable[[int, int, Image.Image], Image.Image],
    head: Callable[[int], str],
) -> None:
    """A map for each image and layer, layers named above."""
    for number, layer in enumerate(view.layers):
        y = table.y(0, number)
        sheet.text(f"layer {layer}", table.x(number), y - NAME + 0.1, table.width, LABEL)
        sheet.text(head(number), table.x(number), y - NAME + 0.24, table.width, SMALL)
    for i in range(table.images):
        photo = reduced(view.views[i])
        for number in range(table.layers):
            framed(sheet, map(i, number, photo), table.x(number), table.y(i, number), table.width, table.height)


def coloured(values: np.ndarray, size: tuple[int, int], smooth: bool) -> Image.Image:
    """Red, green and blue of each patch as an image of the shape of the photo; NaN is background."""
    bytes = np.where(np.isnan(values), BACKGROUND, values)
    image = Image.fromarray((bytes * 255 + 0.5).astype(np.uint8))
    return image.resize(enlarged(size), Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST)


def frame(
    sheet: Sheet,
    table: Table,
    x: float,
    y: float,
    patch: Place,
    size: tuple[int, int],
    grid: Place,
    thick: bool = False,
) -> None:
    """A frame around a patch of an image that is fitted into a map's room."""
    scale = min(table.width / size[0], table.height / size[1])
    wide, high = size[0] * scale / grid[1], size[1] * scale / grid[0]
    for ink, line in ((HALO, 2.6 if thick else 1.8), (MARK, 1.4 if thick else 0.8)):
        place = (x + patch[1] * wide, y + patch[0] * high)
        sheet.axes.add_patch(Rectangle(place, wide, high, facecolor="none", edgecolor=ink, linewidth=line, zorder=4))


def legend(sheet: Sheet, y: float) -> None:
    """The colours of a cosine."""
    ramp = paint(np.linspace(0, 1, 256), True, False)
    width = 1.6
    sheet.image(ramp[None].astype(np.uint8), MARGIN, y, width, STRIP)
    for said, x, align in (("−1", 0.0, "left"), ("0", width / 2, "center"), ("1: the same direction", width, "left")):
        sheet.text(said, MARGIN + x, y + STRIP + 0.09, 2.0, SMALL, "center" if align == "center" else "left")


def signed_by(view: Looked) -> str:
    shown = min(len(view.images), ROWS)
    return view.image if shown == len(view.images) else f"{shown} of {view.image}"
