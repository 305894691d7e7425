"""All heads of a model beside the saliency of a class: which of them look where the class is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from vitreous.errors import InputError
from vitreous.plot import colour
from vitreous.plot.explained import Explained
from vitreous.plot.overlay import bare
from vitreous.plot.panel import MARGIN, Panel, changed_options, footer, framed, legend_height, shape
from vitreous.plot.sheet import BAR, DPI, GREY, HEAD, QUIET, SMALL, Sheet

ENDS = tuple(to_hex(colour.SIGNED(end)) for end in (1.0, 0.0))  # the frames of the most and the least alike
SAID = "most alike", "least alike"
COLUMN = 1.9  # the image and the two maps under it; inches, as all lengths below
NAME = 0.2  # an image's name
BELOW = 0.16  # under an image
TITLE = 0.42  # the title, and under it what the bars mean
KEY = 0.17  # a line that names a marked head
FOOTER = 0.3
GAP = 0.3  # between the maps and the heads
ROW_NAME, ROW_MEAN = 0.56, 0.42
TALL = 7.2  # all heads together, where layers are few
LEAST, MOST = 0.44, 1.0  # from head to head, where they are square
APART = 0.08  # between heads; under each is its bar
THICK = 0.03  # a bar
FRAME = 0.025

Place = tuple[int, int]  # layer and head


def heads_figure(
    heads: np.ndarray,
    scores: np.ndarray,
    saliency: np.ndarray,
    weighted: Explained,
    photo: Image.Image,
    *,
    title: str,
    cells: bool = False,
) -> Figure:
    """One image: the photo, the saliency and the weighted map at the left, every head's map at the right.

    `heads` [L H h w], `scores` [L H] their similarity to `saliency` [h w]; the most and the least alike are framed.
    """
    if heads.ndim != 4 or not heads.size or scores.shape != heads.shape[:2] or len(weighted) != 1:
        raise InputError(
            f"maps {list(heads.shape)}, scores {list(scores.shape)}, {len(weighted)} images: "
            "give every head's map [L H h w], its score [L H] and the weighted map of one image"
        )
    layers, across = scores.shape
    pitch = min(MOST, max(LEAST, TALL / layers))
    cell = shape(Image.new("L", (heads.shape[3], heads.shape[2])), (pitch - APART) ** 2)
    panels = [Panel.unsigned(saliency, None, cells), Panel.of(weighted, 0, photo, cells)]
    above = MARGIN + TITLE + 2 * KEY + 0.1
    grid = Grid(layers, across, MARGIN + COLUMN + GAP + ROW_NAME, above + NAME, *cell)
    left = NAME + fitted(photo)[1] + BELOW + sum(panel_height(panel) for panel in panels)
    sheet = Sheet(grid.right + ROW_MEAN + MARGIN, max(grid.bottom, above + left) + FOOTER + MARGIN / 2)
    told = (changed_options(weighted), "bars: cosine of head and saliency, 0 to 1")
    sheet.text(title, MARGIN, MARGIN + 0.07, sheet.width - 2 * MARGIN, HEAD)
    sheet.text(" · ".join(t for t in told if t), MARGIN, MARGIN + 0.25, sheet.width - 2 * MARGIN, QUIET)
    marked = extremes(scores)
    draw_key(sheet, scores, marked)
    draw_left(sheet, photo, panels, above)
    draw_names(sheet, grid, scores)
    draw_heads(sheet, grid, heads, scores, marked, cells)
    footer(sheet, weighted, weighted.names[0])
    return sheet.figure


@dataclass(frozen=True)
class Grid:
    """Where the heads stand: a row for each layer."""

    layers: int
    heads: int
    left: float
    above: float
    width: float  # of one
    height: float

    @property
    def step(self) -> float:
        return self.width + APART

    @property
    def row(self) -> float:
        return self.height + APART + THICK + 0.02

    @property
    def right(self) -> float:
        return self.left + self.heads * self.step - APART

    @property
    def bottom(self) -> float:
        return self.above + self.layers * self.row

    def x(self, head: int) -> float:
        return self.left + head * self.step

    def y(self, layer: int) -> float:
        return self.above + layer * self.row


def extremes(scores: np.ndarray) -> tuple[Place, ...]:
    """The most and the least similar head; nothing where all scores are NaN."""
    numbers = np.where(np.isfinite(scores), scores, np.nan)
    if np.isnan(numbers).all():
        return ()
    most, least = (divmod(int(find(numbers)), scores.shape[1]) for find in (np.nanargmax, np.nanargmin))
    return most, least


def fitted(picture: Image.Image) -> tuple[float, float]:
    """As wide as the column, but never much taller than wide."""
    scale = min(COLUMN / picture.width, 1.3 * COLUMN / picture.height)
    return picture.width * scale, picture.height * scale


def panel_height(panel: Panel) -> float:
    return NAME + fitted(panel.picture)[1] + legend_height(panel.signed) + BELOW


def draw_key(sheet: Sheet, scores: np.ndarray, marked: tuple[Place, ...]) -> None:
    """Which heads are framed, and how alike they are."""
    for i, (place, fill, said) in enumerate(zip(marked, ENDS, SAID)):
        y = MARGIN + TITLE + (i + 0.5) * KEY
        sheet.box(MARGIN, y - 0.05, 0.1, 0.1, fill)
        words = f"{said}: layer {place[0]}, head {place[1]} ({scores[place]:.2f})"
        sheet.text(words, MARGIN + 0.16, y, sheet.width - 2 * MARGIN - 0.16, QUIET)


def draw_left(sheet: Sheet, photo: Image.Image, panels: list[Panel], y: float) -> None:
    """The image, the saliency, the weighted map: one under the other."""
    sheet.text("photo", MARGIN, y + NAME / 2 - 0.02, COLUMN)
    framed(sheet, photo, MARGIN, y + NAME, *fitted(photo))
    y += NAME + fitted(photo)[1] + BELOW
    for panel, name in zip(panels, ("saliency of the class", "all heads, weighted")):
        sheet.text(name, MARGIN, y + NAME / 2 - 0.02, COLUMN)
        panel.draw(sheet, MARGIN, y + NAME, *fitted(panel.picture), COLUMN)
        y += panel_height(panel)


def draw_names(sheet: Sheet, grid: Grid, scores: np.ndarray) -> None:
    """Layers at the left, heads above, each layer's mean at the right."""
    names = [f"head {h}" for h in range(grid.heads)]
    y = grid.above - 0.09
    if max(sheet.measure(name, SMALL) for name in names) > grid.step - 0.02:
        names = [str(h) for h in range(grid.heads)]
        sheet.text("head", grid.left - ROW_NAME, y, ROW_NAME, SMALL)
    for h, name in enumerate(names):
        sheet.text(name, grid.x(h) + grid.width / 2, y, grid.step, SMALL, "center")
    sheet.text("mean", grid.right + ROW_MEAN, y, ROW_MEAN, SMALL, "right")
    for layer in range(grid.layers):
        y = grid.y(layer) + grid.height / 2
        sheet.text(f"layer {layer}", grid.left - ROW_NAME, y, ROW_NAME - 0.05, SMALL)
        mean = float(np.mean(scores[layer]))
        sheet.text(f"{mean:.2f}" if np.isfinite(mean) else "–", grid.right + ROW_MEAN, y, ROW_MEAN, SMALL, "right")


def draw_heads(
    sheet: Sheet, grid: Grid, heads: np.ndarray, scores: np.ndarray, marked: tuple[Place, ...], cells: bool
) -> None:
    """Every head's map between its own limits, and under it a bar as long as it is alike."""
    size = round(grid.width * DPI), round(grid.height * DPI)
    frames = dict(zip(marked[::-1], ENDS[::-1]))  # one head alone is the most alike
    for layer, head in np.ndindex(*scores.shape):
        x, y, width, height = grid.x(head), grid.y(layer), grid.width, grid.height
        fill = frames.get((layer, head))
        if fill is not None:
            sheet.box(x - FRAME, y - FRAME, width + 2 * FRAME, height + 2 * FRAME, fill)
        sheet.image(bare(heads[layer, head], False, cells=cells, size=size), x, y, width, height)
        score = float(np.nan_to_num(scores[layer, head]))
        y += height + FRAME + 0.01
        sheet.box(x, y, width, THICK, BAR)
        sheet.box(x, y, width * min(1.0, max(0.0, score)), THICK, fill or GREY)
