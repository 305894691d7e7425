"""Rules in gradient form, under which x·∂y/∂x is the relevance of x (Achtibat 2024, Ali 2022).

identity    y = f(x)                     ∂y/∂x := y/x             an activation passes its relevance on
uniform     y = a·b                      half of each gradient    two signals in a product share equally
norm        y = (x − μ)/σ                σ is a constant          as is any denominator
attention   O = softmax(QKᵀ)·V           AttnLRP: uniform twice (q/4, k/4, v/2);   CP-LRP: A is a constant

An activation that a model spells out, such as x·sigmoid(1.702·x), is recognised because its factors are elementwise
functions of the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.capture.source import Parts, source_of
from vitreous.capture.unfused import TAG
from vitreous.trace.rules.mode import LINEAR, Function, Rule, Table, carries, root_of, set_root, tensors_in, words

TINY = 1e-10  # stabiliser of the division y/x

ACTIVATIONS = words(
    """gelu silu relu relu6 tanh elu celu selu leaky_relu prelu rrelu mish hardswish hardtanh softsign tanhshrink
    hardshrink softshrink threshold erf sin square sqrt abs clamp clamp_min clamp_max"""
)
GATES = words("sigmoid hardsigmoid exp expm1 exp2 softplus logsigmoid log log1p log2 cos erfc rpow")  # f(0) is not 0
PRODUCTS = words("matmul rmatmul bmm mm mv dot inner tensordot einsum")
SUMS = words("baddbmm addbmm addmm")  # a bias plus a product
HOMOGENEOUS = words(  # of degree one: the plain gradient conserves relevance
    """max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d max min amax amin maximum minimum fmax
    fmin sort topk msort norm vector_norm linalg_norm linalg_vector_norm"""
)


class Identity(torch.autograd.Function):
    """y with the relevance of x: ∂y/∂x := y/x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is torch.float16:  # TINY underflows in float16
            ratio = (widen(y) / (widen(x) + TINY)).to(y.dtype)
        else:
            ratio = x + TINY
            torch.div(y, ratio, out=ratio)
        ctx.save_for_backward(ratio)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0] * ctx.saved_tensors[0], None


class Share(torch.autograd.Function):
    """x with only a share of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0] * ctx.share, None


class Norm(torch.autograd.Function):
    """y = w·(x − μ)/σ + b with a constant 1/σ (`centred`: with μ), which is all that is kept of x: the model may
    overwrite x in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, inverse: Tensor, weight: Tensor | None, axes: int, centred: bool
    ) -> Tensor:
        ctx.axes, ctx.centred, ctx.dtype = tuple(range(-axes, 0)), centred, x.dtype
        ctx.save_for_backward(inverse, weight)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inverse, weight = ctx.saved_tensors
        if ctx.centred:
            return centred_grad(grads[0].to(ctx.dtype), inverse, weight, ctx.axes), None, None, None, None, None
        dx = widen(grads[0]) * inverse
        dx = dx if weight is None else dx * weight
        return dx.to(ctx.dtype), None, None, None, None, None


def centred_grad(grad: Tensor, inverse: Tensor, weight: Tensor | None, axes: tuple[int, ...]) -> Tensor:
    """(w·g − mean(w·g))/σ in one kernel: torch's gradient of a layer norm at an x that equals its mean."""
    shape = [grad.shape[axis] for axis in axes]
    weight = None if weight is None else weight.to(grad.dtype)
    zero, mean = torch.zeros_like(grad), torch.zeros_like(inverse)
    gradient = torch.ops.aten.native_layer_norm_backward
    found: Tensor = gradient(grad, zero, shape, mean, inverse, weight, None, [True, False, False])[0]
    return found


# ------------------------------------------------------------------------------------------------------------- rules


def still(value: Any) -> Any:
    """The value, detached if it is a tensor."""
    return value.detach() if isinstance(value, Tensor) else value


def activation(func: Function, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Identity."""
    out: Tensor = Identity.apply(input, func(input.detach(), *map(still, args), **kwargs))
    return mark(out, input)


def power(func: Function, input: Tensor, exponent: Any) -> Tensor:
    """A positive power is an activation, a negative one a denominator."""
    if (exponent <= 0).any() if isinstance(exponent, Tensor) else exponent <= 0:
        return scale(func, input, exponent)  # type: ignore[no-any-return]
    return activation(func, input, exponent)


def elementwise(func: Function, *args: Any, **kwargs: Any) -> Tensor:
    """The plain gradient; the tensor that it is a function of is noted."""
    return mark(func(*args, **kwargs), *args)


def mark(out: Tensor, *sources: Any) -> Tensor:
    """Note the signal of which `out` is an elementwise function, if there is exactly one."""
    roots = [root_of(t) for t in sources if carries(t)]
    if roots and all(root is roots[0] for root in roots) and roots[0].shape == out.shape:
        set_root(out, roots[0])
    return out


def product(func: Function, input: Any, other: Any, **kwargs: Any) -> Any:
    """a·b: the uniform rule; the product of two functions of one tensor is an activation instead."""
    if not (carries(input) and carries(other)):
        return elementwise(func, input, other, **kwargs)
    root = root_of(input)
    if root is root_of(other) and input.shape == other.shape == root.shape:
        return mark(Identity.apply(root, func(input.detach(), other.detach(), **kwargs)), root)
    return uniform(func, input, other, **kwargs)


def uniform(func: Function, *args: Any, **kwargs: Any) -> Any:
    """The uniform rule: every factor that carries a signal gets an equal share."""
    count = sum(map(carries, tensors_in(args)))
    return func(*(shared(arg, 1 / count) for arg in args), **kwargs) if count > 1 else func(*args, **kwargs)


def shared(value: Any, share: float) -> Any:
    if isinstance(value, list | tuple):
        return [shared(item, share) for item in value]
    return Share.apply(value, share) if carries(value) else value


def added(func: Function, bias: Any, *factors: Any, **kwargs: Any) -> Any:
    """bias + a·b: the uniform rule for the factors."""
    return func(bias, *uniform(lambda *found: found, *factors), **kwargs)


def quotient(func: Function, input: Any, other: Any, **kwargs: Any) -> Tensor:
    """A division with a constant denominator."""
    return mark(func(input, still(other), **kwargs), input)


def scale(func: Function, *args: Any, **kwargs: Any) -> Any:
    """A constant factor that normalises a signal."""
    return func(*map(still, args), **kwargs)


def gated(func: Function, input: Tensor, dim: int = -1) -> Tensor:
    """F.glu: a·sigmoid(b)."""
    a, b = input.chunk(2, dim)
    out: Tensor = uniform(torch.mul, a, b.sigmoid())
    return out


def layer_norm(
    func: Function,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    x = input.detach()
    alike = all(t is None or t.dtype is x.dtype for t in (weight, bias))
    if alike and not torch.is_autocast_enabled(x.device.type):
        y, _, inverse = torch.native_layer_norm(x, list(normalized_shape), weight, bias, eps)
    else:
        y = func(x, normalized_shape, weight, bias, eps, *rest)
        inverse = torch.native_layer_norm(x, list(normalized_shape), None, None, eps)[2]
    out: Tensor = Norm.apply(input, y, inverse, weight, len(normalized_shape), True)
    return out


def rms_norm(
    func: Function, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    y, axes = func(input.detach(), normalized_shape, weight, eps), tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(input.dtype).eps if eps is None else eps
    inverse = (widen(input.detach()).square().mean(axes, keepdim=True) + least).rsqrt()
    out: Tensor = Norm.apply(input, y, inverse, weight, len(normalized_shape), False)
    return out


def group_norm(
    func: Function,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Tensor:
    rows = input.reshape(input.shape[0], num_groups, -1)
    out = layer_norm(torch.layer_norm, rows, rows.shape[-1:], eps=eps).view_as(input)
    tail = (-1, *[1] * (input.ndim - 2))
    out = out if weight is None else out * weight.view(tail)
    return out if bias is None else out + bias.view(tail)


def normalize(
    func: Function, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> Tensor:
    """F.normalize with a constant norm."""
    length: Tensor = torch.linalg.vector_norm(input.detach(), p, dim, keepdim=True)
    return input / length.clamp_min(eps)


# --------------------------------------------------------------------------------------------------------- attention


def attend_uniform(func: Function, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """AttnLRP: A·V shares equally, then Q·Kᵀ shares the part of A; a constant, such as a pooling query, gets none."""
    weights = carries(query) or carries(key)
    half = 0.5 if weights and carries(value) else 1.0
    quarter = half * (0.5 if carries(query) and carries(key) else 1.0)
    out: Tensor = func(*shared_parts((query, key, value), (quarter, quarter, half)), *args, **kwargs)
    return out


def shared_parts(parts: tuple[Tensor, Tensor, Tensor], shares: tuple[float, float, float]) -> tuple[Tensor, ...]:
    """Q, K and V with their shares; on a CPU in one piece where they are parts of one tensor."""
    known = None if parts[0].is_cuda else source_of(*parts)
    if known is None or not all(map(carries, (known[0], *parts))):
        return tuple(shared(part, share) for part, share in zip(parts, shares))
    found: tuple[Tensor, ...] = Parts.apply(*known, shares, *(part.detach() for part in parts))
    return found


def attend_constant(func: Function, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """CP-LRP: A is a constant."""
    out: Tensor = func(query.detach(), key.detach(), value, *args, **kwargs)
    return out


def constant_softmax(rule: Rule) -> Rule:
    """A product in which a softmax (as marked by `Capture`) is a constant."""

    def ruled(func: Function, *args: Any, **kwargs: Any) -> Any:
        return rule(func, *map(calm, args), **kwargs)

    return ruled


def calm(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [calm(item) for item in value]
    return value.detach() if hasattr(value, TAG) else value


# ------------------------------------------------------------------------------------------------------------ tables

COMMON: Mapping[str, Rule] = {
    **dict.fromkeys(ACTIVATIONS, activation),
    **dict.fromkeys(GATES, elementwise),
    **dict.fromkeys(("add", "sub", "rsub", "neg"), elementwise),
    **dict.fromkeys(("rsqrt", "reciprocal", "rtruediv", "rdiv"), scale),
    "pow": power,
    "mul": product,
    "div": quotient,
    "glu": gated,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "normalize": normalize,
    "linear": uniform,
}
PLAIN = LINEAR | HOMOGENEOUS | {"softmax"}
NOTED = GATES | {"glu"}

ATTN_LRP = Table(
    "attn_lrp",
    {
        **COMMON,
        **dict.fromkeys(PRODUCTS, uniform),
        **dict.fromkeys(SUMS, added),
        "scaled_dot_product_attention": attend_uniform,
    },
    PLAIN,
    noted=NOTED,
)
CP_LRP = Table(
    "cp_lrp",
    {
        **ATTN_LRP.rules,
        **{name: constant_softmax(ATTN_LRP.rules[name]) for name in PRODUCTS | SUMS},
        "scaled_dot_product_attention": attend_constant,
    },
    PLAIN,
    noted=NOTED,
)
