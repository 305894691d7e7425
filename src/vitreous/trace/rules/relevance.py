"""Rules in relevance form: the backward pass carries the relevance R itself (Chefer, CVPR 2021).

linear      z = x⁺w⁺ + x⁻w⁻              R_x = x⁺·(w⁺S) + x⁻·(w⁻S)        S = R/z, without bias (α = 1, β = 0)
product     z = a·b                      R_a = a·∂z/∂a·S / 2, R_b alike
attention   O = A·V, A = softmax(Z)      two products, R_Z = R_A
sum         z = a + b                    a·S and b·S, rescaled to |Σa·S| : |Σb·S| and, together, ΣR
mean …      z linear in x                R_x = x·∂z/∂x·S
all else    activations, norms, softmax, a scale: R_x = R

Every function with a rule also keeps its plain gradient; a `Switch` selects which of the two a backward pass carries.

Relevance is ill-conditioned where R is divided by a sum near zero: z = a + b, and Q·Kᵀ. The forward pass and the
gradient therefore need float64. Errors of R itself are hardly amplified, so the linear layers on both sides of an
activation compute R in float32. Those around an attention do not, because the relevance from Q·Kᵀ is large and of both
signs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.capture import additive
from vitreous.trace.rules.exact import EXACT, exact, in_float64, known_as
from vitreous.trace.rules.gradient import ACTIVATIONS, GATES, HOMOGENEOUS, PRODUCTS, scale
from vitreous.trace.rules.mode import LINEAR, SHAPE, Function, Rule, Table, carries, tensors_in, words
from vitreous.trace.rules.relevance_backward import TINY, Enter, Leave, Shares, Switch, Turn, divide
from vitreous.trace.rules.relevance_layers import Attended, Linear
from vitreous.trace.rules.relevance_split import SplitAttended, SplitLinear

NORMS = words("layer_norm rms_norm group_norm instance_norm batch_norm normalize")
LAYER = "_vitreous_layer"  # attribute of a linear layer's output: the layer
ACTIVE = "_vitreous_active"  # attribute of an activation's output
CALL = "_vitreous_call"  # attribute of an attention's output: the attention


class Chefer:
    """The rules for `images` images, whose axis in a token tensor is `axis`; `sums`: the precision of sums over R."""

    def __init__(self, images: int, axis: int, sums: torch.dtype = torch.float32) -> None:
        self.images, self.axis, self.sums, self.switch = images, axis, sums, Switch()
        self.dense = self.forked = False

    @contextmanager
    def carrying_relevance(self) -> Iterator[None]:
        """Carry relevance in backward passes within this context, gradients afterwards."""
        self.switch.relevance, self.dense, self.forked = True, False, False
        try:
            yield
        finally:
            self.switch.relevance = False

    @property
    def table(self) -> Table:
        rules: dict[str, Rule] = dict.fromkeys((LINEAR | HOMOGENEOUS) - SHAPE, self.simple)
        rules |= dict.fromkeys(GATES | NORMS | words("pow neg softmax"), self.identity)
        rules |= dict.fromkeys(ACTIVATIONS, self.activate)
        rules |= dict.fromkeys(words("rsqrt reciprocal rtruediv rdiv"), scale)
        rules |= dict.fromkeys(words("conv1d conv2d conv3d"), self.convolve)
        rules |= dict.fromkeys(PRODUCTS, self.product)
        rules |= {"linear": self.linear, "scaled_dot_product_attention": self.attend}
        rules |= {"add": self.add, "sub": self.sub, "rsub": self.swapped_sub}
        rules |= {"mul": self.multiply, "div": self.quotient}
        return Table("chefer", rules, SHAPE, "input times gradient over output", self.other)

    def turn(self, y: Tensor, shares: Shares, *signals: Tensor, slopes: Shares | None = None) -> Tensor:
        out: Tensor = Turn.apply(self.switch, shares, slopes, y, *signals)
        return out

    def identity(self, func: Function, *args: Any, **kwargs: Any) -> Tensor:
        """R_x = R for the first signal."""
        x = next(t for t in args if carries(t))
        shape = x.shape
        return self.turn(func(*args, **kwargs), lambda r: (r.sum_to_size(shape),), x)

    def activate(self, func: Function, *args: Any, **kwargs: Any) -> Tensor:
        """R_x = R; the linear layers on both sides may compute R in float32."""
        layer: Linear | None = getattr(next(t for t in args if carries(t)), LAYER, None)
        if layer is not None:
            layer.light = True
        out = self.identity(func, *args, **kwargs)
        setattr(out, ACTIVE, True)
        return out

    def simple(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """R_x = x·∂z/∂x·R/z."""
        return self.shared(func, 1.0, *args, **kwargs)

    def other(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """The same for an unknown function (many return no tensor at all)."""
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
        """Every factor gets an equal share; a constant factor counts as a weight."""
        factors = list(tensors_in(args))
        if len(factors) != 2 or all(map(carries, factors)):
            return self.shared(func, 1 / sum(map(carries, factors)), *args, **kwargs)
        x, weight = sorted(factors, key=carries, reverse=True)

        def apply(one: Tensor, other: Tensor) -> Tensor:
            made: Tensor = func(*exchanged(args, {id(x): one, id(weight): other}), **kwargs)
            return made

        return self.positive(apply, func(*args, **kwargs), x, weight)

    def multiply(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """Elementwise product: R passes unchanged through a scale; two signals share it."""
        if carries(input) and carries(other):
            out: Tensor = self.shared(func, 0.5, input, other, **kwargs)
            return out
        return self.identity(func, input, other, **kwargs)

    def quotient(self, func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
        """R passes unchanged through a division."""
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
            if self.forked:
                whole = z + TINY
                r = (r / whole).mul_(z)  # as published: z has two consumers, and its relevance is z·(R/z + R′/z)
                total = self.by_image(r)
                s = r.div_(whole)
            else:
                total, s = self.by_image(r), divide(r, z)
            self.forked = True  # all sums but the last have two consumers: a branch and the next sum
            found = [(part * s).sum_to_size(part.shape) for part in parts]
            sums = [self.by_image(t) for t in found]
            size = sums[0].abs() + sums[1].abs()
            factors = [divide(divide(one.abs(), size) * total, one) for one in sums]
            return tuple(t.mul_(self.spread(factor, t)) for t, factor in zip(found, factors))

        return self.turn(y, shares, a, b)

    def by_image(self, t: Tensor) -> Tensor:
        """The sum for each image, [B] (or over all, if the tensor has no axis of images)."""
        axis = self.axis if t.ndim == 3 else 0
        return (
            t.movedim(axis, 0)
            .reshape(self.images if t.shape[axis] % self.images == 0 else 1, -1)
            .sum(1, dtype=torch.promote_types(t.dtype, self.sums))
        )

    def spread(self, values: Tensor, t: Tensor) -> Tensor:
        """Reshape [B] to broadcast over t."""
        axis = self.axis if t.ndim == 3 else 0
        repeated = values[:, None].expand(-1, t.shape[axis] // len(values)).reshape(-1)
        return repeated.view([-1 if i == axis else 1 for i in range(t.ndim)])

    def linear(self, func: Function, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer; a weight that carries a signal itself counts as a factor."""
        if carries(weight):
            out: Tensor = self.shared(func, 0.5, input, weight, bias)
            return out
        known = hasattr(input, EXACT)
        with torch.no_grad():
            precise: Tensor = in_float64(func, input, weight, bias) if known else func(input, weight, bias)
        y = precise.to(input.dtype)
        kind = SplitLinear if known else Linear
        layer = kind(input.detach(), y, exact(weight), bias, light=hasattr(input, ACTIVE))

        def shares(r: Tensor) -> tuple[Tensor, ...]:
            rows = self.read_rows(r)
            if rows is Ellipsis:
                return (layer.shares(r),)
            whole = torch.zeros_like(layer.x)
            whole[rows] = layer.shares(r[rows], rows).to(whole.dtype)
            return (whole,)

        out = self.turn(y, shares, input, slopes=layer.slopes)
        setattr(out, LAYER, layer)
        return known_as(out, precise) if known else out

    def read_rows(self, r: Tensor) -> Any:
        """The rows of R that are not zero, while they are few (the classifier uses one token); otherwise all rows."""
        if self.dense or r.ndim < 3 or r.is_cuda:  # on a GPU the check would synchronise
            return ...
        rows = r.ne(0).any(-1)
        self.dense = int(rows.sum()) * 2 >= rows.numel()
        return ... if self.dense else rows

    def convolve(
        self, func: Function, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        def apply(x: Tensor, w: Tensor) -> Tensor:
            made: Tensor = func(x, w, None, *args, **kwargs)
            return made

        return self.positive(apply, func(input, weight, bias, *args, **kwargs), input, weight)

    def positive(self, apply: Callable[[Tensor, Tensor], Tensor], y: Tensor, signal: Tensor, weight: Tensor) -> Tensor:
        """As `linear`, for any y that is linear in x and in a weight, with torch's own gradients."""
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
        """Two products and a softmax: in one step if Q, K and V all carry signals, else each by its own rule."""
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        bias = additive(attn_mask, is_causal, query, key)
        if carries(bias) or not all(map(carries, (query, key, value))):
            scores = self.product(torch.matmul, query, key.mT)
            a = self.identity(lambda z: (z * factor if bias is None else z * factor + bias).softmax(-1), scores)
            return self.product(torch.matmul, a, value)  # type: ignore[no-any-return]
        kind = SplitAttended if hasattr(query, EXACT) else Attended
        call = kind(query.detach(), key.detach(), value.detach(), factor, bias)
        if isinstance(call, SplitAttended):
            precise = call.run_exactly(*map(exact, (query, key, value)))
            out = known_as(self.turn(call.out, call.shares, query, key, value, slopes=call.slopes), precise)
        elif query.dtype == torch.float64:
            out = self.turn(call.run(), call.shares, query, key, value, slopes=call.slopes)
        else:
            y = func(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
            call.out = y.detach()
            out = self.turn(y, call.shares, query, key, value)
        setattr(out, CALL, call)
        return out


def exchanged(values: Any, new: dict[int, Tensor]) -> Any:
    """The arguments with their tensors replaced."""
    if isinstance(values, list | tuple):
        return [exchanged(value, new) for value in values]
    return new.get(id(values), values)
