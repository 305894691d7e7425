from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from vitreous.errors import TargetError, Unsupported
from vitreous.metrics.case import Case, Measured, widened
from vitreous.metrics.pool import Pool
from vitreous.models.layout import Layout
from vitreous.models.output import Form
from vitreous.registry import metric
from vitreous.types import Images, Map, Scores

Spans = Sequence[tuple[float | int, float | int]]  # where each row (or column) of a map begins and ends
Mosaics = tuple[Images, list[int]]  # and the cell of each image in its own mosaic


@metric(better="higher", cite="bohle2021convolutional", again=True, others=True)
def grid_pg(
    case: Case,
    *,
    n: Annotated[int, Field(ge=2, le=8, description="n×n images in a mosaic")] = 2,
    seed: Annotated[int, Field(ge=0, description="another seed gives other mosaics")] = 0,
) -> Measured:
    """How much of the positive evidence for an image's class lies on that image in a mosaic with images of other
    classes; where it must lie is known without masks.

    Σ_cell s⁺ / Σ s⁺, s = the map of the mosaic for the class of the image in that cell, at the map's own resolution;
    chance: 1/n²; 0 where nothing is positive. The other images are drawn from all that are evaluated together
    """
    pool, trace = case.rerun_among_others(), case.trace
    if trace.model.form is not Form.VECTOR:
        said = f"{trace.model.name} has {trace.model.form.value}"
        raise Unsupported(
            f"grid_pg needs one score of the whole mosaic; {said}, which is elsewhere there; use deletion"
        )
    images, cells = pool.keep(("grid_pg", n, seed, *case.numbers), lambda: compose(case, pool, n, seed))
    maps = case.again(trace.like(images))
    down, across = (parts(spans_of(trace.layout, maps, axis, trace.size), trace.size[axis], n) for axis in (0, 1))
    return Measured(in_cells(maps, torch.tensor(cells), down, across))


# ------------------------------------------------------------------------------------------------------------- mosaics


def compose(case: Case, pool: Pool, n: int, seed: int) -> Mosaics:
    """A mosaic for each image of the case: the image in a random cell, images of other classes in the other cells."""
    made, cells = [], []
    for i, number in enumerate(case.numbers):
        draw = random.Random(f"grid_pg {seed} {number}")
        own = str(case.target.of_image(i))
        others = pool.others(number, own, n * n - 1, draw)
        if len(others) < n * n - 1:
            raise TargetError(
                f"grid_pg puts {n * n} images of different classes together; the {pool.count} image(s) of this "
                f"evaluation have {len(others) + 1}; give images of more classes (or target=None, each its own class)"
            )
        tiles = [pool.image(other)[0] for other in others]
        cells.append(draw.randrange(n * n))
        tiles.insert(cells[-1], case.trace.images[i])
        made.append(mosaic(tiles, n, case.trace.size))
    return torch.stack(made), cells


def mosaic(
    tiles: Sequence[Float[Tensor, "channels _ _"]], n: int, size: tuple[int, int]
) -> Float[Tensor, "channels Y X"]:
    """n×n images, row by row, each resized to its cell: bilinear, without antialiasing."""
    rows, columns = (edges(pixels, n) for pixels in size)
    whole = tiles[0].new_empty(tiles[0].shape[0], *size)
    for i, tile in enumerate(tiles):
        (top, bottom), (left, right) = rows[i // n], columns[i % n]
        cell = F.interpolate(widened(tile)[None], (bottom - top, right - left), mode="bilinear", align_corners=False)
        whole[:, top:bottom, left:right] = cell[0].to(whole)
    return whole


def edges(pixels: int, n: int) -> list[tuple[int, int]]:
    """Where each row (or column) of cells begins and ends."""
    return [(pixels * i // n, pixels * (i + 1) // n) for i in range(n)]


# -------------------------------------------------------------------------------------------------------------- shares


def spans_of(layout: Layout, maps: Map, axis: int, size: tuple[int, int]) -> Spans:
    """The pixels of each row (axis 0) or column (axis 1) of a map."""
    count, pixels = maps.shape[1 + axis], size[axis]
    if tuple(maps.shape[1:]) != layout.grid or not (layout.rows or layout.patch):
        return [(pixels * i / count, pixels * (i + 1) / count) for i in range(count)]
    sides = [layout.rectangle(i, 0)[0] if axis == 0 else layout.rectangle(0, i)[1] for i in range(count)]
    return [(side.start, side.stop) for side in sides]


def parts(spans: Spans, pixels: int, n: int) -> Float[Tensor, "n count"]:
    """How much of each row of a map lies in each row of cells; a row on a border belongs to both in part."""
    inside = [
        [max(0.0, min(end, bottom) - max(start, top)) / (end - start) for start, end in spans]
        for top, bottom in edges(pixels, n)
    ]
    return torch.tensor(inside, dtype=torch.float64)


def in_cells(
    maps: Map, cells: Int[Tensor, "B"], down: Float[Tensor, "n rows"], across: Float[Tensor, "n columns"]
) -> Scores:
    """The share of the positive values of each map that lies in its cell, in float64."""
    positive = maps.detach().cpu().double().clamp(min=0)
    each = torch.einsum("ni,bij,mj->bnm", down, positive, across).flatten(1)
    total = positive.sum((1, 2))
    found = each.gather(1, cells[:, None])[:, 0] / total
    return found.masked_fill(total == 0, 0).to(maps.device)
