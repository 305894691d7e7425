"""Q, K and V that are parts of one tensor, such as the output of one linear layer: their gradient is made in one piece.

Autograd would put it together from three tensors, and then bring it into the order of that tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vitreous.types import Heads, Keys

Place = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a part


@dataclass(frozen=True)
class Places:
    """Where Q, K and V lie in a contiguous tensor: shapes and strides only, so that no tensor is kept alive."""

    shape: torch.Size
    parts: tuple[Place, ...]

    def of(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The parts of such a tensor."""
        return tuple(whole.as_strided(*place) for place in self.parts)

    def put_together(self, values: Sequence[Tensor]) -> Tensor:
        """The tensor with these parts, which may be those of several targets under `torch.vmap`."""
        order = torch.cat([part.flatten() for part in self.of(torch.arange(self.shape.numel()).view(self.shape))])
        return torch.cat([value.flatten() for value in values])[order.argsort()].view(self.shape)


def source_of(q: Heads, k: Keys, v: Keys) -> tuple[Tensor, Places] | None:
    """The tensor whose three parts are Q, K and V, and their places in it; None if there is none."""
    base = q._base
    if base is None or k._base is not base or v._base is not base or not base.is_contiguous():
        return None
    parts = tuple((t.shape, t.stride(), int(t.storage_offset() - base.storage_offset())) for t in (q, k, v))
    places = Places(base.shape, parts)
    return (base, places) if fill(places) else None


@lru_cache(64)
def fill(places: Places) -> bool:
    """Whether the parts cover the tensor, each number once."""
    covered = torch.zeros(places.shape, dtype=torch.int8)
    for part in places.of(covered):
        part.add_(1)
    return bool((covered == 1).all())


class Parts(torch.autograd.Function):
    """Q, K and V, each with a share of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, places: Places, shares: tuple[float, ...], *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.places, ctx.shares = places, shares
        return tuple(t.detach() for t in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if any(map(torch._C._functorch.is_batchedtensor, grads)):  # of several targets
            whole = ctx.places.put_together([grad * share for grad, share in zip(grads, ctx.shares)])
            return whole, *(None,) * 5
        whole = grads[0].new_empty(ctx.places.shape)
        for grad, share, part in zip(grads, ctx.shares, ctx.places.of(whole)):
            torch.mul(grad, share, out=part)
        return whole, *(None,) * 5
