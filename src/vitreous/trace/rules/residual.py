"""ResLRP: residual additions that share relevance without amplifying it (Berend 2026).

    y = a + b      R_a = w_a·a / (w_a·a + w_b·b) · R,     w_z = 1 + γ·[sign z = sign y],     R_b alike
    as a gradient  ∂y/∂a := y·w_a / (w_a·a + w_b·b),      1 where that is 0/0

The shares sum to one, and |R_a| + |R_b| ≤ (1 + 2/γ)·|R|. With γ = 0 there is no bound where a and b nearly cancel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.trace.rules.gradient import elementwise
from vitreous.trace.rules.mode import Function, Table, carries
from vitreous.trace.rules.origin import is_residual


def residual_table(base: Table, gamma: float, images: int, axis: int) -> Table:
    """A table with this rule for residual additions; `axis`: of the images in a token tensor [B N D] or [N B D]."""
    rule = ResidualSum(gamma, images, axis)
    name = f"{base.name}, residual gamma {gamma}"
    return replace(base, name=name, rules={**base.rules, "add": rule}, repeats=False)


class ResidualSum:
    """The rule for a sum; it notes the relevance at every residual addition of a backward pass."""

    def __init__(self, gamma: float, images: int, axis: int) -> None:
        self.gamma, self.images, self.axis = gamma, images, axis
        self.sums: list[Tensor | None] = []  # of each addition: Σ(|R_a| + |R_b|) and Σ|R| of each image, [2 B]

    def __call__(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """Share the relevance of a residual addition; any other sum keeps its plain gradient."""
        if not (carries(input) and carries(other) and is_residual(input, other)):
            return elementwise(func, input, other, **kwargs)
        self.sums.append(None)
        y = func(input.detach(), other.detach(), **kwargs)
        out: Tensor = Residual.apply(input, other, y, kwargs.get("alpha", 1), self, len(self.sums) - 1)
        return out

    def forget(self) -> None:
        """Drop what earlier backward passes noted."""
        self.sums = [None] * len(self.sums)

    def note(self, index: int, parts: tuple[Tensor, Tensor]) -> None:
        """Note the relevance of the operands, of which the sum is that of their sum."""
        sums = self.by_image(parts[0].abs() + parts[1].abs()), self.by_image((parts[0] + parts[1]).abs())
        self.sums[index] = torch.stack(sums)

    def by_image(self, t: Tensor) -> Float[Tensor, "B"]:
        """The sum for each image; NaN if the images of a tensor cannot be told apart."""
        rows = t.movedim(self.axis if t.ndim == 3 else 0, 0)
        if len(rows) % self.images or (self.axis and t.ndim != 3 and len(rows) != self.images):
            return t.new_full((self.images,), torch.nan)
        return rows.reshape(self.images, -1).sum(1)

    def amplification(self, device: torch.device) -> Float[Tensor, "B additions"]:
        """Σ(|R_a| + |R_b|) / Σ|R| at each addition, in the order of the forward pass; NaN where no relevance passed."""
        none = torch.full((2, self.images), torch.nan, device=device)
        found = torch.stack([none, *(none if one is None else one for one in self.sums)], -1)[..., 1:]
        return found[0] / found[1]


class Residual(torch.autograd.Function):
    """y = a + α·b, whose relevance is shared by `shares`. Copies are kept, since models overwrite tensors in place."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, y: Tensor, alpha: float | int, rule: ResidualSum, index: int) -> Tensor:
        ctx.alpha, ctx.rule, ctx.index = alpha, rule, index
        ctx.save_for_backward(a.clone(), b.clone() if alpha == 1 else b * alpha)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        g, (a, b) = widen(grads[0]), map(widen, kept)
        slopes = [g * share for share in shares(a, b, ctx.rule.gamma)]
        ctx.rule.note(ctx.index, (slopes[0] * a, slopes[1] * b))
        return slopes[0].to(kept[0].dtype), (slopes[1] * ctx.alpha).to(kept[1].dtype), None, None, None, None


def shares(a: Tensor, b: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """y·w_a/(w_a·a + w_b·b) and y·w_b/(w_a·a + w_b·b); none is greater than one."""
    y = a + b
    sign = y.sign()
    weights = [(part.sign() == sign).to(y.dtype).mul_(gamma).add_(1) for part in (a, b)]
    whole = (weights[0] * a).addcmul_(weights[1], b)
    ratio, zero = y.div_(whole), whole == 0
    return weights[0].mul_(ratio).masked_fill_(zero, 1), weights[1].mul_(ratio).masked_fill_(zero, 1)
