"""The Libra gradient (Mehri 2025): the rules of CP-LRP, with activations that conserve x·∂y/∂x exactly.

identity    y = f(x)    ∂y/∂x := y/x, without the stabiliser that relevance propagation adds to x
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitreous.trace.rules import gradient
from vitreous.trace.rules.gradient import ACTIVATIONS, CP_LRP, mark, still
from vitreous.trace.rules.mode import Function, carries, root_of


class Ratio(torch.autograd.Function):
    """y with ∂y/∂x := y/x; zero where x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward((y / x).masked_fill_(x == 0, 0))
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0] * ctx.saved_tensors[0], None


def activation(func: Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return mark(Ratio.apply(input, func(input.detach(), *map(still, args), **kwargs)), input)


def power(func: Function, input: Tensor, exponent: Any) -> Tensor:
    """A positive power is an activation, a negative one a denominator."""
    denominator = (exponent <= 0).any() if isinstance(exponent, Tensor) else exponent <= 0
    return (gradient.power if denominator else activation)(func, input, exponent)


def product(func: Function, input: Any, other: Any, **kwargs: Any) -> Any:
    """A product of two functions of one tensor is an activation; any other is shared as in CP-LRP."""
    root = root_of(input) if carries(input) and carries(other) else None
    if root is not None and root is root_of(other) and input.shape == other.shape == root.shape:
        return mark(Ratio.apply(root, func(input.detach(), other.detach(), **kwargs)), root)
    return gradient.product(func, input, other, **kwargs)


LIBRA = replace(
    CP_LRP,
    name="libra",
    rules={**CP_LRP.rules, **dict.fromkeys(ACTIVATIONS, activation), "pow": power, "mul": product},
)
