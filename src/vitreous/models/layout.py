"""Where the patches are: measured in one layout run, never guessed from √N.

grid       output size of the layer that cut the image into patches
prefix     tokens before the patches: those that two different images share at the first attention
read-out   tokens of the last attention's output on which the model's output depends (non-zero gradient)
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitreous.capture.attention import Attention
from vitreous.capture.attention_backward import Entry, Unfrozen
from vitreous.capture.between_tokens import between_tokens
from vitreous.capture.narrowed_block import Fold
from vitreous.capture.survey import Survey
from vitreous.errors import CaptureError, ModelError
from vitreous.types import Map, Row


@runtime_checkable
class Network(Protocol):
    """What the layout run asks of a model."""

    name: str
    module: nn.Module

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def has_gradients(self) -> bool: ...
    def run(self, images: Tensor) -> Tensor: ...
    def still(self) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class Layout:
    """The geometry of one model at one image size. Give one by hand where the layout run is wrong."""

    grid: tuple[int, int]  # h, w
    patch: tuple[int, int] | None = None  # pixels of one patch, down and across
    prefix: int = 0  # CLS, distillation and register tokens in front of the patches
    readout: tuple[int, ...] = (0,)  # the tokens that the classifier reads
    share: tuple[float, ...] | None = None  # their weights; None: all alike
    pooled: bool = False  # the classifier reads them through an attention pool
    blocks: tuple[str, ...] = ()  # names of the modules that hold the layers
    suffix: int = 0  # tokens behind the patches
    calls: int | None = None  # attention calls up to the last layer, where nothing after them is ever read
    layers: int = 0  # how many there are
    entries: tuple[Entry, ...] = ()  # where the tokens that enter each layer are made
    sequence_first: bool = False  # the model's tokens are [N B D]
    probed: bool = False  # found by a run, so that no gradient reaches other tokens than `readout` after the last layer
    footprint: tuple[int, int] = (0, 0)  # bytes that one image takes: without gradients, and with
    linear_output: bool = False  # a linear layer gives the output
    obstacle: str | None = None  # why token attention cannot be followed: "attends in 7×7 windows"

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches + self.suffix

    @property
    def batch_axis(self) -> int:
        """The axis of the images in the model's own tokens."""
        return 1 if self.sequence_first else 0

    @property
    def read_tokens(self) -> list[int] | None:
        """The few tokens that are read; None: all, or an attention pool reads them."""
        return None if self.pooled or len(self.readout) * 2 > self.tokens else list(self.readout)

    def token(self, row: int, column: int) -> int:
        """The token of a patch."""
        return self.prefix + row * self.grid[1] + column

    def to_map(self, values: Row) -> Map:
        """One value per token to one per patch, in place."""
        return values[:, self.prefix : self.prefix + self.patches].reshape(-1, *self.grid)

    def to_grid(self, tokens: Tensor) -> Tensor | None:
        """Tokens [B N D] as they lie in the image, [B h w D], without CLS and registers; None: they do not fit."""
        if tokens.ndim == 4:
            return tokens
        count, (h, w) = tokens.shape[1], self.grid
        if count == self.tokens:
            return placed(tokens, self.prefix, h, w)
        for extra in range(9):  # special tokens in front, as few as will do
            for scale in (1, 2, 4, 8, 16, 32):  # later stages merge patches
                size = -(-h // scale), -(-w // scale)
                if count == size[0] * size[1] + extra:
                    return placed(tokens, extra, *size)
        return None

    def is_layer(self, call: Attention, images: int) -> bool:
        """Does every token attend to every token here?"""
        b, _, n, m = call.shape
        return (b, n, m) == (images, self.tokens, self.tokens)

    def is_pool(self, call: Attention, images: int) -> bool:
        """Do a few learned queries read all tokens here?"""
        b, _, n, m = call.shape
        return b in (1, images) and m == self.tokens and n < m


def placed(tokens: Tensor, start: int, h: int, w: int) -> Tensor:
    return tokens[:, start : start + h * w].reshape(len(tokens), h, w, -1)


@dataclass(frozen=True, eq=False)
class Reference:
    """What the layout run gave, for another way to run the same model to be compared with."""

    output: Tensor  # of the noise images
    grad: Tensor | None  # of `along([output])`, for the tokens that enter the last layer's attention
    fold: Fold | None  # where the last layer's queries, keys and values seem to come from


def noise_images(model: Network, size: tuple[int, int]) -> Tensor:
    """The two images of the layout run."""
    noise = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def along(ends: list[Tensor]) -> Tensor:
    """One number that depends on every output of the two noise images."""
    random = torch.Generator().manual_seed(1)
    return torch.stack([(end * torch.randn(end.shape, generator=random).to(end)).sum() for end in ends]).sum()


def find_layout(model: Network, size: tuple[int, int], given: Layout | None = None) -> tuple[Layout, Reference | None]:
    """Run the model once on two noise images and measure; a layout given by hand is believed."""
    images = noise_images(model, size).requires_grad_(model.has_gradients)
    try:
        seen, output = look(model, images, grad=model.has_gradients)
    except (RuntimeError, ModelError) as error:
        if "nference" not in str(error):  # torch.inference_mode in its forward: only what needs no gradient will work
            raise
        seen, output = look(model, images.detach(), grad=False)
    linear = seen.classifier is not None and seen.classifier[1] is output
    found = replace(read_geometry(model, seen, size, given), linear_output=linear)
    layers = layer_numbers(seen, found)
    if found.obstacle is not None or not layers or given is not None:
        return found, None
    last, met = seen.calls[layers[-1]], seen.entries[layers[-1]]
    ends = [output, seen.classifier[0]] if linear and seen.classifier is not None else [output]
    readout, share = find_readout(last, gradient(ends, last.node), found)
    found = replace(found, readout=readout, share=None if found.pooled else share, probed=True)
    with torch.no_grad():
        fold = seen.projections.fold(last, found.blocks[-1]) if found.blocks else None
    grad = gradient([output], met.tokens) if met is not None and met.entry[0] == "norm" else None
    return found, Reference(output.detach(), grad, fold)


def read_geometry(model: Network, seen: Survey, size: tuple[int, int], given: Layout | None) -> Layout:
    """Everything but the read-out."""
    grid, prefix, suffix = geometry(seen, next(iter(seen.calls), None), size)
    found = given or Layout(grid, (size[0] // grid[0], size[1] // grid[1]), prefix, suffix=suffix, readout=())
    obstacle = find_obstacle(seen, found) if given is None else None
    if obstacle is None and head_by_head(seen, found):
        obstacle = "computes its heads one by one"
    layers = list(range(len(seen.calls))) if obstacle else layer_numbers(seen, found)
    ways = seen.ways if obstacle else [seen.entries[i] for i in layers]
    found = replace(
        found,
        blocks=blocks_of(model.module, [seen.calls[i] for i in layers]),
        layers=len(ways),
        entries=tuple(met.entry for met in ways if met) if all(ways) else (),
        sequence_first=any(met is not None and met.tokens.shape[0] != 2 for met in ways),
        footprint=(6 * seen.memory.largest // 2, 3 * seen.memory.made // 4),
        obstacle=obstacle,
    )
    if obstacle is not None or not layers:
        return found
    pooled = any(found.is_pool(call, 2) for call in seen.calls[layers[-1] + 1 :])
    return replace(found, pooled=pooled, calls=None if pooled else layers[-1] + 1)


def gradient(ends: list[Tensor], wrt: Tensor) -> Tensor | None:
    """Of `along(ends)`; None where nothing depends on it, or the model runs without gradients."""
    try:
        return torch.autograd.grad(along(ends), [wrt], retain_graph=True, allow_unused=True)[0]
    except RuntimeError:
        return None


def layer_numbers(seen: Survey, layout: Layout) -> list[int]:
    return [i for i, call in enumerate(seen.calls) if layout.is_layer(call, 2)]


def head_by_head(seen: Survey, layout: Layout) -> bool:
    """Does a module attend several times in a row, each time with one head and nothing projected in between?"""
    numbers = layer_numbers(seen, layout)
    return any(
        seen.calls[i].name == seen.calls[j].name and seen.calls[j].shape[1] == 1 and seen.entries[j] is None
        for i, j in pairwise(numbers)
        if seen.entries[numbers[0]] is not None
    )


def look(model: Network, images: Tensor, grad: bool) -> tuple[Survey, Tensor]:
    """One run, measured."""
    with model.still() as still, torch.inference_mode(False), torch.set_grad_enabled(grad):
        with Survey(still.names, 2) as seen, Unfrozen() if grad else nullcontext():
            return seen, model.run(images)


def geometry(seen: Survey, first: Attention | None, size: tuple[int, int]) -> tuple[tuple[int, int], int, int]:
    """Grid, and how many tokens stand before and behind the patches."""
    tokens = first.shape[3] if first is not None else 0
    grids = seen.cut.grids[::-1]
    for count, width in seen.cut.rows:  # patches cut by reshaping, embedded by a linear layer
        side = math.isqrt(width // 3)
        if side and width == 3 * side * side and count == (size[0] // side) * (size[1] // side):
            grids.append((size[0] // side, size[1] // side))
    moving = moving_tokens(first)
    for grid in grids:
        if moving is not None and len(moving) == grid[0] * grid[1]:
            return grid, moving[0], tokens - moving[-1] - 1
    channels = first is not None and any(first.v.shape[-1] == grid[0] * grid[1] for grid in grids)
    for grid in grids:
        if tokens // 2 < grid[0] * grid[1] <= tokens and not channels:
            return grid, tokens - grid[0] * grid[1], 0
    return next((grid for grid in grids if grid[0] * grid[1] > 1), (1, 1)), 0, 0


def moving_tokens(first: Attention | None) -> list[int] | None:
    """The run of tokens in which two images differ at the first attention: the patches."""
    if first is None or first.shape[0] != 2:
        return None
    change = (first.v[0] - first.v[1]).abs().float().amax((0, 2))  # [M]
    differs = change > 0.02 * change.max()  # the same token twice may differ by rounding
    found: list[int] = differs.nonzero().flatten().tolist()
    return found if found and found[-1] - found[0] + 1 == len(found) else None


def find_obstacle(seen: Survey, layout: Layout) -> str | None:
    """Why attention cannot be followed from token to token through this model, if it cannot."""
    if seen.mixed:
        return f"changes its attention between softmax and values (in {seen.mixed[0] or 'its own code'})"
    if not seen.calls:
        return "shows no attention (vitreous sees torch's sdpa, nn.MultiheadAttention and softmax @ values)"
    told = between_tokens(seen.calls, [None if met is None else met.tokens for met in seen.entries])
    if told is False:
        return "attends between channels, not between tokens"
    layers = [call for call in seen.calls if layout.is_layer(call, 2)]
    others = [call for call in seen.calls if not layout.is_layer(call, 2) and not layout.is_pool(call, 2)]
    if not others and not layers:
        return "shows no attention between its tokens, only learned queries"
    if not others:
        for call in layers:
            try:
                call.verify()
            except CaptureError as error:
                return f"hides part of its attention: {error}"
        return None
    square = [call for call in others if call.shape[2] == call.shape[3]]
    if told is None and any(call.v.shape[-1] == layout.patches for call in square):
        return "attends between channels, not between tokens"
    b, _, n, m = Counter(call.shape for call in others).most_common(1)[0][0]
    if b > 2:
        side = math.isqrt(n)
        return f"attends in {side}×{side} windows" if side * side == n else f"attends in windows of {n} tokens"
    return f"changes its tokens on the way (layers of {n} queries and {m} keys for {layout.tokens} tokens)"


def find_readout(
    last: Attention, grad: Tensor | None, layout: Layout
) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """The tokens that the output (or what its classifier reads) depends on, and their weights where they differ.

    `grad`: for the output of the last layer's attention.
    """
    everything = tuple(range(layout.tokens))
    if grad is None:
        return ((0,) if layout.prefix else everything), None
    size = last.fold(grad).float().norm(dim=-1).mean((0, 1))  # [N]
    read = tuple(size.nonzero().flatten().tolist())
    patches = range(layout.prefix, layout.prefix + layout.patches)
    apart = [i for i in read if i not in patches]
    both = apart and len(read) > len(apart)
    if both and size[apart].mean() > layout.patches**0.5 * size[list(patches)].mean():
        whole = 1 / (len(apart) + 1)  # a CLS token beside the mean of the patches weighs as much as all of them
        return read, tuple(whole if i in apart else whole / (len(read) - len(apart)) for i in read)
    return (read or everything), None


def blocks_of(net: nn.Module, calls: list[Attention]) -> tuple[str, ...]:
    """The module that holds each layer, in order, once each; none where the network itself attends."""
    names = list(dict.fromkeys(call.name for call in calls))
    blocks = [item_of(net, name) or child_of(names, name) for name in names]
    runs = not any(isinstance(net.get_submodule(block), nn.ModuleList) for block in blocks)
    return tuple(dict.fromkeys(block for block in blocks if block)) if runs else ()


def item_of(net: nn.Module, name: str) -> str:
    """The innermost ancestor that is one of several items of a ModuleList or Sequential; of nested lists, the list."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        parent = net.get_submodule(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) > 1:
            above = net.get_submodule(".".join(parts[: end - 2])) if end > 1 else None
            nested = isinstance(parent, nn.ModuleList) and isinstance(above, nn.ModuleList)
            return ".".join(parts[: end - 1] if nested else parts[:end])
    return ""


def child_of(names: list[str], name: str) -> str:
    """The child, on the way to `name`, of what all names have in common; of a single name, its parent."""
    if len(names) == 1:
        return name.rpartition(".")[0] or name
    parts = [n.split(".") for n in names]
    common = next(i for i in range(len(name)) if len({tuple(p[: i + 1]) for p in parts}) > 1)
    return ".".join(name.split(".")[: common + 1])
