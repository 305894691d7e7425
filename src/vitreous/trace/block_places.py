"""Where the tokens that leave a block lie in the image: known of a plain ViT, measured of every other model.

Windowed, pyramid and convolutional models return [B N D] in an order of their own, [B h w D] or [B D h w]. Each way to
read an output by its shape is tried: some cells of its grid are changed in an image of noise, one at a time, and the
tokens that change most for each must be those at its place. Where attention has mixed the tokens too much to tell, the
reading of another layer of the same shape, or with its channels on the same side, holds, or the order in which as many
tokens enter an attention of the model, which was measured too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous._support.precision import doubled
from vitreous.errors import Unsupported
from vitreous.models.layout import Layout
from vitreous.models.stages import covering
from vitreous.models.survey_run import noise_images
from vitreous.models.token_places import Grid
from vitreous.trace.block_outputs import block_outputs
from vitreous.trace.trace import Trace

CELLS = 12  # that are changed in each grid
SHARE = 0.7  # of them that must be found: at their places, in large grids at these or beside them
LARGE = 4  # rows and columns from which a grid is large
Shape = tuple[int, ...]
Features = Float[Tensor, "B *frames h w D"]


@dataclass(frozen=True)
class Reading:
    """How the output of a block is put on its grid."""

    grid: Grid
    order: tuple[int, ...]  # the token of each cell, row by row
    channels_first: bool = False

    def place(self, tokens: Tensor) -> Features:
        """[B N D], [B h w D] or [B D h w] to [B h w D]."""
        flat = tokens.movedim(1, -1).flatten(1, -2) if self.channels_first else tokens.flatten(1, -2)
        return flat[:, list(self.order)].reshape(len(flat), *self.grid, -1)


def on_grid(trace: Trace, layer: int, tokens: Tensor) -> Features:
    """What leaves a block, on the patch grid; raise if its places are not known."""
    layout = trace.layout
    plain = layout.obstacle is None and tokens.ndim == 3 and tokens.shape[1] == layout.tokens
    if plain or len(trace.extent) == 3:
        return trace.to_patches(tokens)
    question = ("places of what leaves blocks", trace.extent)
    reading: Reading | None = trace.facts.find(question, lambda: readings(trace))[layer]
    if reading is None or len(tokens) != len(trace):
        shape = "×".join(map(str, tokens.shape[1:]))
        said = f"what leaves layer {layer} of {trace.model.name} ({shape}) cannot be matched with patches of the image"
        raise Unsupported(f"{said}. Try another layer, or of='queries'.")
    return reading.place(tokens)


def readings(trace: Trace) -> dict[int, Reading | None]:
    """How to read what leaves every block; None where it is not known."""
    layers = range(trace.layout.layers)
    image = noise_images(trace.model, trace.extent)
    shapes = {layer: tuple(out.shape[1:]) for layer, out in block_outputs(trace, image[:1], layers).items()}
    found: dict[int, Reading | None] = dict.fromkeys(layers)
    tried = {layer: list(ways(trace.layout, shape)) for layer, shape in shapes.items()}
    for grid in dict.fromkeys(way.grid for some in tried.values() for way in some):
        own = [layer for layer in layers if found[layer] is None and any(way.grid == grid for way in tried[layer])]
        cells = spread(grid)
        changed = torch.cat([image[:1], *(exchanged(trace.layout, image, grid, cell) for cell in cells)])
        for layer, tokens in block_outputs(trace, changed, own).items():
            some = [way for way in tried[layer] if way.grid == grid]
            found[layer] = next((way for way in some if answers(way.place(tokens), cells)), None)
    measured = {layer: reading for layer, reading in found.items() if reading is not None}
    return {
        layer: reading or alike(tried[layer], shapes, layer, measured) or expected(trace.layout, shapes[layer])
        for layer, reading in found.items()
    }


def alike(
    tried: list[Reading], shapes: Mapping[int, Shape], layer: int, measured: Mapping[int, Reading]
) -> Reading | None:
    """The reading of another layer of this shape; of a grid with channels, the only one with these on the same side."""
    same = [reading for other, reading in measured.items() if shapes[other] == shapes[layer]]
    if same:
        return same[0]
    sides = {reading.channels_first for other, reading in measured.items() if len(shapes[other]) == 3}
    some = [way for way in tried if len(shapes[layer]) == 3 and {way.channels_first} == sides]
    return some[0] if len(some) == 1 else None


def ways(layout: Layout, shape: Shape) -> Iterator[Reading]:
    """The ways in which an output may be read, by its shape without the axis of the images."""
    grids: dict[Grid, None] = dict.fromkeys([layout.grid, *(stage.grid for stage in layout.stages)])
    grids |= dict.fromkeys((grid[0], grid[1]) for grid, _ in layout.orders.values() if len(grid) == 2)
    if len(shape) == 3:
        for grid in grids:
            if shape[:2] == grid:
                yield Reading(grid, tuple(range(math.prod(grid))))
            if shape[1:] == grid:
                yield Reading(grid, tuple(range(math.prod(grid))), channels_first=True)
    known = expected(layout, shape)
    if known is not None:
        yield known
    count = math.prod(shape[:-1])
    special = {0, layout.prefix, *(stage.special for stage in layout.stages)}
    for grid in grids:
        if len(shape) == 2 and count - math.prod(grid) in special:
            yield Reading(grid, tuple(range(count - math.prod(grid), count)))


def expected(layout: Layout, shape: Shape) -> Reading | None:
    """The order in which as many tokens enter an attention; None if it is not known, or the shape says otherwise."""
    count = math.prod(shape[:-1])
    if len(shape) != 2 or count not in layout.orders or len(layout.orders[count][0]) != 2:
        return None
    (h, w), order = layout.orders[count]
    return Reading((h, w), order)


# ---------------------------------------------------------------------------------------------------------- measuring


def spread(grid: Grid) -> list[Grid]:
    """Some cells of a grid, all over it."""
    count = math.prod(grid)
    random = torch.Generator().manual_seed(0)
    chosen = torch.randperm(count, generator=random)[:CELLS].tolist()
    return [divmod(cell, grid[1]) for cell in chosen]


def exchanged(layout: Layout, images: Tensor, grid: Grid, cell: Grid) -> Tensor:
    """The first image with the pixels of one cell of a grid taken from the second."""
    changed = images[:1].clone()
    rows, columns = (
        [int(i) for i in (covering(fine, own) == place).nonzero().flatten()]
        for fine, own, place in zip(layout.grid, grid, cell)
    )
    for row in rows:
        for column in columns:
            where = layout.where(row, column)
            changed[where] = images[1:][where]
    return changed


def answers(placed: Features, cells: Sequence[Grid]) -> bool:
    """Whether the tokens that change most are at the places of the cells that were changed, [1 + cells h w D].

    How much a place changes is compared with how much it changes for the other cells: some tokens always change much.
    """
    change = doubled(placed[1:] - placed[:1]).square().sum(-1).flatten(1)  # [cells h·w]
    share = change / change.sum(0).clamp_min(1e-300)
    weight = (share * change.sum(0).sqrt()).argmax(1).tolist()
    (h, w), near = placed.shape[1:3], 0
    beside = 1 if min(h, w) >= LARGE else 0
    for (row, column), most in zip(cells, weight):
        near += abs(row - most // w) <= beside and abs(column - most % w) <= beside
    return near >= SHARE * len(cells)
