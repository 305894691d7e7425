"""A ⊙ ∂y/∂A of every layer, from the last to the first, in one backward pass that holds one layer at a time.

The backward of an attention needs A and ∂y/∂A anyway; here it computes them by rows and passes them to a visitor. On a
CPU, small A are kept by the forward pass, since it takes longer to form them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.capture.attention import Attention, fusible, rows_of, run_of, widen
from vitreous.capture.few_images import OneImage, at, attend, few_images, keeps, one_by_one
from vitreous.capture.shown import Chunks, Shown, Visitor, pass_by, shown
from vitreous.capture.source import Places, source_of
from vitreous.types import Weights


class Follower:
    """Runs every attention over `tokens` tokens so that its backward passes A ⊙ ∂y/∂A to `visitor`.

    No gradients are needed before the first layer.
    """

    def __init__(
        self, tokens: int, numbers: Sequence[int] | None = None, differ: bool = False, every: bool = False
    ) -> None:
        self.tokens = tokens
        self.numbers = numbers  # the attention calls that are layers, if known
        self.differ = differ  # layers differ in their tokens
        self.every = every  # also those whose sums do not need A, which can as well be visited after the backward pass
        self.visitor: Visitor = pass_by
        self.seen = 0

    def takes(self, q: Tensor, k: Tensor) -> bool:
        """Whether this is a layer in the axes [B H N d] whose sums need A; with `every`, of those that do not, too."""
        as_usual = q.ndim == 4 and q.shape[:2] == k.shape[:2] and (self.every or not fusible(q))
        return as_usual and (self.differ or q.shape[2] == k.shape[2] == self.tokens)

    def form(self, call: Attention, options: dict[str, Any]) -> Tensor:
        """O, as the fused kernel computes it; up to rounding, if A is kept."""
        assert call.q is not None and call.k is not None
        if self.differ and self.numbers is not None and call.number not in self.numbers:
            return F.scaled_dot_product_attention(call.q, call.k, call.v, **options)
        call.followed = True
        self.seen += 1
        q, bias = call.q, call.bias
        if call.only is not None:
            q, bias = q[:, :, run_of(call.only)], rows_of(bias, call.only)
        end = self.seen == 1 and (not self.numbers or call.number == self.numbers[0])
        out: Tensor
        if call.fusible:
            out = F.scaled_dot_product_attention(q, call.k, call.v, **options)
            out = Watched.apply(out, call.q, call.k, call.v, call.scale, self, call.only, end)
            return out
        keep = bias is None and not options["dropout_p"] and keeps(q, call.k)
        known = source_of(q, call.k, call.v) if not end and (keep or one_by_one(q, call.k)) else None
        source, places = known or (None, None)
        inputs: tuple[Tensor, ...] = (q, call.k, call.v)
        inputs = inputs if known is None else tuple(t.detach() for t in inputs)
        out = Followed.apply(source, places, *inputs, call.scale, bias, None if keep else options, self, call.only, end)
        return out

    def show(self, rows: list[int], a: Weights, grad: Weights) -> None:
        """A layer whose keys and values were not formed (narrowed_block.py)."""
        self.visitor(Shown(iter([(slice(None), rows, a, grad.mul_(a))])))


class Followed(torch.autograd.Function):
    """Scaled dot-product attention whose backward is observed.

    `source`: the tensor whose parts are Q, K and V, if there is one; it then receives their gradients,
    which belong to these `places` in it. `options` of the fused kernel; None: A is formed here, and kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor | None,
        places: Places | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        bias: Tensor | None,
        options: dict[str, Any] | None,
        follower: Follower,
        only: list[int] | None,
        end: bool,
    ) -> Tensor:
        ctx.scale, ctx.follower, ctx.only, ctx.end, ctx.places = scale, follower, only, end, places
        if options is None:
            a, out = attend(q, k, v, scale)
        else:
            a, out = None, F.scaled_dot_product_attention(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, bias, a)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *inputs, out, bias, a = ctx.saved_tensors
        several = torch._C._functorch.is_batchedtensor(grads[0])  # the gradients of several targets
        whole = None if ctx.places is None else out.new_empty(ctx.places.shape)
        if not several and (a is not None or one_by_one(*inputs[:2])):
            found = tuple(torch.empty_like(t) for t in inputs) if whole is None else ctx.places.of(whole)
            ctx.follower.visitor(Shown(few_at_a_time(ctx, inputs, bias, a, grads[0], found)))
        else:
            found = by_pieces(ctx, inputs, out, bias, a, grads[0])
            whole = None if ctx.places is None else ctx.places.put_together(found)
        own = (None,) * 3 if ctx.end or ctx.places is not None else found
        return (whole, None, *own, *(None,) * 6)


def few_at_a_time(
    ctx: Any,
    inputs: list[Tensor],
    bias: Tensor | None,
    kept: Weights | None,
    dout: Tensor,
    found: tuple[Tensor, ...],
) -> Chunks:
    """A and A ⊙ ∂y/∂A of a few images at a time; ∂y/∂Q, ∂y/∂K and ∂y/∂V are written to `found`."""
    q, k, v = inputs
    weights = OneImage(q, k, ctx.scale, bias).weights if kept is None else partial(at, kept)
    product = None
    for part in few_images(len(q), alone=kept is None):
        a, along = weights(part), at(dout, part)
        product = torch.empty_like(a) if product is None else product
        torch.matmul(along, at(v, part).mT, out=product).mul_(a)
        yield part, slice(None) if ctx.only is None else ctx.only, a, product
        if not ctx.end:
            dq, dk, dv = (at(t, part) for t in found)
            product.addcmul_(a, product.sum(-1, keepdim=True), value=-1)  # A·(∂y/∂A − Σ A·∂y/∂A)
            torch.mul(product @ at(k, part), ctx.scale, out=dq)
            torch.mul(product.mT @ at(q, part), ctx.scale, out=dk)
            dv.copy_(a.mT @ along)


def by_pieces(
    ctx: Any, inputs: list[Tensor], out: Tensor, bias: Tensor | None, kept: Weights | None, grad: Tensor
) -> tuple[Tensor, ...]:
    """Visit the layer a few images and rows at a time; ∂y/∂Q, ∂y/∂K and ∂y/∂V, unless nothing needs them."""
    q, k, v = inputs
    found: list[tuple[Tensor, ...]] = []  # by slices of images

    def chunks() -> Chunks:
        for images, part in Attention("", "", out, v, q, k, ctx.scale, bias, kept).pieces():
            part.k, part.v = widen(k[images]).contiguous(), widen(v[images]).contiguous()
            sums = Sums(ctx.scale, part.k)
            for rows, a in part.chunks():
                along = widen(grad[images, :, rows])
                product = (along @ part.v.mT).mul_(a)
                yield images, (rows if ctx.only is None else ctx.only[rows]), a, product
                if not ctx.end:
                    sums.add(a, product, along, q[images, :, rows], out[images, :, rows])
            if not ctx.end:
                found.append(sums.result())

    ctx.follower.visitor(Shown(chunks()))
    whole = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found))
    return tuple(d.to(t.dtype) for d, t in zip(whole, inputs))


class Watched(torch.autograd.Function):
    """O as the kernel computed it; its backward shows the layer and leaves the gradients to the kernel's."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, follower: Follower, only: Any, end: bool
    ) -> Tensor:
        ctx.scale, ctx.follower, ctx.only, ctx.end = scale, follower, only, end
        ctx.save_for_backward(q, k, v)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v = ctx.saved_tensors
        ctx.follower.visitor(shown(Attention("", "", grads[0], v, q, k, ctx.scale, only=ctx.only), grads[0]))
        return (None if ctx.end else grads[0], *(None,) * 7)


class Sums:
    """∂y/∂Q, ∂y/∂K and ∂y/∂V, accumulated by rows of A."""

    def __init__(self, scale: float, k: Tensor) -> None:
        self.scale, self.k = scale, k
        self.dq: list[Tensor] = []
        self.dk: Tensor | None = None
        self.dv: Tensor | None = None

    def add(self, a: Tensor, product: Tensor, dout: Tensor, q: Tensor, out: Tensor) -> None:
        inner = (widen(out) * dout).sum(-1, keepdim=True)  # Σ_j A_ij ∂y/∂A_ij = O_i · ∂y/∂O_i
        dscores = product.addcmul_(a, inner, value=-1)  # A·(∂y/∂A − Σ A·∂y/∂A)
        self.dq.append((dscores @ self.k).mul_(self.scale).to(q.dtype))
        self.dk = plus(self.dk, dscores.mT @ (widen(q) * self.scale))
        self.dv = plus(self.dv, a.mT @ dout)

    def result(self) -> tuple[Tensor, ...]:
        assert self.dk is not None and self.dv is not None
        return torch.cat(self.dq, 2), self.dk, self.dv


def plus(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum so far, in the same memory."""
    return part if total is None else total.add_(part)
