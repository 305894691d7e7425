"""Which token comes from which pixels: measured, for any order of the tokens.

By gradient (`cut_places`): every token has a number. The gradient of the tokens, weighted by their numbers, is at a
pixel so many times the gradient of their plain sum, if the pixel goes to one token only; a second order of the numbers
must agree. Where pixels are shared a little, or numbers are rounded (half precision), it is done for the signs of each
binary digit instead. This needs no further forward pass and finds the exact rectangle of every patch.

By exchange (`coded_places`), where patches overlap or the tokens have been mixed: some patches of an image are moved
towards those of another, chosen by one binary digit of their row or column. A token that moves with them has this
digit. The digits are those of a Gray code: two neighbours, which a token may both see, differ in one digit only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from vitreous._support.precision import doubled

Grid = tuple[int, int]
Span = tuple[int, int]  # first pixel, and the one behind the last
Ratio = Callable[[Tensor], Tensor]
WHOLE = 0.05  # how near to a whole number the number of a token must be
PURE = 0.9  # how nearly a pixel must go to one token only
HERE, BESIDE = 0.5, 0.95  # shares of mixed tokens that must be found in their places, and in these or beside them
STILL = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the largest change: a smaller one is rounding


@dataclass(frozen=True)
class Places:
    """The token of each patch, row by row, and the pixels of each row and column of patches."""

    grid: Grid
    tokens: tuple[int, ...]
    rows: tuple[Span, ...] = ()
    columns: tuple[Span, ...] = ()
    times: tuple[Span, ...] = ()  # of a video: the frames of each tubelet

    @property
    def patch(self) -> tuple[int, int] | None:
        """Pixels of one patch, down and across."""
        if not self.rows:
            return None
        return max(end - start for start, end in self.rows), max(end - start for start, end in self.columns)


# ----------------------------------------------------------------------------------------------------- by gradient


def cut_places(tokens: Tensor, images: Tensor) -> Places | None:
    """Where tokens [B N D] were cut from the images, exactly; None if a pixel goes to several tokens."""
    owner = owners(tokens, images)
    return None if owner is None else rectangles(owner, tokens.shape[1])


def owners(tokens: Tensor, images: Tensor) -> Tensor | None:
    """The token that each pixel goes to, [Y X] (−1: none); None if many pixels go to several tokens or to none.

    Of videos, [T Y X].
    """
    count = tokens.shape[1]
    random = torch.Generator().manual_seed(2)
    each = (tokens * torch.randn(tokens.shape[1:], generator=random).to(tokens)).sum(2)  # [B N]
    try:
        plain = pixel_gradient(each.sum(), images)
    except RuntimeError:  # the network runs without gradients
        return None
    if plain is None:
        return None
    energy = plain.square().sum(-3)  # [B Y X]

    def ratio(code: Tensor) -> Tensor:
        """What a pixel gives to the tokens weighted by a code, in units of what it gives to them: a weighted mean.

        Of a code for all images, [Y X]; of one for each, [B Y X].
        """
        found = pixel_gradient((each * code.to(each)).sum(), images)
        assert found is not None
        shared = (found * plain).sum(-3)
        return shared / energy.clamp_min(1e-38) if code.ndim == 2 else shared.sum(0) / energy.sum(0).clamp_min(1e-38)

    whole = energy.sum(0)
    read = whole > 1e-8 * whole.max()
    if not read.any():
        return None
    found = by_number(ratio, read, count, len(tokens) == len(images) == 2) if tokens.dtype in STILL else None
    found = by_digits(ratio, read, count) if found is None else found
    return None if found is None else torch.where(read, found, -1)


def by_number(ratio: Ratio, read: Tensor, count: int, pair: bool) -> Tensor | None:
    """The token that each pixel goes to, by its number and checked by another order; None if pixels are shared.

    Of a pair of images, one shows the numbers and the other the order, so that one gradient shows both.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    codes = torch.stack([torch.arange(1, count + 1), order]).to(read.device)
    number, check = ratio(codes) if pair else map(ratio, codes)
    token = number.round().long().sub_(1).clamp_(0, count - 1)
    near = ((number - token - 1).abs() < WHOLE) & ((check - codes[1][token]).abs() < WHOLE)
    return token if near[read].all() else None


def by_digits(ratio: Ratio, read: Tensor, count: int) -> Tensor | None:
    """The same by binary digits, which may also be rounded, or shared a little; None if they are shared more."""
    numbers = torch.arange(count, device=read.device)
    signs = torch.stack([ratio(1 - 2 * (numbers >> k & 1)) for k in range(max(1, (count - 1).bit_length()))])
    if (read & ~(signs.abs() > PURE).all(0)).any():
        return None
    return torch.stack([(sign < 0).long() << k for k, sign in enumerate(signs)]).sum(0)


def pixel_gradient(end: Tensor, images: Tensor) -> Tensor | None:
    grad = torch.autograd.grad(end, [images], retain_graph=True, allow_unused=True)[0]
    return None if grad is None else doubled(grad)


def rectangles(owner: Tensor, count: int) -> Places | None:
    """Places whose patches are rectangles (of a video, boxes) on a regular grid; None if they are not."""
    flat = owner.flatten()
    here = flat >= 0
    spans = []
    for axis in range(owner.ndim):
        shape = [-1 if axis == other else 1 for other in range(owner.ndim)]
        pixel = torch.arange(owner.shape[axis], device=owner.device).view(shape).expand(owner.shape).flatten()[here]
        first = torch.full((count,), owner.numel(), device=owner.device).scatter_reduce(0, flat[here], pixel, "amin")
        last = torch.full((count,), -1, device=owner.device).scatter_reduce(0, flat[here], pixel, "amax")
        spans.append([(a, b + 1) for a, b in zip(first.tolist(), last.tolist())])
    sizes = torch.bincount(flat[here], minlength=count).tolist()
    found = {tuple(span[token] for span in spans): token for token, size in enumerate(sizes) if size}
    lines = [sorted({box[axis] for box in found}) for axis in range(owner.ndim)]
    cells = list(product(*lines))
    regular = len(found) == sum(size > 0 for size in sizes) == len(cells) and all(cell in found for cell in cells)
    whole = all(sizes[token] == math.prod(end - start for start, end in box) for box, token in found.items())
    if not (regular and whole and all(map(ordered, lines))):
        return None
    *times, rows, columns = map(tuple, lines)
    tokens = tuple(found[cell] for cell in cells)
    return Places((len(rows), len(columns)), tokens, rows, columns, times[0] if times else ())


def ordered(spans: list[Span]) -> bool:
    """Whether the spans follow one another without overlap."""
    return all(one[1] <= other[0] for one, other in pairwise(spans))


# ----------------------------------------------------------------------------------------------------- by exchange


def coded(images: Tensor, grid: Grid, centred: bool) -> Tensor:
    """The first of two images moved towards the second: nowhere, everywhere, and by each digit of row and column.

    Only pixels near the centres of the patches are moved, which no other token sees much of. A patch is centred in its
    cell of the grid, or on its first pixel, as it is where a convolution reads around a pixel.
    """
    base, other = images[:1].detach(), (images[-1:] if len(images) > 1 else images.flip(-1)).detach()
    size = (0.05 if images.dtype in (torch.float32, torch.float64) else 0.5) * (other - base)
    masks: list[Tensor] = []
    for axis in (0, 1):
        line, near = lines(images.shape[axis - 2], grid[axis], centred)
        shape = (-1, 1) if axis == 0 else (1, -1)
        size = size * near.to(size).view(shape)
        code = (line ^ line >> 1).to(images.device)
        masks += [(code >> k & 1).to(images).view(shape) for k in reversed(range(digits(grid[axis])))]
    return torch.cat([base, base + size, *(base + size * mask for mask in masks)])


def lines(pixels: int, count: int, centred: bool) -> tuple[Tensor, Tensor]:
    """The row (or column) of patches whose centre is nearest to each pixel, and whether it is near."""
    side = pixels / count
    centre = 0.5 if centred else 0.5 / side
    place = (torch.arange(pixels) + 0.5) / side - centre  # whole numbers at the centres
    line = place.round().long().clamp(0, count - 1)
    return line, (place - line).abs() <= max(0.15, 0.501 / side)


def digits(count: int) -> int:
    return (count - 1).bit_length()


def coded_places(tokens: Tensor, fine: Grid, grids: list[Grid], size: tuple[int, int]) -> Places | None:
    """Where the tokens [V N D] of `coded` images, coded on the grid `fine`, come from.

    None if they do not lie on one of these grids, each the fine one with its patches merged by powers of two.
    """
    plain, even, *moved = doubled(tokens.detach())
    change = even - plain
    energy = change.square().sum(-1)
    still = STILL.get(tokens.dtype, 0.05) * energy.max().sqrt()
    moving = (energy.sqrt() > still).nonzero().flatten()
    if not moved or not energy.max() > 0:
        return None
    share = torch.stack([((one - plain) * change).sum(-1) / energy.clamp_min(1e-300) for one in moved])[:, moving]
    for grid in grids:
        if grid[0] * grid[1] == len(moving):
            return decoded(moving, share, fine, grid, size)
    return None


def decoded(moving: Tensor, share: Tensor, fine: Grid, grid: Grid, size: tuple[int, int]) -> Places | None:
    """The token of each cell by the digits that the tokens share.

    None if it is not one for each; where attention has mixed the tokens, most of them must be found row by row.
    """
    rows, columns = share[: digits(fine[0])], share[digits(fine[0]) :]
    row, column = number(rows[: digits(grid[0])]), number(columns[: digits(grid[1])])
    cell = row * grid[1] + column
    row_by_row = torch.arange(len(cell), device=cell.device)
    order = cell.argsort()
    beside = ((row - row_by_row // grid[1]).abs() <= 1) & ((column - row_by_row % grid[1]).abs() <= 1)
    if (cell == row_by_row).double().mean() > HERE and beside.double().mean() > BESIDE:
        order = row_by_row
    elif not (row < grid[0]).all() or not cell[order].equal(row_by_row):
        return None
    return Places(grid, tuple(moving[order].tolist()), *(even(side, count) for side, count in zip(size, grid)))


def even(pixels: int, count: int) -> tuple[Span, ...]:
    """So many rows (or columns) of patches of equal size."""
    return tuple((n * pixels // count, (n + 1) * pixels // count) for n in range(count))


def number(share: Tensor) -> Tensor:
    """The number that the Gray digits of each token spell, [N]."""
    code = torch.zeros(share.shape[1], dtype=torch.long, device=share.device)
    digit = torch.zeros_like(code)
    for one in share:
        low, high = one.quantile(0.1), one.quantile(0.9)
        digit = digit ^ (one > (low + high) / 2).long()
        code = code << 1 | digit
    return code
