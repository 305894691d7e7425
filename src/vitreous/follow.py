"""A ⊙ ∂y/∂A of every layer, from the last to the first, in one backward pass that never holds two layers at once.

The backward of an attention needs A and ∂y/∂A anyway: here it computes them by rows, shows them to a visitor, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.capture import Attention, widen

Rows = slice | list[int]
Chunks = Iterator[tuple[Rows, Tensor, Tensor]]  # rows, A [B H rows M], A ⊙ ∂y/∂A
Visitor = Callable[[Attention, Chunks], None]


class Follower:
    """Runs every attention of a pass so that its backward shows A ⊙ ∂y/∂A to `visitor`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.visitor: Visitor | None = None
        self.first = True  # the next attention is the first: nothing before it is differentiated

    def follows(self, q: Tensor, k: Tensor) -> bool:
        """Is this a layer, and in the axes [B H N d]?"""
        return q.ndim == 4 and q.shape[:2] == k.shape[:2] and q.shape[2] == k.shape[2] == self.tokens

    def attend(self, call: Attention, options: dict[str, Any]) -> Tensor:
        """O, exactly as the fused kernel gives it."""
        ends_here, self.first = self.first, False
        assert call.q is not None and call.k is not None
        out: Tensor = Followed.apply(call.q, call.k, call.v, call, options, self, ends_here)
        return out


class Followed(torch.autograd.Function):
    """sdpa whose backward is watched."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Attention,
        options: dict[str, Any],
        follower: Follower,
        end: bool,
    ) -> Tensor:
        ctx.call, ctx.follower, ctx.end = call, follower, end
        out = F.scaled_dot_product_attention(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        visit = ctx.follower.visitor
        assert visit is not None
        *saved, out = ctx.saved_tensors
        q, k, v, dout = (widen(t).contiguous() for t in (*saved, *grads))
        sums = Sums(q * ctx.call.scale, k, (widen(out) * dout).sum(-1, keepdim=True))

        def chunks() -> Chunks:
            for rows, a in Attention("", "", out, v, sums.q, k, 1.0, ctx.call.bias).chunks():
                product = (dout[:, :, rows] @ v.mT).mul_(a)
                yield rows, a, product
                if not ctx.end:
                    sums.add(rows, a, product, dout[:, :, rows])

        visit(ctx.call, chunks())
        if ctx.end:
            return (None,) * 7
        found = (total(sums.dq, 2) * ctx.call.scale, total(sums.dk), total(sums.dv))
        return (*(d.to(t.dtype) for d, t in zip(found, saved)), None, None, None, None)


class Sums:
    """∂y/∂Q, ∂y/∂K and ∂y/∂V, gathered by rows of A."""

    def __init__(self, q: Tensor, k: Tensor, inner: Tensor) -> None:
        self.q, self.k, self.inner = q, k, inner  # inner: Σ_j A_ij ∂y/∂A_ij = O_i · ∂y/∂O_i
        self.dq: list[Tensor] = []
        self.dk: list[Tensor] = []
        self.dv: list[Tensor] = []

    def add(self, rows: Rows, a: Tensor, product: Tensor, dout: Tensor) -> None:
        dscores = product.addcmul_(a, self.inner[:, :, rows], value=-1)  # A·(∂y/∂A − Σ A·∂y/∂A)
        self.dq.append(dscores @ self.k)
        self.dk.append(dscores.mT @ self.q[:, :, rows])
        self.dv.append(a.mT @ dout)


def total(parts: list[Tensor], axis: int | None = None) -> Tensor:
    """The sum of the parts, or the parts in a row."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts).sum(0) if axis is None else torch.cat(parts, axis)
