"""A of one image after another on a CPU, in the same memory.

Products of one image read Q, K and V where the model left them, which those of several images would copy first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import ROWS, widen
from vitreous.types import Heads, Keys

LEAST = 2**16  # numbers in A of one image, for which a loop over images pays off


class OneImage:
    """Forms A of one image at a time; each replaces the one before."""

    def __init__(self, q: Heads, k: Keys, scale: float, bias: Tensor | None) -> None:
        self.q, self.k, self.scale, self.bias = q.detach(), k.detach(), scale, bias
        self.scores = q.new_empty(q.shape[1], q.shape[2], k.shape[2])
        self.a = torch.empty_like(self.scores)

    def weights(self, image: int) -> Float[Tensor, "H N M"]:
        """A of this image, until the next is asked for."""
        torch.baddbmm(self.scores, self.q[image], self.k[image].mT, beta=0, alpha=self.scale, out=self.scores)
        if self.bias is not None:
            self.scores += self.bias[image if len(self.bias) > 1 else 0]
        return torch.softmax(self.scores, -1, out=self.a)


def one_by_one(q: Heads, k: Keys) -> bool:
    """Whether A is best formed for one image at a time."""
    fits = q.shape[1] * q.shape[2] * k.shape[2] >= LEAST and q.shape[2] <= ROWS
    return fits and not q.is_cuda and widen(q).dtype is q.dtype is k.dtype


def source_of(q: Heads, k: Keys, v: Keys) -> Tensor | None:
    """The tensor whose three parts are Q, K and V, such as the output of one linear layer; None if there is none."""
    base = q._base
    if base is None or k._base is not base or v._base is not base or not base.is_contiguous():
        return None
    places = tuple((t.shape, t.stride(), t.storage_offset() - base.storage_offset()) for t in (q, k, v))
    return base if fill(base.numel(), places) else None


Place = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view


@lru_cache(64)
def fill(size: int, places: tuple[Place, ...]) -> bool:
    """Whether these parts of a tensor cover all of it, each number once."""
    covered = torch.zeros(size, dtype=torch.int8)
    for shape, strides, offset in places:
        covered.as_strided(shape, strides, offset).add_(1)
    return bool((covered == 1).all())


def parts_like(base: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A new tensor like the base, and its parts where the given parts are in the base."""
    new = torch.empty_like(base)
    return new, tuple(part_at(new, base, t) for t in parts)


def put_together(base: Tensor, parts: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The same with these values of the parts, which may be those of several targets under `torch.vmap`."""
    numbers = torch.arange(base.numel()).view(base.shape)
    places = torch.cat([part_at(numbers, base, t).flatten() for t in parts])
    return torch.cat([value.flatten() for value in values])[places.argsort()].view(base.shape)


def part_at(new: Tensor, base: Tensor, part: Tensor) -> Tensor:
    return new.as_strided(part.shape, part.stride(), part.storage_offset() - base.storage_offset())
