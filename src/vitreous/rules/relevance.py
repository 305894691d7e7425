"""Rules in relevance form: the backward pass carries the relevance R itself (Chefer, CVPR 2021).

linear      z = x⁺w⁺ + x⁻w⁻              R_x = x⁺·(w⁺S) + x⁻·(w⁻S)        S = R/z, without bias (α = 1, β = 0)
product     z = a·b                      R_a = a·∂z/∂a·S / 2, R_b alike
sum         z = a + b                    a·S and b·S, rescaled to |Σa·S| : |Σb·S| and, together, ΣR
mean …      z linear in x                R_x = x·∂z/∂x·S
all else    activations, norms, softmax, a scale: R_x = R

Every ruled function also keeps its plain gradient: a `Switch` says which of the two a backward pass carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture import additive
from vitreous.rules.gradient import ACTIVATIONS, GATES, HOMOGENEOUS, PRODUCTS, scale
from vitreous.rules.mode import LINEAR, SHAPE, Function, Rule, Table, carries, constant, tensors_in, words

TINY = 1e-9  # what keeps R/z from dividing by zero, as published
DOWN = words("to float half bfloat16 type type_as")
NORMS = words("layer_norm rms_norm group_norm instance_norm batch_norm normalize")
Shares = Callable[[Tensor], tuple[Tensor, ...]]  # R of an output -> R of every input


class Switch:
    """What a backward pass carries: relevance, or the plain gradient."""

    relevance = False


class Turn(torch.autograd.Function):
    """y, made of signals: gradients go on to y's own graph, relevance to the signals by `shares`."""

    @staticmethod
    def forward(ctx: Any, switch: Switch, shares: Shares, y: Tensor, *signals: Tensor) -> Tensor:
        ctx.switch, ctx.shares, ctx.count = switch, shares, len(signals)
        ctx.set_materialize_grads(False)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None or not ctx.switch.relevance:
            return (None, None, grad, *[None] * ctx.count)
        return (None, None, None, *ctx.shares(grad))


class Leave(torch.autograd.Function):
    """z: relevance becomes R/z, which the plain gradient then takes back to the inputs."""

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
    """x: what comes back, times x (and a share), is its relevance."""

    @staticmethod
    def forward(ctx: Any, switch: Switch, x: Tensor, share: float) -> Tensor:
        ctx.switch, ctx.share = switch, share
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        turned = grad * ctx.saved_tensors[0] * ctx.share if grad is not None and ctx.switch.relevance else grad
        return None, turned, None


def divide(r: Tensor, z: Tensor) -> Tensor:
    """R/z; nothing where z is zero."""
    return (r / (z + TINY)).masked_fill_(z == 0, 0)


# ------------------------------------------------------------------------------------------------------------- rules


class Chefer:
    """The rules, for `images` pictures whose axis in a tensor of tokens is `axis`."""

    def __init__(self, images: int, axis: int) -> None:
        self.images, self.axis, self.switch = images, axis, Switch()

    @contextmanager
    def carrying_relevance(self) -> Iterator[None]:
        """Backward passes carry relevance within, gradients after."""
        self.switch.relevance = True
        try:
            yield
        finally:
            self.switch.relevance = False

    @property
    def table(self) -> Table:
        rules: dict[str, Rule] = dict.fromkeys((LINEAR | HOMOGENEOUS) - SHAPE, self.simple)
        rules |= dict.fromkeys(ACTIVATIONS | GATES | NORMS | words("pow neg softmax"), self.identity)
        rules |= dict.fromkeys(words("rsqrt reciprocal rtruediv rdiv"), scale)
        rules |= dict.fromkeys(words("conv1d conv2d conv3d"), self.convolve)
        rules |= dict.fromkeys(PRODUCTS, self.product)
        rules |= {"linear": self.linear, "scaled_dot_product_attention": self.attend}
        rules |= {"add": self.add, "sub": self.sub, "rsub": self.swapped_sub}
        rules |= {"mul": self.multiply, "div": self.quotient}
        return Table("chefer", rules, SHAPE, "input times gradient over output", self.other)

    def turn(self, y: Tensor, shares: Shares, *signals: Tensor) -> Tensor:
        out: Tensor = Turn.apply(self.switch, shares, y, *signals)
        return out

    def identity(self, func: Function, *args: Any, **kwargs: Any) -> Tensor:
        """R_x = R, of the first signal."""
        x = next(t for t in args if carries(t))
        shape = x.shape
        return self.turn(func(*args, **kwargs), lambda r: (r.sum_to_size(shape),), x)

    def simple(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """R_x = x·∂z/∂x·R/z."""
        return self.shared(func, 1.0, *args, **kwargs)

    def other(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """The same, for a function that nobody knows (many return no tensor at all)."""
        out = func(*args, **kwargs)
        return self.simple(func, *args, **kwargs) if any(map(carries, tensors_in((out,)))) else out

    def shared(self, func: Function, share: float, *args: Any, **kwargs: Any) -> Any:
        return self.left(func(*(self.entered(arg, share) for arg in args), **kwargs))

    def entered(self, value: Any, share: float) -> Any:
        if isinstance(value, list | tuple):
            return [self.entered(item, share) for item in value]
        return Enter.apply(self.switch, value, share) if carries(value) else value

    def left(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self.left(item) for item in value]
        return Leave.apply(self.switch, value) if carries(value) else value

    def product(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """Every factor gets an equal share; a constant factor is a weight."""
        factors = list(tensors_in(args))
        if len(factors) != 2 or all(map(carries, factors)):
            return self.shared(func, 1 / sum(map(carries, factors)), *args, **kwargs)
        x, weight = sorted(factors, key=carries, reverse=True)

        def apply(one: Tensor, other: Tensor) -> Tensor:
            made: Tensor = func(*exchanged(args, {id(x): one, id(weight): other}), **kwargs)
            return made

        return self.positive(apply, func(*args, **kwargs), x, weight)

    def multiply(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """Elementwise: R passes by a scale; two signals share it."""
        if carries(input) and carries(other):
            out: Tensor = self.shared(func, 0.5, input, other, **kwargs)
            return out
        return self.identity(func, input, other, **kwargs)

    def quotient(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """R passes by a denominator."""
        other = other.detach() if isinstance(other, Tensor) else other
        if carries(input):
            return self.identity(func, input, other, **kwargs)
        out: Tensor = func(input, other, **kwargs)
        return out

    def add(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        return self.plus(func(input, other, **kwargs), input, other, kwargs.get("alpha", 1.0))

    def sub(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """a − b."""
        return self.plus(func(input, other, **kwargs), input, other, -kwargs.get("alpha", 1.0))

    def swapped_sub(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """b − a."""
        return self.plus(func(input, other, **kwargs), other, input, -kwargs.get("alpha", 1.0))

    def plus(self, y: Tensor, a: Any, b: Any, alpha: float | int) -> Tensor:
        """y = a + α·b."""
        if not (carries(a) and carries(b)):
            return self.identity(lambda *_: y, a, b)
        parts = a.detach(), b.detach() * alpha if alpha != 1 else b.detach()
        z = y.detach()

        def shares(r: Tensor) -> tuple[Tensor, ...]:
            r = divide(r, z) * z  # as published: so does the fork that reads z twice
            s = divide(r, z)
            found = [(part * s).sum_to_size(part.shape) for part in parts]
            sums = [self.by_image(t) for t in found]
            whole, size = self.by_image(r), sums[0].abs() + sums[1].abs()
            factors = [divide(divide(one.abs(), size) * whole, one) for one in sums]
            return tuple(t * self.spread(factor, t) for t, factor in zip(found, factors))

        return self.turn(y, shares, a, b)

    def by_image(self, t: Tensor) -> Tensor:
        """Σ for each image, [B] (or of all, where a tensor does not hold them apart)."""
        axis = self.axis if t.ndim == 3 else 0
        return t.movedim(axis, 0).reshape(self.images if t.shape[axis] % self.images == 0 else 1, -1).sum(1)

    def spread(self, values: Tensor, t: Tensor) -> Tensor:
        """[B] to the axes of t."""
        axis = self.axis if t.ndim == 3 else 0
        repeated = values.repeat_interleave(t.shape[axis] // len(values))
        return repeated.view([-1 if i == axis else 1 for i in range(t.ndim)])

    def linear(self, func: Function, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """z = (x·w + |x|·|w|)/2, so that no part of x or w is formed."""
        if carries(weight):
            out: Tensor = self.shared(func, 0.5, input, weight, bias)
            return out
        y: Tensor = func(input, weight, bias)
        x, given = input.detach(), y.detach()

        def shares(r: Tensor) -> tuple[Tensor, ...]:
            rows = read_rows(r)
            size, xs, rs = weight.abs(), x[rows], r[rows]
            plain = given[rows] if bias is None else given[rows] - bias
            s = divide(rs, F.linear(xs.abs(), size).add_(plain).mul_(0.5))
            found = (s @ weight).mul_(xs).add_((s @ size).mul_(xs.abs())).mul_(0.5)
            if rows is Ellipsis:
                return (found,)
            whole = torch.zeros_like(x)
            whole[rows] = found
            return (whole,)

        return self.turn(y, shares, input)

    def convolve(
        self, func: Function, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        def apply(x: Tensor, w: Tensor) -> Tensor:
            made: Tensor = func(x, w, None, *args, **kwargs)
            return made

        return self.positive(apply, func(input, weight, bias, *args, **kwargs), input, weight)

    def positive(self, apply: Callable[[Tensor, Tensor], Tensor], y: Tensor, signal: Tensor, weight: Tensor) -> Tensor:
        """As `linear`, for any y that is linear in x and in a weight, through torch's own gradients."""
        x = signal.detach()

        def shares(r: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                leaves = x.clone().requires_grad_(), x.abs().requires_grad_()
                parts = apply(leaves[0], weight), apply(leaves[1], weight.abs())
            s = divide(r, (parts[0] + parts[1]).detach() / 2)
            found = torch.autograd.grad(parts, leaves, (s, s))
            return ((found[0] * x + found[1] * x.abs()) / 2,)

        return self.turn(y, shares, signal)

    def attend(
        self,
        func: Function,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention written out: two products and a softmax, each with its rule."""
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        bias = additive(attn_mask, is_causal, query, key)

        def weights(scores: Tensor) -> Tensor:
            return (scores * factor if bias is None else scores * factor + bias).softmax(-1)

        scores = self.product(torch.matmul, query, key.mT)
        out: Tensor = self.product(torch.matmul, self.identity(weights, scores), value)
        return out


def exchanged(values: Any, new: dict[int, Tensor]) -> Any:
    """Arguments with other tensors in their places."""
    if isinstance(values, list | tuple):
        return [exchanged(value, new) for value in values]
    return new.get(id(values), values)


def read_rows(r: Tensor) -> Any:
    """The rows of R that are not zero, if they are few (the head reads one token); else all."""
    rows = r.detach().ne(0).any(-1)
    return rows if int(rows.sum()) * 2 < rows.numel() else Ellipsis


# --------------------------------------------------------------------------------------------------------- precision


class Double(TorchFunctionMode):
    """Everything in float64, over a model of any precision: parameters are cast as they are used, casts are ignored."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(map(double, args)), {key: double(value) for key, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") in DOWN and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            return self.moved(func, args, kwargs)
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = torch.float64
        return double(func(*args, **kwargs))

    def moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A cast to another precision is none; one to whole numbers, or to another device, is."""
        out = func(*args, **kwargs)
        return args[0].to(out.device) if isinstance(out, Tensor) and out.is_floating_point() else out


def double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return constant(value).double()
    if type(value) in (list, tuple):
        return type(value)(map(double, value))
    return value
