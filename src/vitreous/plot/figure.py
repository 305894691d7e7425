"""Figures for papers and notebooks: images, maps with their legends, and where they came from."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from vitreous._support import marks
from vitreous._support.files import FIGURES, write_whole
from vitreous.errors import InputError, OptionError
from vitreous.plot.explained import Explained
from vitreous.plot.panel import (
    AREA,
    MARGIN,
    Panel,
    changed_options,
    footer,
    framed,
    heading,
    legend_height,
    shape,
)
from vitreous.plot.png import png_file
from vitreous.plot.raster import drawn
from vitreous.plot.sheet import BAR, DPI, LABEL, QUIET, SMALL, Sheet, compact, printable
from vitreous.plot.strip import attribution_strips, is_video, strip_figure

__all__ = [
    "attribution_figure",
    "changed_options",
    "compact",
    "explanation_figure",
    "png_bytes",
    "printable",
    "save_figure",
]

GAP = 0.2  # between columns; inches, as all lengths below
LINE = 0.17  # one line of text
HEADS = 0.42  # a column's name and its options
FOOTER = 0.26
BELOW = 0.14  # under a panel with its legend
BETWEEN = 0.14  # between wrapped lines of panels, besides
LEAST_COLUMN = 1.5
LEAST_WIDTH = 3.6  # of a sheet
ROW_HEAD = 1.15
LEFT = 1.65  # the best classes need this width
BEST_ROW = 0.2  # one of the best classes
ACROSS = 5  # methods side by side
MOST = 16  # images in one figure
BEST = 5  # classes shown
PIXELS = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP"}  # endings, and what Pillow calls them
MATPLOTLIB = Lock()  # it is not made for several threads


def attribution_figure(attribution: Explained, *, cells: bool = False) -> Sheet:
    """One method: each image and its map, or the map alone where images are not known."""
    count = len(attribution)
    if count == 0:
        raise InputError("this attribution holds no map, so there is nothing to draw")
    if is_video(attribution):
        return attribution_strips(attribution, cells=cells)
    shown = min(count, MOST)
    across = 1 if shown == 1 else 2 if shown <= 4 else 3 if shown <= 9 else 4
    views = attribution.views
    panels = [Panel.of(attribution, i, views[i] if views else None, cells) for i in range(shown)]
    width, height = shape(panels[0].picture, 5.5 if shown == 1 else AREA if shown <= 4 else 2.6)
    column = max(width, LEAST_COLUMN)
    before = width + 0.08 if views else 0.0
    label = LINE + 0.06 if count > 1 else 0.0
    step = label + height + legend_height(attribution.signed) + BELOW
    lines = -(-shown // across)
    more = LINE if count > shown else 0.0
    sheet = Sheet(
        max(LEAST_WIDTH, 2 * MARGIN + across * (before + column) + (across - 1) * 1.5 * GAP),
        MARGIN + HEADS + lines * step + more + FOOTER + MARGIN / 2,
    )
    heading(sheet, attribution, MARGIN, MARGIN, sheet.width - 2 * MARGIN, target=True)
    for i, panel in enumerate(panels):
        x = MARGIN + (i % across) * (before + column + 1.5 * GAP)
        y = MARGIN + HEADS + (i // across) * step
        if label:
            sheet.text(image_label(attribution, i), x, y + LINE / 2, before + column, LABEL)
        if panel.photo is not None:
            framed(sheet, panel.photo, x, y + label, width, height)
        panel.draw(sheet, x + before, y + label, width, height, column)
    if more:
        sheet.text(f"… and {count - shown} more", MARGIN, MARGIN + HEADS + lines * step + LINE / 2, 3.0, QUIET)
    footer(sheet, attribution, attribution.names[0] if count == 1 else f"{count} images")
    return sheet


def image_label(attribution: Explained, index: int) -> str:
    """The image's name, and its target where each image has its own."""
    name, own = attribution.names[index], attribution.targets[index]
    return f"{name} · target {shortened(own)}" if own != attribution.target else name


def shortened(target: str | None) -> str:
    """A target that is a file without its folders."""
    kind, colon, rest = str(target).partition(":")
    return f"like {Path(rest).name}" if colon and kind == "like" else str(target)


@dataclass(frozen=True)
class Matrix:
    """Where everything stands in a figure of targets × methods, which wraps after a few methods."""

    rows: int
    columns: int
    panel: tuple[float, float]
    photo: tuple[float, float]  # (0, 0): there is none
    best: int  # classes to show: beside the image where there is one row, else under it
    titled: bool  # are there row heads?
    legend: float

    @property
    def beside(self) -> bool:
        return self.rows == 1

    @property
    def left(self) -> float:
        """Width of the image's column."""
        under = self.best and not self.beside
        return max(self.photo[0], LEFT) if under or self.photo[0] else 0.0

    @property
    def heads(self) -> float:
        """Width of the row heads."""
        return LEFT if self.beside and self.best else ROW_HEAD if self.titled else 0.0

    @property
    def head_lines(self) -> int:
        """How many lines a row head may have."""
        return 2 if self.beside and self.best else 4

    @property
    def place_of_best(self) -> tuple[float, float, float]:
        """Left, upper edge and width of the best classes."""
        if self.beside:
            return self.head, MARGIN + HEADS + (self.head_lines * LINE + 0.1 if self.titled else 0), self.heads
        return MARGIN, MARGIN + HEADS + (self.photo[1] + 0.12 if self.photo[1] else 0), self.left

    @property
    def lines(self) -> int:
        return -(-self.columns // ACROSS)

    @property
    def across(self) -> int:
        """Methods in a line, as even as can be: eight are four and four."""
        return -(-self.columns // self.lines)

    @property
    def column(self) -> float:
        return max(self.panel[0], LEAST_COLUMN)

    @property
    def row(self) -> float:
        return self.panel[1] + self.legend + BELOW

    @property
    def line(self) -> float:
        """Height of one line of methods: their heads and a row for each target."""
        return HEADS + self.rows * self.row + BETWEEN

    @property
    def start(self) -> float:
        """Where the first method's column begins."""
        return self.head + (self.heads + GAP if self.heads else 0)

    @property
    def head(self) -> float:
        return MARGIN + (self.left + 1.5 * GAP if self.left else 0)

    @property
    def width(self) -> float:
        return max(LEAST_WIDTH, self.start + self.across * (self.column + GAP) - GAP + MARGIN)

    @property
    def height(self) -> float:
        """Of everything but the margins and the footer."""
        best = self.place_of_best[1] - MARGIN + self.best * BEST_ROW + BELOW
        return max(self.lines * self.line - BETWEEN, HEADS + self.photo[1] + BELOW, best if self.best else 0)

    def x(self, column: int) -> float:
        return self.start + column % self.across * (self.column + GAP)

    def y(self, column: int, row: int = 0) -> float:
        """The upper edge of a panel; its column's head stands above the first row."""
        return MARGIN + column // self.across * self.line + HEADS + row * self.row


def explanation_figure(
    attributions: Sequence[Sequence[Explained | None]],
    *,
    photo: Image.Image | None = None,
    top: Sequence[tuple[str, float]] = (),
    rows: Sequence[str] = (),
    cells: bool = False,
    values: bool = False,
) -> Sheet:
    """One image: a row for each target, a column for each method; None where a method does not depend on the target.

    `photo` stands at the left, by default what the model saw; maps without views of their own are drawn on it. `top`:
    the model's best classes, or its `values`. `rows`: the row heads.
    """
    columns = [c for c in zip_longest(*attributions) if any(a is not None for a in c)]
    heads = [next(a for a in c if a is not None) for c in columns]
    if not heads:
        raise InputError("there is no attribution to draw")
    if is_video(heads[0]):
        return explained_strips(columns, top, rows, cells, values)
    seen: dict[Any, Image.Image] = {}
    panels = [[None if a is None else Panel.of(a, 0, view(a, photo, seen), cells) for a in c] for c in columns]
    first = next(p for p in panels[0] if p is not None)
    shown, best = photo or first.photo, top[:BEST]
    matrix = Matrix(
        rows=len(attributions),
        columns=len(columns),
        panel=shape(first.picture),
        photo=shape(shown) if shown else (0.0, 0.0),
        best=len(best),
        titled=any(rows),
        legend=legend_height(any(h.signed for h in heads)),
    )
    sheet = Sheet(matrix.width, MARGIN + matrix.height + FOOTER + MARGIN / 2)
    if shown:
        sheet.text(heads[0].names[0], MARGIN, MARGIN + 0.07, matrix.left)
        framed(sheet, shown, MARGIN, MARGIN + HEADS, *matrix.photo)
    draw_best(sheet, best, values, *matrix.place_of_best)
    draw_row_heads(sheet, matrix, rows)
    for c, column in enumerate(panels):
        heading(sheet, heads[c], matrix.x(c), matrix.y(c) - HEADS, matrix.column)
        draw_column(sheet, matrix, c, column)
    footer(sheet, heads[0], heads[0].names[0])
    return sheet


def explained_strips(
    columns: Sequence[Sequence[Explained | None]],
    top: Sequence[tuple[str, float]],
    heads: Sequence[str],
    cells: bool,
    values: bool,
) -> Sheet:
    """One video: a strip for each method and target, one under the other."""
    told = " · ".join(f"{label} {number:.4g}" if values else f"{label} {number:.2f}" for label, number in top[:BEST])
    named = [*heads, *[""] * max(map(len, columns))]
    rows = [(one, 0, head) for column in columns for one, head in zip(column, named) if one is not None]
    return strip_figure(rows, cells=cells, told=told)


def draw_column(sheet: Sheet, matrix: Matrix, c: int, panels: Sequence[Panel | None]) -> None:
    """One method's maps; a remark in place of a map that would be the first row's again."""
    for r, panel in enumerate(panels):
        x, y = matrix.x(c), matrix.y(c, r)
        if panel is not None:
            panel.draw(sheet, x, y, *matrix.panel, matrix.column)
        elif panels[0] is not None:
            sheet.text("same for every target", x, y + 0.08, matrix.column, SMALL)


def view(attribution: Explained, photo: Image.Image | None, seen: dict[Any, Image.Image]) -> Image.Image | None:
    """What to draw the map on; an image that many maps share is read and cropped once."""
    views = attribution.views
    if views is None:
        return photo
    if not isinstance(views.sources, list | tuple):  # a tensor: cheap, and each look at it makes a new object
        shown: Image.Image = views[0]
        return shown
    source = views.sources[0]
    key = source if isinstance(source, str | Path) else id(source), id(views.preprocess)
    if key not in seen:
        seen[key] = views[0]
    return seen[key]


def draw_best(sheet: Sheet, best: Sequence[tuple[str, float]], values: bool, x: float, y: float, width: float) -> None:
    """The model's best classes, a bar behind each label; or its values, which have no bar."""
    room = 0.7 if values else 0.4
    for i, (label, number) in enumerate(best):
        above, thick = y + i * BEST_ROW, BEST_ROW - 0.03
        if not values:
            sheet.box(x, above, width * min(1.0, max(0.0, number)), thick, BAR)
        said = f"{number:.4g}" if values else f"{number:.2f}" if number >= 0.005 else "<0.01"
        sheet.text(label, x + 0.04, above + thick / 2, width - room - 0.08, LABEL)
        sheet.text(said, x + width, above + thick / 2, room, QUIET, "right")


def draw_row_heads(sheet: Sheet, matrix: Matrix, rows: Sequence[str]) -> None:
    """The targets, at the left of each line of panels; a long label loses words before the last, the probability."""
    for line in range(matrix.lines if matrix.titled else 0):
        above = matrix.y(line * matrix.across)
        sheet.text("target", matrix.head, above - HEADS + 0.25, matrix.heads, QUIET)
        for r, words in enumerate(rows[: matrix.rows]):
            lines = sheet.wrap(printable(words), matrix.heads)
            while len(lines) > matrix.head_lines:
                *kept, _, last = [w for w in " ".join(lines).split() if w != "…"]
                lines = sheet.wrap(" ".join([*kept, "…", last]), matrix.heads)
            for i, said in enumerate(lines):
                sheet.text(said, matrix.head, above + r * matrix.row + 0.08 + i * LINE, matrix.heads)


def png_bytes(figure: Sheet | Figure, told: Mapping[str, Any] | None = None) -> bytes:
    """The figure as a PNG file."""
    return rendered(figure, "png", told)


def rendered(figure: Sheet | Figure, kind: str, told: Mapping[str, Any] | None = None) -> bytes:
    """The content of a file of this kind: the whole sheet, with a mark that tells what made it."""
    buffer = io.BytesIO()
    mark = marks.pixels(kind, told) if kind in PIXELS else {}
    if isinstance(figure, Sheet) and figure.canvas is None and kind in PIXELS:
        image = drawn(figure, DPI)
        if kind == "png":
            return png_file(image, DPI, mark["pnginfo"])
        image.save(buffer, PIXELS[kind], dpi=(DPI, DPI), **mark)
        return buffer.getvalue()
    with MATPLOTLIB:
        shown = figure.figure if isinstance(figure, Sheet) else figure
        more = {"pil_kwargs": mark} if kind in PIXELS else {"metadata": marks.vectors(kind, told)}
        whole = shown.bbox_inches  # whatever the user's settings of matplotlib say about saving
        shown.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches=whole, transparent=False, **more)
    return buffer.getvalue()


def save_figure(figure: Sheet | Figure, path: Path, told: Mapping[str, Any] | None = None) -> None:
    """Write a figure to a file, atomically; `told` is what its mark says of what made it."""
    path = Path(path)
    if path.suffix.lower() not in FIGURES:
        raise OptionError(f"{path}: cannot draw a {path.suffix or 'file without ending'}; use {', '.join(FIGURES)}")
    write_whole(path, rendered(figure, path.suffix.lower().removeprefix("."), told))
