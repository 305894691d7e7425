"""A ⊙ ∂y/∂A of every layer, from the last to the first, in one backward pass that holds one layer at a time.

The backward of an attention needs A and ∂y/∂A anyway; here it computes them by rows and passes them to a visitor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vitreous.capture.attention import Attention, fusible, rows_of, run_of, widen
from vitreous.capture.one_image import OneImage, one_by_one
from vitreous.capture.source import Places, source_of
from vitreous.types import Heads, Row, Weights

Rows = slice | list[int]
Edit = Callable[[Tensor], Tensor]
Chunks = Iterator[tuple[slice, Rows, Tensor, Tensor]]  # images, rows, A [b H n M], A ⊙ ∂y/∂A


class Shown:
    """One layer in the backward pass: A and A ⊙ ∂y/∂A by rows, each available once, or one sum over all rows."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks

    def gained(self, weights: Float[Tensor, "B N"]) -> Row:
        """Σᵢ wᵢ·mean_h (Aᵢⱼ·∂y/∂Aᵢⱼ)⁺."""
        row = weights[:, None, None]  # [B 1 1 N]
        parts = ((i, (row[i][..., run_of(n)].to(p) @ p.clamp_min(0)).mean((1, 2))) for i, n, _, p in self.chunks)
        return joined(parts)

    def rolled(self, carried: Row) -> Row:
        """One factor of a rollout over (mean_h A ⊙ ∂y/∂A)⁺."""
        means = ((i, rows, product.mean(1).clamp_min_(0)) for i, rows, _, product in self.chunks)
        return joined((i, step(carried[i].to(mean), mean, 0.5, rows)) for i, rows, mean in means)

    def means(self) -> Float[Tensor, "B N M"]:
        """(mean_h A ⊙ ∂y/∂A)⁺, all rows."""
        parts: dict[int | None, list[Tensor]] = {}
        for images, _, _, product in self.chunks:
            parts.setdefault(images.start, []).append(product.mean(1).clamp_min_(0))
        return torch.cat([torch.cat(rows, 1) for rows in parts.values()])

    def split(
        self, row: Float[Tensor, "B N"], real: Bool[Tensor, "B M"] | None
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B M"]]:
        """The same where queries and keys are different tokens: what the queries keep, and what goes to the keys."""
        means = ((i, rows, product.mean(1).clamp_min_(0)) for i, rows, _, product in self.chunks)
        return split(row, means, 0.5, real)


class Summed(Shown):
    """The same with sums that are computed without forming A."""

    def __init__(self, chunks: Chunks, layer: Attention, grad: Tensor) -> None:
        super().__init__(chunks)
        self.layer, self.grad = layer, layer.fold(grad)
        self.rows = slice(None) if layer.only is None else run_of(layer.only)

    def gained(self, weights: Float[Tensor, "B N"]) -> Row:
        def sums(grad: Tensor, weights: Tensor) -> Tensor:
            return self.layer.fused(grad).gained(weights[:, self.rows]).mean(1)

        return by_rows(sums, self.grad, weights)

    def rolled(self, carried: Row) -> Row:
        def sums(grad: Tensor, carried: Tensor) -> Tensor:
            fused = self.layer.fused(grad)
            share = carried[:, self.rows] / (0.5 + 0.5 * fused.mean_rows())
            onward = 0.5 * fused.mean_columns(share)
            onward[:, self.rows] += 0.5 * share
            return onward

        return by_rows(sums, self.grad, carried.float())


class ByRows(torch.autograd.Function):
    """A function of rows; under `torch.vmap` it is called once, with the rows of the whole batch."""

    @staticmethod
    def forward(run: Callable[..., Tensor], *given: Tensor) -> Tensor:
        return run(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """It has no gradient."""

    @staticmethod
    def vmap(info: Any, axes: Any, run: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, int]:
        count = info.batch_size
        whole = [t.expand(count, *t.shape) if axis is None else t.movedim(axis, 0) for t, axis in zip(given, axes[1:])]
        out = run(*(t.flatten(0, 1) for t in whole))
        return out.reshape(count, -1, *out.shape[1:]), 0


def by_rows(run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    out: Tensor = ByRows.apply(run, *given)
    return out


Visitor = Callable[[Shown], None]


def shown(layer: Attention, grad: Tensor) -> Shown:
    """A layer and ∂y/∂O, as autograd returns it."""
    chunks = products(layer, layer.fold(grad))
    return Summed(chunks, layer, grad) if layer.fusible else Shown(chunks)


def products(layer: Attention, grad: Heads) -> Chunks:
    """A and A ⊙ ∂y/∂A, a few images at a time; only the rows that were computed."""
    for images, part in layer.pieces():
        for rows, a in part.chunks(layer.only):
            along = grad[images] if layer.only is not None else grad[images, :, rows]
            yield images, rows, a, (widen(along) @ widen(part.v).mT).mul_(a)


def step(carried: Row, a: Float[Tensor, "B n M"], residual: float, rows: Rows = slice(None)) -> Row:
    """One factor of a rollout, multiplied from the left: rows of (r·I + (1−r)·Ā), normalised, weighted and summed."""
    rows = run_of(rows)
    share = carried[:, rows] / (residual + (1 - residual) * a.sum(-1)).clamp_min(1e-30)  # [B n]
    onward = (1 - residual) * torch.einsum("bn,bnm->bm", share, a)
    onward[:, rows] += residual * share
    return onward


def split(
    row: Float[Tensor, "B N"],
    parts: Iterable[tuple[slice, Rows, Tensor]],
    residual: float,
    real: Bool[Tensor, "B M"] | None = None,
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B M"]]:
    """The same where queries and keys are different tokens: what the queries keep, and what goes to the keys.

    `parts`: images, rows and Ā, all rows in turn. `real`: the keys that are tokens, where some are padding.
    """
    kept: dict[int | None, list[Tensor]] = {}
    moved: list[tuple[slice, Tensor]] = []
    for images, rows, a in parts:
        a = a if real is None else a * real[images, None]
        share = row[images][:, run_of(rows)].to(a) / (residual + (1 - residual) * a.sum(-1)).clamp_min(1e-30)  # [B n]
        kept.setdefault(images.start, []).append(residual * share)
        moved.append((images, (1 - residual) * torch.einsum("bn,bnm->bm", share, a)))
    return torch.cat([torch.cat(shares, 1) for shares in kept.values()]), joined(moved)


def joined(parts: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """Sum the parts that belong to the same images, then concatenate the images."""
    by_images: dict[int | None, Tensor] = {}
    for images, part in parts:
        known = by_images.get(images.start)
        by_images[images.start] = part if known is None else known + part
    return next(iter(by_images.values())) if len(by_images) == 1 else torch.cat(list(by_images.values()))


def pass_by(shown: Shown) -> None:
    """A visitor that ignores the layer; only the gradients are computed."""
    deque(shown.chunks, maxlen=0)


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
        """O, exactly as the fused kernel computes it."""
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
        known = source_of(q, call.k, call.v) if not end and one_by_one(q, call.k) else None
        source, places = known or (None, None)
        inputs: tuple[Tensor, ...] = (q, call.k, call.v)
        inputs = inputs if known is None else tuple(t.detach() for t in inputs)
        out = Followed.apply(source, places, *inputs, call.scale, bias, options, self, call.only, end)
        return out

    def show(self, rows: list[int], a: Weights, grad: Weights) -> None:
        """A layer whose keys and values were not formed (narrowed_block.py)."""
        self.visitor(Shown(iter([(slice(None), rows, a, grad.mul_(a))])))


class Followed(torch.autograd.Function):
    """Scaled dot-product attention whose backward is observed.

    `source`: the tensor whose parts are Q, K and V, if there is one; it then receives their gradients,
    which belong to these `places` in it.
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
        options: dict[str, Any],
        follower: Follower,
        only: list[int] | None,
        end: bool,
    ) -> Tensor:
        ctx.scale, ctx.follower, ctx.only, ctx.end, ctx.places = scale, follower, only, end, places
        out = F.scaled_dot_product_attention(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *inputs, out, bias = ctx.saved_tensors
        alone = one_by_one(*inputs[:2]) and not torch._C._functorch.is_batchedtensor(grads[0])  # of several targets
        whole = None if ctx.places is None else out.new_empty(ctx.places.shape)
        if alone:
            found = tuple(torch.empty_like(t) for t in inputs) if whole is None else ctx.places.of(whole)
            ctx.follower.visitor(Shown(each_image(ctx, inputs, out, bias, grads[0], found)))
        else:
            found = by_pieces(ctx, inputs, out, bias, grads[0])
            whole = None if ctx.places is None else ctx.places.put_together(found)
        own = (None,) * 3 if ctx.end or ctx.places is not None else found
        return (whole, None, *own, *(None,) * 6)


def each_image(
    ctx: Any, inputs: list[Tensor], out: Tensor, bias: Tensor | None, dout: Tensor, found: tuple[Tensor, ...]
) -> Chunks:
    """A and A ⊙ ∂y/∂A of one image after another; ∂y/∂Q, ∂y/∂K and ∂y/∂V are written to `found`."""
    q, k, v = inputs
    memory = OneImage(q, k, ctx.scale, bias)
    product = torch.empty_like(memory.a)
    for i in range(len(q)):
        a = memory.weights(i)
        torch.bmm(dout[i], v[i].mT, out=product).mul_(a)
        yield slice(i, i + 1), slice(None) if ctx.only is None else ctx.only, a[None], product[None]
        if not ctx.end:
            dq, dk, dv = (t[i] for t in found)
            product.addcmul_(a, (out[i] * dout[i]).sum(-1, keepdim=True), value=-1)  # as in `Sums`
            torch.mul(product @ k[i], ctx.scale, out=dq)
            torch.mul(product.mT @ q[i], ctx.scale, out=dk)
            dv.copy_(a.mT @ dout[i])


def by_pieces(ctx: Any, inputs: list[Tensor], out: Tensor, bias: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    """Visit the layer a few images and rows at a time; ∂y/∂Q, ∂y/∂K and ∂y/∂V, unless nothing needs them."""
    q, k, v, dout = (widen(t).contiguous() for t in (*inputs, grad))
    scaled = q * ctx.scale
    inner = (widen(out) * dout).sum(-1, keepdim=True)  # Σ_j A_ij ∂y/∂A_ij = O_i · ∂y/∂O_i
    found: list[tuple[Tensor, ...]] = []  # by slices of images

    def chunks() -> Chunks:
        for images, part in Attention("", "", out, v, scaled, k, 1.0, bias).pieces():
            sums = Sums(scaled[images], k[images], inner[images])
            for rows, a in part.chunks():
                along = dout[images, :, rows]
                product = (along @ part.v.mT).mul_(a)
                yield images, (rows if ctx.only is None else ctx.only[rows]), a, product
                if not ctx.end:
                    sums.add(rows, a, product, along)
            if not ctx.end:
                found.append(sums.result(ctx.scale))

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

    def __init__(self, q: Tensor, k: Tensor, inner: Tensor) -> None:
        self.q, self.k, self.inner = q, k, inner
        self.dq: list[Tensor] = []
        self.dk: Tensor | None = None
        self.dv: Tensor | None = None

    def add(self, rows: Rows, a: Tensor, product: Tensor, dout: Tensor) -> None:
        dscores = product.addcmul_(a, self.inner[:, :, rows], value=-1)  # A·(∂y/∂A − Σ A·∂y/∂A)
        self.dq.append(dscores @ self.k)
        self.dk = plus(self.dk, dscores.mT @ self.q[:, :, rows])
        self.dv = plus(self.dv, a.mT @ dout)

    def result(self, scale: float) -> tuple[Tensor, ...]:
        assert self.dk is not None and self.dv is not None
        return torch.cat(self.dq, 2).mul_(scale), self.dk, self.dv


def plus(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum so far, in the same memory."""
    return part if total is None else total.add_(part)
