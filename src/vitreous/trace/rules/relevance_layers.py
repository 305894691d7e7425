"""The backward passes of a linear layer and an attention: plain gradients and the relevance of the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import sum_of, widen
from vitreous.trace.rules.relevance_backward import TINY

PART = 96  # terms of a sum that are added up in float32


class Linear:
    """The backward pass of y = x·w + b: R_x = x⁺·(w⁺S) + x⁻·(w⁻S), S = R/z, z = (x·w + |x|·|w|)/2."""

    def __init__(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, light: bool) -> None:
        self.x, self.y, self.weight, self.bias = x, y, weight, bias
        self.light = light  # whether R may be computed in float32

    def slopes(self, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad.to(self.weight.dtype) @ self.weight,)

    def shares(self, r: Tensor, rows: Any = ...) -> Tensor:
        shape, dtype = self.x[rows].shape, self.x.dtype
        dtype = torch.float32 if self.light and dtype == torch.float64 else dtype
        x, y, r = (t.reshape(-1, t.shape[-1]) for t in (self.x[rows], self.y[rows], r))
        x, w = x.to(dtype), self.weight.to(dtype)
        s = self.over(r, y, self.sized(x.abs(), w.abs().T)).to(dtype)
        w = w * 2
        return (s @ w.clamp_min(0)).mul_(x.clamp_min(0)).addcmul_(s @ w.clamp_max(0), x.clamp_max(0)).view(shape)

    def sized(self, x: Tensor, w: Tensor) -> Tensor:
        """|x|·|w| − b; long sums of positive terms lose precision, so float32 partial sums are added in float64."""
        least = 2 * TINY - (w.new_zeros(w.shape[1]) if self.bias is None else self.bias)
        if x.dtype == self.x.dtype or len(w) < w.shape[1]:
            return torch.addmm(least.to(w.dtype), x, w)
        parts = zip(torch.split(x, PART, 1), torch.split(w, PART))
        return sum_of((part @ other).double() for part, other in parts).add_(least)

    def over(self, r: Tensor, y: Tensor, size: Tensor) -> Tensor:
        """R/2z."""
        twice = size.add_(y.to(size.dtype))
        if size.dtype != torch.float64:
            torch.threshold_(twice, 0.0, torch.inf)  # z is positive up to rounding
        return torch.div(r.to(size.dtype), twice, out=twice)


class Attended:
    """O = A·V, A = softmax(Z + bias), Z = c·Q·Kᵀ, and both backward passes.

    gradient     dA = dO·Vᵀ,  dV = Aᵀ·dO,  dZ = A ⊙ (dA − Σ A ⊙ dA),  dQ = c·dZ·K,  dK = c·dZᵀ·Q
    relevance    S = R/2O,  R_A = A ⊙ S·Vᵀ,  R_V = V ⊙ Aᵀ·S,  T = c·R_A/2Z,  R_Q = Q ⊙ T·K,  R_K = K ⊙ Tᵀ·Q
    """

    out: Tensor
    kept: tuple[Tensor, Tensor]  # Z, stabilised for division, and A
    da: Tensor | None = None  # results of the last backward passes
    ra: Tensor | None = None

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, c: float, bias: Tensor | None) -> None:
        self.q, self.k, self.v, self.c, self.bias = q, k, v, c, bias

    def run(self) -> Tensor:
        """Compute O; Z and A are kept."""
        z, a = self.weights()
        self.kept, self.out = (z.add_(self.c * TINY), a), a @ self.v
        return self.out

    def weights(self) -> tuple[Tensor, Tensor]:
        """Z and A, at least float32."""
        z = (widen(self.q) * self.c) @ widen(self.k).mT
        return z, (z if self.bias is None else z + self.bias).softmax(-1)

    def slopes(self, grad: Tensor) -> tuple[Tensor, ...]:
        _, a = self.kept
        da = grad @ self.v.mT
        self.da = da.float()
        dz = torch._softmax_backward_data(da, a, -1, a.dtype)
        return (dz @ self.k).mul_(self.c), (dz.mT @ self.q).mul_(self.c), a.mT @ grad

    def shares(self, r: Tensor) -> tuple[Tensor, ...]:
        z, a = self.kept if hasattr(self, "kept") else self.weights()
        q, k, v, a = self.q, self.k, self.v, a.to(self.v.dtype)
        s = (r / (widen(self.out) + TINY)).mul_(0.5).to(v.dtype)
        ra = (s @ v.mT).mul_(a)
        self.ra = ra.float() if ra.dtype == torch.float64 else ra.clone()
        t, c = self.over(ra, z), self.c / 2
        return (t @ k).mul_(q).mul_(c), (t.mT @ q).mul_(k).mul_(c), (a.mT @ s).mul_(v)

    def over(self, ra: Tensor, z: Tensor) -> Tensor:
        """R_A/Z, in place; zero where Z is exactly zero, which does not happen by chance in float64."""
        if ra.dtype == torch.float64:
            return ra.div_(z)
        return torch.div(ra, z, out=ra).nan_to_num_(0.0, 0.0, 0.0)
