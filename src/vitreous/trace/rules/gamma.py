"""The γ rule for linear layers and convolutions: contributions of the output's own sign count more (Montavon 2019).

    R_i = Σ_j (x_i·w_ij + γ·[x_i·w_ij]ˢ) · R_j/z_j      z_j = Σ_i (x_i·w_ij + γ·[x_i·w_ij]ˢ) + b_j + γ·[b_j]ˢ

where [·]ˢ is the part that has the sign of y_j. Both follow from the layer once more, in absolute values:

    t_j = Σ_i |x_i|·|w_ij| + |b_j|      |z_j| = (1 + γ/2)·|y_j| + γ/2·t_j
    ∂y/∂x := (1 + γ/2)·∂y/∂x·s + γ/2·∂t/∂x·(sign y·s)      s = |y|/|z|
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.trace.rules.gradient import uniform
from vitreous.trace.rules.mode import Function, Rule, Table, carries, words
from vitreous.trace.rules.origin import is_embedding

CONVOLUTIONS = words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
TINY, LEAST = 1e-6, 1e-10  # stabilisers of R/z and of R/x


def gamma_table(base: Table, linear: float, patch: float) -> Table:
    """A table with the γ rule in linear layers and in the patch embedding; γ = 0 leaves the rules as they are."""
    if linear == patch == 0:
        return base

    def layer(func: Function, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A linear layer; one that reads pixels embeds the patches, as a convolution would."""
        gamma = patch if carries(input) and is_embedding(input) else linear
        return enlarged(gamma)(func, input, weight, bias, *args, **kwargs)

    rules = {**base.rules, "linear": layer, **dict.fromkeys(CONVOLUTIONS, enlarged(patch))}
    return replace(base, name=f"{base.name}, gamma {linear} {patch}", rules=rules, repeats=linear == patch)


def enlarged(gamma: float) -> Rule:
    """The rule for a function of an input, a weight and a bias; a weight that carries a signal is a factor."""

    def rule(func: Function, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        if gamma == 0 or carries(weight) or not carries(input):
            return uniform(func, input, weight, bias, *args, **kwargs)
        x, size = Sized.apply(input)
        y = func(x, weight, bias, *args, **kwargs)
        t = func(size, weight.abs(), None if bias is None else bias.abs(), *args, **kwargs)
        return Gamma.apply(y, t, gamma)

    return rule


class Sized(torch.autograd.Function):
    """x and |x|, whose gradient is R/x with a stabiliser; an input of zero has no relevance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = widen(x)
        size = wide.abs()
        ctx.save_for_backward((wide / (size + LEAST)).to(x.dtype))
        return x.detach(), size.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (sign,) = ctx.saved_tensors
        return grads[0] * sign.abs() + grads[1] * sign  # type: ignore[no-any-return]


class Gamma(torch.autograd.Function):
    """y, whose relevance flows back through y and through t, the same layer in absolute values."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, t: Tensor, gamma: float) -> Tensor:
        wide = widen(y)
        ctx.half = gamma / 2
        z = wide.abs().mul_(1 + ctx.half).add_(widen(t), alpha=ctx.half).add_(TINY)
        ctx.save_for_backward((wide / z).to(y.dtype))
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (signed,) = ctx.saved_tensors  # y/|z|
        return (grads[0] * signed.abs()).mul_(1 + ctx.half), (grads[0] * signed).mul_(ctx.half), None
