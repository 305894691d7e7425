"""Triton kernels for CUDA that compute sums over attention without writing it to memory.

    norms      log Σ_j exp(s·qᵢ·kⱼ)                  one number for each row of A
    read       Σᵢ wᵢ·Aᵢⱼ                             for every head
    gained     Σᵢ wᵢ·(Aᵢⱼ · ∂y/∂Aᵢⱼ)⁺                for every head
    mean sums  of (mean_h A ⊙ ∂y/∂A)⁺, over rows and, weighted, over columns

Tiles of A are formed from Q and K in float32 and summed at once. No sum depends on the order in which tiles finish, so
results are deterministic and independent of the batch. Gradients and weights may hold the rows of several targets, one
target after the other, for the same images.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitreous.types import HeadRows, Row

SIDE = 64  # side of a tile


@triton.jit
def rows_of(pointer, image, head, place, count, width, sb, sh, sn, sd, WIDTH: tl.constexpr):
    """[SIDE WIDTH] of one head, zero beyond the end."""
    channel = tl.arange(0, WIDTH)
    where = image * sb + head * sh + place[:, None] * sn + channel[None, :] * sd
    return tl.load(pointer + where, mask=(place[:, None] < count) & (channel[None, :] < width), other=0.0)


@triton.jit
def norms_kernel(
    Q, K, L,
    scale, B, H, N, M, width, qb, qh, qn, qd, kb, kh, kn, kd,
    WIDTH: tl.constexpr, SIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """log Σⱼ exp(s·qᵢ·kⱼ) for SIDE rows of one head."""
    image, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    n = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    q = rows_of(Q, image, head, n, N, width, qb, qh, qn, qd, WIDTH)
    most = tl.full([SIDE], -float("inf"), tl.float32)
    total = tl.zeros([SIDE], tl.float32)
    for start in range(0, M, SIDE):
        m = start + tl.arange(0, SIDE)
        k = rows_of(K, image, head, m, M, width, kb, kh, kn, kd, WIDTH)
        s = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        s = tl.where(m[None, :] < M, s, -float("inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(s - higher[:, None]), 1)
        most = higher
    tl.store(L + (image * H + head) * N + n, most + tl.log(total), mask=n < N)


@triton.jit
def columns_kernel(
    Q, K, V, G, L, W, OUT,
    scale, B, H, N, M, width, qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, gb, gh, gn, gd,
    GAIN: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Σᵢ wᵢ·Aᵢⱼ, or with GAIN Σᵢ wᵢ·(Aᵢⱼ·∂y/∂Aᵢⱼ)⁺, for SIDE keys of one head."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    image = row % B
    m = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    k = rows_of(K, image, head, m, M, width, kb, kh, kn, kd, WIDTH)
    if GAIN:
        v = rows_of(V, image, head, m, M, width, vb, vh, vn, vd, WIDTH)
    total = tl.zeros([SIDE], tl.float32)
    for start in range(0, N, SIDE):
        n = start + tl.arange(0, SIDE)
        q = rows_of(Q, image, head, n, N, width, qb, qh, qn, qd, WIDTH)
        norm = tl.load(L + (image * H + head) * N + n, mask=n < N, other=0.0)
        weight = tl.load(W + row * N + n, mask=n < N, other=0.0)
        a = tl.exp(tl.dot(q, tl.trans(k), input_precision=EXACT) * scale - norm[:, None])
        if GAIN:
            g = rows_of(G, row, head, n, N, width, gb, gh, gn, gd, WIDTH)
            a = tl.maximum(a * tl.dot(g, tl.trans(v), input_precision=EXACT), 0.0)
        total += tl.sum(tl.where(n[:, None] < N, weight[:, None] * a, 0.0), 0)
    tl.store(OUT + (row * H + head) * M + m, total, mask=m < M)


@triton.jit
def mean_kernel(
    Q, K, V, G, L, W, OUT,
    scale, B, H, N, M, width, qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd, gb, gh, gn, gd,
    DOWN: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(mean_h A ⊙ ∂y/∂A)⁺ of one image: Σⱼ for SIDE rows, or with DOWN Σᵢ wᵢ· for SIDE columns."""
    row = tl.program_id(1).to(tl.int64)
    image = row % B
    own = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros([SIDE], tl.float32)
    for start in range(0, N if DOWN else M, SIDE):
        other = start + tl.arange(0, SIDE)
        n = other if DOWN else own
        m = own if DOWN else other
        product = tl.zeros([SIDE, SIDE], tl.float32)
        for head in range(0, H):
            q = rows_of(Q, image, head, n, N, width, qb, qh, qn, qd, WIDTH)
            k = rows_of(K, image, head, m, M, width, kb, kh, kn, kd, WIDTH)
            v = rows_of(V, image, head, m, M, width, vb, vh, vn, vd, WIDTH)
            g = rows_of(G, row, head, n, N, width, gb, gh, gn, gd, WIDTH)
            norm = tl.load(L + (image * H + head) * N + n, mask=n < N, other=0.0)
            a = tl.exp(tl.dot(q, tl.trans(k), input_precision=EXACT) * scale - norm[:, None])
            product += a * tl.dot(g, tl.trans(v), input_precision=EXACT)
        product = tl.where((n[:, None] < N) & (m[None, :] < M), tl.maximum(product / H, 0.0), 0.0)
        if DOWN:
            weight = tl.load(W + row * N + n, mask=n < N, other=0.0)
            total += tl.sum(weight[:, None] * product, 0)
        else:
            total += tl.sum(product, 1)
    tl.store(OUT + row * (M if DOWN else N) + own, total, mask=own < (M if DOWN else N))


class Fused:
    """Sums over the attention of one layer: Q [B H N d], K [B H M d], and for the gradient V and ∂y/∂O [KB H N d]."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, v: Tensor | None = None, grad: Tensor | None = None) -> None:
        self.q, self.k, self.scale = q, k, scale
        self.v, self.grad = (k, q) if v is None or grad is None else (v, grad.to(v.dtype))
        self.b, self.h, self.n, self.width = q.shape
        self.m, self.rows = k.shape[2], len(self.grad)
        self.norms = q.new_empty(self.b, self.h, self.n, dtype=torch.float32)
        self.launch(norms_kernel, (q, k), self.norms, (self.b * self.h, self.n))

    def read(self, weights: Row) -> HeadRows:
        """Σᵢ wᵢ·Aᵢⱼ."""
        return self.columns(weights, gain=False)

    def gained(self, weights: Row) -> HeadRows:
        """Σᵢ wᵢ·(Aᵢⱼ·∂y/∂Aᵢⱼ)⁺."""
        return self.columns(weights, gain=True)

    def columns(self, weights: Row, gain: bool) -> HeadRows:
        out = self.norms.new_empty(self.rows, self.h, self.m)
        self.launch(
            columns_kernel, self.tensors, (self.norms, ready(weights), out), (self.rows * self.h, self.m), GAIN=gain
        )
        return out

    def mean_rows(self) -> Row:
        """Σⱼ (mean_h A ⊙ ∂y/∂A)⁺."""
        out = self.norms.new_empty(self.rows, self.n)
        self.launch(mean_kernel, self.tensors, (self.norms, self.norms, out), (self.rows, self.n), DOWN=False)
        return out

    def mean_columns(self, weights: Row) -> Row:
        """Σᵢ wᵢ·(mean_h A ⊙ ∂y/∂A)⁺."""
        out = self.norms.new_empty(self.rows, self.m)
        self.launch(mean_kernel, self.tensors, (self.norms, ready(weights), out), (self.rows, self.m), DOWN=True)
        return out

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.grad

    def launch(self, kernel: Any, given: tuple[Tensor, ...], made: Any, size: tuple[int, int], **flags: bool) -> None:
        """The launch grid: one program per tile along the last axis, and per entry of the first."""
        made = made if isinstance(made, tuple) else (made,)
        strides = [step for tensor in given for step in tensor.stride()]
        numbers = (self.scale, self.b, self.h, self.n, self.m, self.width, *strides)
        exact = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        width = max(16, triton.next_power_of_2(self.width))
        grid = (triton.cdiv(size[1], SIDE), size[0])
        kernel[grid](*given, *made, *numbers, **flags, WIDTH=width, SIDE=SIDE, EXACT=exact)


def ready(weights: Row) -> Tensor:
    return weights.float().contiguous()
