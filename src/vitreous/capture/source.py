"""Q, K and V that are parts of one tensor, such as the output of one linear layer: their gradient is made in one piece.

Autograd would put it together from three tensors, and then bring it into the order of that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vitreous.types import Heads, Keys

Place = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view


def source_of(q: Heads, k: Keys, v: Keys) -> Tensor | None:
    """The tensor whose three parts are Q, K and V, such as the output of one linear layer; None if there is none."""
    base = q._base
    if base is None or k._base is not base or v._base is not base or not base.is_contiguous():
        return None
    places = tuple((t.shape, t.stride(), t.storage_offset() - base.storage_offset()) for t in (q, k, v))
    return base if fill(base.numel(), places) else None


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


class Parts(torch.autograd.Function):
    """Q, K and V, each with a share of its gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shares: tuple[float, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.shares = shares
        ctx.save_for_backward(source, *parts)
        return tuple(t.detach() for t in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        source, *parts = ctx.saved_tensors
        if any(map(torch._C._functorch.is_batchedtensor, grads)):
            scaled = [grad * share for grad, share in zip(grads, ctx.shares)]
            return put_together(source, parts, scaled), *(None,) * 4
        whole, found = parts_like(source, parts)
        for grad, share, part in zip(grads, ctx.shares, found):
            torch.mul(grad, share, out=part)
        return whole, *(None,) * 4
