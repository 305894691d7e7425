"""A ⊙ ∂y/∂A of every layer, from the last to the first, in one backward pass that never holds two layers at once.

The backward of an attention needs A and ∂y/∂A anyway: here it computes them by rows, shows them to a visitor and goes
on. Of the last layer it forms only the rows that the head reads: the gradients of the others are zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.attention import Attention, widen

Rows = slice | list[int]
Chunks = Iterator[tuple[Rows, Tensor, Tensor]]  # rows, A [B H rows M], A ⊙ ∂y/∂A
Visitor = Callable[[Chunks], None]


def pass_by(chunks: Chunks) -> None:
    """A visitor that only lets the gradients through."""
    deque(chunks, maxlen=0)


class Follower:
    """Runs the attentions of a pass so that their backward shows A ⊙ ∂y/∂A to `visitor`.

    `tokens`, `layers`: how many there are. `read`: the rows that the head reads after the last. `ends`: no gradient is
    asked for before the first.
    """

    def __init__(self, tokens: int, layers: int, read: list[int] | None, ends: bool) -> None:
        self.tokens, self.layers, self.read, self.ends = tokens, layers, read, ends
        self.visitor: Visitor = pass_by
        self.seen = 0

    def follows(self, q: Tensor, k: Tensor) -> bool:
        """Is this a layer, and in the axes [B H N d]?"""
        return q.ndim == 4 and q.shape[:2] == k.shape[:2] and q.shape[2] == k.shape[2] == self.tokens

    def reads(self, x: Tensor) -> bool:
        """Are these tokens after the last attention, of which the head reads only some?"""
        return self.read is not None and self.seen == self.layers and x.ndim == 3 and x.shape[1] == self.tokens

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose backward passes by the tokens that nothing reads."""
        out: Tensor = ReadLinear.apply(x, weight, bias, self.read)
        return out

    def attend(self, call: Attention, options: dict[str, Any]) -> Tensor:
        """O, exactly as the fused kernel gives it."""
        self.seen += 1
        rows = self.read if self.seen == self.layers else None
        end = self.ends and self.seen == 1
        out: Tensor = Followed.apply(call.q, call.k, call.v, call.scale, call.bias, options, self, rows, end)
        return out


class Followed(torch.autograd.Function):
    """sdpa whose backward is watched."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        bias: Tensor | None,
        options: dict[str, Any],
        follower: Follower,
        rows: list[int] | None,
        end: bool,
    ) -> Tensor:
        ctx.scale, ctx.bias, ctx.follower, ctx.rows, ctx.end = scale, bias, follower, rows, end
        out = F.scaled_dot_product_attention(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, out = ctx.saved_tensors
        q, k, v, dout = (widen(t).contiguous() for t in (*saved, *grads))
        sums = Sums(q * ctx.scale, k, (widen(out) * dout).sum(-1, keepdim=True))

        def chunks() -> Chunks:
            for rows, a in Attention("", "", out, v, sums.q, k, 1.0, ctx.bias).chunks(ctx.rows):
                product = (dout[:, :, rows] @ v.mT).mul_(a)
                yield rows, a, product
                if not ctx.end:
                    sums.add(rows, a, product, dout[:, :, rows])

        ctx.follower.visitor(chunks())
        if ctx.end:
            return (None,) * 9
        found = (sums.dq(ctx.rows).mul_(ctx.scale), total(sums.dk), total(sums.dv))
        return (*(d.to(t.dtype) for d, t in zip(found, saved)), None, None, None, None, None, None)


class Sums:
    """∂y/∂Q, ∂y/∂K and ∂y/∂V, gathered by rows of A."""

    def __init__(self, q: Tensor, k: Tensor, inner: Tensor) -> None:
        self.q, self.k, self.inner = q, k, inner  # inner: Σ_j A_ij ∂y/∂A_ij = O_i · ∂y/∂O_i
        self.parts: list[Tensor] = []
        self.dk: list[Tensor] = []
        self.dv: list[Tensor] = []

    def add(self, rows: Rows, a: Tensor, product: Tensor, dout: Tensor) -> None:
        dscores = product.addcmul_(a, self.inner[:, :, rows], value=-1)  # A·(∂y/∂A − Σ A·∂y/∂A)
        self.parts.append(dscores @ self.k)
        self.dk.append(dscores.mT @ self.q[:, :, rows])
        self.dv.append(a.mT @ dout)

    def dq(self, rows: list[int] | None) -> Tensor:
        if rows is None:
            return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, 2)
        whole = torch.zeros_like(self.q)
        whole[:, :, rows] = self.parts[0]
        return whole


class ReadLinear(torch.autograd.Function):
    """A linear layer after the last attention: only the tokens that the head reads have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: list[int]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.rows = x.shape, rows
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx = grads[0].new_zeros(ctx.shape)
        dx[:, ctx.rows] = grads[0][:, ctx.rows] @ ctx.saved_tensors[0].to(dx.dtype)
        return dx, None, None, None


def total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
