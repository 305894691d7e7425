"""Autograd functions whose backward pass carries either the relevance or the plain gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TINY = 1e-9  # stabiliser of the division R/z, as published
Shares = Callable[[Tensor], tuple[Tensor, ...]]  # R of an output -> R of every input; the same for gradients


class Switch:
    """Whether a backward pass carries relevance or the plain gradient."""

    relevance = False


class Turn(torch.autograd.Function):
    """y as a function of signals: relevance flows to them by `shares`, gradients by `slopes` or else y's own graph."""

    @staticmethod
    def forward(ctx: Any, switch: Switch, shares: Shares, slopes: Shares | None, y: Tensor, *signals: Tensor) -> Tensor:
        ctx.switch, ctx.shares, ctx.slopes, ctx.count = switch, shares, slopes, len(signals)
        ctx.set_materialize_grads(False)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        back = ctx.shares if ctx.switch.relevance else ctx.slopes
        if grad is None or back is None:
            return (None, None, None, grad, *[None] * ctx.count)
        return (None, None, None, None, *back(grad))


class Leave(torch.autograd.Function):
    """z: relevance becomes R/z, which the plain gradient then carries back to the inputs."""

    @staticmethod
    def forward(ctx: Any, switch: Switch, z: Tensor) -> Tensor:
        ctx.switch = switch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z)
        return z.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        return None, divide(grad, ctx.saved_tensors[0]) if grad is not None and ctx.switch.relevance else grad


class Enter(torch.autograd.Function):
    """x: the gradient that arrives, times x (and a share), is its relevance."""

    @staticmethod
    def forward(ctx: Any, switch: Switch, x: Tensor, share: float) -> Tensor:
        ctx.switch, ctx.share = switch, share
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is not None and ctx.switch.relevance:
            grad = grad * ctx.saved_tensors[0]
            grad = grad if ctx.share == 1 else grad.mul_(ctx.share)
        return None, grad, None


def divide(r: Tensor, z: Tensor) -> Tensor:
    """R/z; zero where z is zero."""
    return (r / (z + TINY)).masked_fill_(z == 0, 0)
