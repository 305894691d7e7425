"""One layer as the backward pass shows it: A and A ⊙ ∂y/∂A by rows, and the sums over them that methods ask for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitreous.capture.attention import Attention, run_of, widen
from vitreous.types import Heads, Row, Weights

Rows = slice | list[int]
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
        means = ((i, rows, head_mean(product).clamp_min_(0)) for i, rows, _, product in self.chunks)
        return joined((i, step(carried[i].to(mean), mean, 0.5, rows)) for i, rows, mean in means)

    def means(self) -> Float[Tensor, "B N M"]:
        """(mean_h A ⊙ ∂y/∂A)⁺, all rows."""
        parts: dict[int | None, list[Tensor]] = {}
        for images, _, _, product in self.chunks:
            parts.setdefault(images.start, []).append(head_mean(product).clamp_min_(0))
        return torch.cat([torch.cat(rows, 1) for rows in parts.values()])

    def split(
        self, row: Float[Tensor, "B N"], real: Bool[Tensor, "B M"] | None
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B M"]]:
        """The same where queries and keys are different tokens: what the queries keep, and what goes to the keys."""
        means = ((i, rows, head_mean(product).clamp_min_(0)) for i, rows, _, product in self.chunks)
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


def head_mean(product: Weights) -> Float[Tensor, "B N M"]:
    """The mean over attention heads, in half the time of torch's."""
    return product.sum(1).div_(product.shape[1])


def step(carried: Row, a: Float[Tensor, "B n M"], residual: float, rows: Rows = slice(None)) -> Row:
    """One factor of a rollout, multiplied from the left: rows of (r·I + (1−r)·Ā), normalised, weighted and summed."""
    rows = run_of(rows)
    share = carried[:, None, rows] / (residual + (1 - residual) * a.sum(-1)).clamp_min(1e-30)[:, None]  # [B 1 n]
    if share.shape == carried[:, None].shape:  # all rows
        return torch.baddbmm(share, share, a, beta=residual, alpha=1 - residual)[:, 0]
    onward = (1 - residual) * (share @ a)[:, 0]
    onward[:, rows] += residual * share[:, 0]
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
