"""The geometry of a model at one image size: where its patches are, its layers, and the tokens that are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import Attention, run_of
from vitreous.capture.entries import Entry
from vitreous.capture.pauses import Sights
from vitreous.errors import Unsupported
from vitreous.models.decoder import Decoder
from vitreous.models.readers import Readers
from vitreous.models.stages import PLAIN, Stage
from vitreous.models.token_places import Grid, Span
from vitreous.types import Box, Map, Row

Read = tuple[int, tuple[int, ...], tuple[float, ...]]  # a layer, tokens after it, and their weights
Order = tuple[tuple[int, ...], tuple[int, ...]]  # a grid, and the token of each of its cells, row by row


@dataclass(frozen=True)
class Layout:
    """The geometry of one model at one image size. Give one by hand where the layout run is wrong."""

    grid: Grid  # h, w; of each frame of tubelets
    patch: tuple[int, int] | None = None  # pixels of one patch, down and across
    prefix: int = 0  # CLS, distillation and register tokens in front of the patches
    readout: tuple[int, ...] = (0,)  # the tokens that the classifier reads
    share: tuple[float, ...] | None = None  # their weights; None: all alike
    reads: tuple[Read, ...] = ()  # tokens that the classifier also reads after earlier layers
    pooled: bool = False  # the classifier reads them through an attention pool
    blocks: tuple[str, ...] = ()  # names of the modules that hold the layers
    suffix: int = 0  # all other tokens that are no patches
    order: tuple[int, ...] | None = None  # the token of each patch, row by row; None: as they follow the prefix
    rows: tuple[Span, ...] = ()  # the pixels of each row of patches; empty: patch by patch from the top
    columns: tuple[Span, ...] = ()
    added: tuple[int, ...] = ()  # tokens that `vitreous.with_registers` added
    numbers: tuple[int, ...] | None = None  # the attention calls that are layers; None: all over as many tokens
    readers: Readers = ()  # of a detector: the tokens that each of its queries reads
    decoder: Decoder | None = None  # of a detector: what its queries read the tokens through
    pool: int | None = None  # the attention call that is the pool
    foreign: tuple[int, ...] = ()  # the attention calls over other inputs than the image, such as a second image
    queries: tuple[float, ...] | None = None  # the weights of the pool's queries; None: all alike
    calls: int | None = None  # attention calls up to the last layer, where nothing after them is ever read
    layers: int = 0  # how many there are
    entries: tuple[Entry, ...] = ()  # where the tokens that enter each layer are made
    orders: Mapping[int, Order] = field(default_factory=dict)  # of layers with other tokens, by their number of tokens
    sequence_first: bool = False  # the model's tokens are [N B D]
    mixed: bool = False  # some layers change their attention between softmax and values
    flat_blocks: tuple[str, ...] = ()  # in place of `blocks`, of a model whose tokens are [N D], a packed sequence
    alone: bool = False  # the model must be run one image at a time
    probed: bool = False  # found by a run, so that no gradient reaches other tokens than `readout` after the last layer
    footprint: tuple[int, int] = (0, 0)  # bytes that one image takes: without gradients, and with
    linear_output: bool = False  # a linear layer gives the output
    stages: tuple[Stage, ...] = ()  # of each layer, where the layers' tokens differ; empty: a plain ViT
    obstacle: str | None = None  # why tokens do not attend to all tokens in every layer: "attends in 7×7 windows"
    frames: int = 1  # of a video: how many tubelets follow one another
    times: tuple[Span, ...] = ()  # of a video: the frames of each tubelet
    sights: Sights | None = None  # where attention is computed; None: a run is watched throughout

    @property
    def patches(self) -> int:
        return math.prod(self.cells)

    @property
    def cells(self) -> tuple[int, ...]:
        """The axes of a map: (h, w); of a video (T′, h, w)."""
        return (self.frames, *self.grid) if self.times or self.frames > 1 else self.grid

    def blocks_since(self, layer: int) -> int:
        """How many blocks there are from a layer on; attention over time and over space may share one."""
        shared = self.stages and self.times and 0 < len(self.blocks) < self.layers
        return len(self.blocks) if shared else self.layers - layer

    @property
    def lattice(self) -> Grid:
        """The patches as rows and columns, those of later tubelets below: the grid of `stages`."""
        return self.frames * self.grid[0], self.grid[1]

    @property
    def middle(self) -> tuple[int, ...]:
        """A patch near the middle."""
        return tuple(count // 2 for count in self.cells)

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches + self.suffix

    def stage(self, layer: int) -> Stage:
        """How the queries and keys of a layer lie on the grid."""
        return self.stages[layer] if self.stages else PLAIN

    @property
    def read_places(self) -> int:
        """How many tokens the classifier may read: those of the last layer."""
        return self.stages[-1].places if self.stages else self.tokens

    @property
    def last_stage(self) -> int:
        """The first layer whose tokens are those that the classifier reads."""
        asked = [0 if self.times else int(stage.queries.real.sum()) for stage in self.stages]
        other = [stage.merged is not None or count != asked[-1] for stage, count in zip(self.stages, asked)]
        return max((i + 1 for i, differs in enumerate(other) if differs), default=0)

    def in_order(self, read: Row) -> Row:
        """What each place of the last layer has, in the order of the model's own tokens."""
        if not self.stages:
            return read
        if read.shape[1] not in self.orders:
            said = f"layers of {read.shape[1]} tokens have them in different orders"
            raise Unsupported(f"{said}, which this method cannot tell apart. Try gae or rollout.")
        order = list(self.orders[read.shape[1]][1])
        special = sorted(set(range(read.shape[1])) - set(order))
        found = torch.empty_like(read)
        found[:, special + order] = read
        return found

    @property
    def reads_special(self) -> bool:
        """Whether the classifier reads no patch."""
        return max(self.readout, default=0) < self.stages[-1].special if self.stages else False

    @property
    def batch_axis(self) -> int:
        """The axis of the images in the model's own tokens."""
        return 1 if self.sequence_first else 0

    @property
    def flat(self) -> bool:
        """Whether the model's tokens have no axis of images."""
        return bool(self.flat_blocks)

    @property
    def no_blocks(self) -> str:
        """Why no block can be run on other tokens, if none can: the end of a sentence on the model."""
        if self.flat:
            return "has no axis of images in its tokens (they are those of a packed sequence)"
        return "does not keep each layer in a module of its own"

    @property
    def read_tokens(self) -> list[int] | None:
        """The few tokens that are read; None: all, or an attention pool reads them."""
        few = not self.pooled and not self.stages and len(self.readout) * 2 <= self.tokens
        return list(self.readout) if few else None

    @property
    def reads_one_patch(self) -> bool:
        """Whether the output depends on a single patch token, which no model intends."""
        return self.probed and len(self.readout) == 1 < self.patches and self.readout[0] in self.patch_tokens

    @property
    def patch_tokens(self) -> list[int]:
        """The token of each patch, row by row."""
        return list(self.order or range(self.prefix, self.prefix + self.patches))

    def patch_numbers(self, device: torch.device) -> Tensor:
        """The same on a device; without a copy from the CPU, which a CUDA graph forbids, if they are one run."""
        run = run_of(self.patch_tokens)
        if isinstance(run, slice):
            return torch.arange(run.start, run.stop, device=device)
        return torch.tensor(run, device=device)

    @property
    def patch_run(self) -> slice | list[int]:
        """The tokens of the patches as they stand in the sequence."""
        return run_of(sorted(self.patch_tokens))

    @property
    def special(self) -> list[int]:
        """The tokens that are no patches."""
        return sorted(set(range(self.tokens)) - set(self.patch_tokens))

    def one_by_one(self) -> Layout:
        """The layout of a model that is run one image at a time: its footprint makes every batch one image."""
        return replace(self, alone=True, footprint=(2**62, 2**62))

    def token(self, *cell: int) -> int:
        """The token of a patch: of a row and a column; of a video, of a tubelet's time, row and column."""
        number = 0
        for place, count in zip(cell, self.cells, strict=True):
            number = number * count + place
        return self.patch_tokens[number]

    def moments(self, frames: int) -> list[int]:
        """The tubelet that each frame of a video belongs to; −1: none."""
        spans = self.times or tuple(
            (n * frames // self.frames, (n + 1) * frames // self.frames) for n in range(self.frames)
        )
        found = [-1] * frames
        for number, (start, end) in enumerate(spans):
            found[start:end] = [number] * (end - start)
        return found

    def where(self, *cell: int) -> tuple[slice, ...]:
        """The index of a patch's pixels in images [B C Y X], or of a tubelet's in videos [B T C Y X]."""
        every = slice(None)
        if len(cell) == 2:
            return every, every, *self.rectangle(*cell)
        return every, slice(*self.times[cell[0]]), every, *self.rectangle(*cell[1:])

    def lines(self, axis: int, pixels: int) -> list[int]:
        """The row (or, along axis 1, the column) of patches that each pixel belongs to; −1: none."""
        spans, count = (self.rows, self.columns)[axis], self.grid[axis]
        if not spans:
            patch = self.patch[axis] if self.patch else pixels // count
            return [min(pixel // patch, count - 1) for pixel in range(pixels)]
        found = [-1] * pixels
        for number, (start, end) in enumerate(spans):
            found[start:end] = [number] * (end - start)
        return found

    def box(self, size: tuple[int, int]) -> Box | None:
        """The part of an image that the patches cover, None for all of it.

        Patches that reach into a padding end beyond the image.
        """
        if not self.rows or self.patch is None:
            return None
        ends = [
            start + patch if end - start < patch - 1 else end  # cut off by the border of the image, or not
            for (start, end), patch in zip((self.rows[-1], self.columns[-1]), self.patch)
        ]
        found = (self.rows[0][0] / size[0], self.columns[0][0] / size[1], ends[0] / size[0], ends[1] / size[1])
        return None if found == (0, 0, 1, 1) else found

    def rectangle(self, row: int, column: int) -> tuple[slice, slice]:
        """The pixels of a patch."""
        if self.rows:
            return slice(*self.rows[row]), slice(*self.columns[column])
        y, x = self.patch or (1, 1)
        return slice(row * y, (row + 1) * y), slice(column * x, (column + 1) * x)

    def to_map(self, values: Row, layer: int = 0) -> Map:
        """One value per token that enters a layer to one per patch, in place; a token of merged patches is shared."""
        if self.stages:
            return self.stages[layer].cells(values, self.lattice).reshape(-1, *self.cells)
        return values[:, run_of(self.patch_tokens)].reshape(-1, *self.cells)

    def to_grid(self, tokens: Tensor) -> Tensor | None:
        """Tokens [B N D] placed on the grid, [B h w D], without CLS and registers; None if their order is unknown."""
        tokens = tokens.flatten(1, -2)
        count = tokens.shape[1]
        grid, order = self.orders.get(count, (self.cells, ()))
        if not order and count == self.tokens and self.obstacle is None:
            order = tuple(self.patch_tokens)
        return tokens[:, run_of(list(order))].reshape(len(tokens), *grid, -1) if order else None

    def is_layer(self, call: Attention, images: int) -> bool:
        """Does every token attend to every token here, on the way to the output?"""
        b, _, n, m = call.shape
        listed = self.numbers is None or call.number in self.numbers
        return listed and (bool(self.stages) or (b, n, m) == (images, self.tokens, self.tokens))

    def arranged(self, call: Attention, images: int) -> Attention:
        """A layer with its windows in the axis of the images, [B·W H N M]."""
        rows = self.stages[(self.numbers or ()).index(call.number)].rows if self.stages else None
        if rows is None or (rows.heads_inside and call.shape[0] == images * rows.windows):
            return call
        return call.folded(partial(rows.arrange, images=images))

    def is_pool(self, call: Attention, images: int) -> bool:
        """Do learned queries read the tokens here?"""
        b, _, n, m = call.shape
        if self.pool is not None or self.numbers is not None:
            return call.number == self.pool
        return b in (1, images) and m == self.tokens and n < m


def pool_weights(pool: Attention, layout: Layout) -> Row:
    """ρ of an attention pool: what its queries read, by the weight of each query."""
    weights = pool.weights.detach().mean(1)  # [B Q M]
    even = torch.full((weights.shape[1],), 1 / weights.shape[1])
    row = torch.tensor(layout.queries).to(weights) @ weights if layout.queries else even.to(weights) @ weights
    if row.shape[1] == layout.tokens:
        return row
    whole = row.new_zeros(len(row), layout.tokens)  # the pool leaves some tokens out
    whole[:, list(layout.readout)] = row
    return whole


@lru_cache(maxsize=16)
def read_weights(
    tokens: int, readout: tuple[int, ...], share: tuple[float, ...] | None, device: torch.device
) -> Float[Tensor, "N"]:
    """ρ of one image; moved to a device once."""
    weights = torch.zeros(tokens)
    weights[list(readout)] = torch.tensor(share or [1 / len(readout)] * len(readout))
    return weights.to(device)
