"""The backward passes of a linear layer and an attention in float32, from values that are exact (exact.py).

Tensor cores multiply bfloat16 and add up in float32. A product of float32 is a sum of such products:

    x·w = Σ xᵢ·wⱼ      x = x₁ + x₂ + x₃, each part the rest rounded to bfloat16; weights in bfloat16 are one part

A long sum of positive terms loses digits, so |x|·|w| is taken apart into its mean and what is left:

    Σ |x|·|w| = m·Σ|w| + Σ (|x| − m)·|w|      m = mean |x|
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitreous.trace.rules.relevance_backward import TINY
from vitreous.trace.rules.relevance_layers import Attended, Linear

MOST = 3  # parts of 8 bits, of which a float32 number is the sum
PARTS = {torch.bfloat16: 1, torch.float16: 2}  # of which other numbers are


class SplitLinear(Linear):
    """As `Linear`, in float32."""

    def slopes(self, grad: Tensor) -> tuple[Tensor, ...]:
        return (product(grad.reshape(-1, grad.shape[-1]), self.weight).view(self.x.shape),)

    def shares(self, r: Tensor, rows: Any = ...) -> Tensor:
        shape = self.x[rows].shape
        x, y, r = (t.reshape(-1, t.shape[-1]) for t in (self.x[rows], self.y[rows], r))
        twice = self.size(x.abs()).add_(y)
        s = torch.div(r, torch.threshold_(twice, 0.0, torch.inf), out=twice)  # z is positive up to rounding
        both = torch.cat([self.weight.clamp_min(0), self.weight.clamp_max(0)], 1) * 2
        up, down = product(s, both).chunk(2, 1)
        return (up * x.clamp_min(0)).addcmul_(down, x.clamp_max(0)).view(shape)

    def size(self, x: Tensor) -> Tensor:
        """|x|·|w| − b, for x = |x|."""
        w = self.weight.abs()
        least = 2 * TINY - (0.0 if self.bias is None else self.bias)
        mean = x.mean(1, keepdim=True)
        return product(x - mean, w.T).addcmul_(mean, w.sum(1, dtype=torch.float64).to(x.dtype)).add_(least)


class SplitAttended(Attended):
    """As `Attended`, in float32."""

    def run_exactly(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """O in float64; Z and A are kept in float32."""
        z = (q.double() * self.c) @ k.double().mT
        a = (z if self.bias is None else z + self.bias).softmax(-1)
        out = a @ v.double()
        self.kept, self.out = (z.add_(self.c * TINY).float(), a.float()), out.float()
        return out

    def over(self, ra: Tensor, z: Tensor) -> Tensor:
        """R_A/Z, in place; Z is not zero, as in float64."""
        return ra.div_(z)


def product(x: Tensor, w: Tensor) -> Tensor:
    """x·w in float32, for x in float32 and a weight in its own precision."""
    if not splits(x):
        return x @ w.to(x.dtype)
    xs, ws = parts(x, MOST), parts(w, PARTS.get(w.dtype, MOST))
    pairs = [(i, j) for i in range(len(xs)) for j in range(len(ws)) if i + j < MOST]
    pairs.sort(key=sum, reverse=True)  # the smallest are added up first
    return multiplied(torch.cat([xs[i] for i, _ in pairs], 1), torch.cat([ws[j] for _, j in pairs]))


def parts(t: Tensor, count: int) -> list[Tensor]:
    """Tensors in bfloat16 that sum to `t`: 8 bits each."""
    found = [t.bfloat16()]
    for _ in range(count - 1):
        t = t - found[-1]
        found.append(t.bfloat16())
    return found


def multiplied(x: Tensor, w: Tensor) -> Tensor:
    """A product of bfloat16, added up in float32."""
    return torch.mm(x, w, out_dtype=torch.float32) if x.is_cuda else x.float() @ w.float()


def splits(x: Tensor) -> bool:
    """Whether products of bfloat16 that are added up in float32 are faster than those of float32."""
    return x.is_cuda and hasattr(torch.ops.aten.mm, "dtype") and torch.cuda.get_device_capability(x.device) >= (8, 0)


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 off, of whose numbers only ten bits are used; restore it on exit."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer of torch's two interfaces
        newer = torch.backends.cuda.matmul
        was, newer.fp32_precision = newer.fp32_precision, "ieee"
        try:
            yield
        finally:
            newer.fp32_precision = was
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
