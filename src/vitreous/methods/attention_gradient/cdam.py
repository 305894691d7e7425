from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention, sum_of, widen
from vitreous.errors import ModelError, OptionError, Unsupported
from vitreous.methods.common import Baseline, less_baseline, path
from vitreous.registry import method
from vitreous.trace.run import Run, gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

COPIES = 128  # images × noisy copies in one forward pass of the last block


def is_vanilla(options: Mapping[str, Any]) -> bool:
    return bool(options["variant"] == "vanilla")


def is_plain(options: Mapping[str, Any]) -> bool:
    return is_vanilla(options) and bool(options["split"] == "total")


def graph_of(options: Mapping[str, Any]) -> str:
    return "model" if is_plain(options) else ""


@method(
    cite="brocki2023class",
    targeted=True,
    signed=True,
    tokens=True,
    several=is_vanilla,
    graph=graph_of,
    replays=is_plain,
    quick=True,
    tried=[{"baseline": "mean"}],
)
def cdam(
    trace: Trace,
    target: Target,
    *,
    variant: Annotated[
        Literal["vanilla", "smooth", "integrated"],
        Field(description="the gradient at T, its mean over noise on T, or over the way from the baseline to T"),
    ] = "vanilla",
    baseline: Baseline = "zero",
    split: Annotated[
        Literal["total", "value", "key"],
        Field(description="only what passes through the values (proportional to attention) or through the keys"),
    ] = "total",
    samples: Annotated[int, Field(ge=1, description="smooth: noisy copies")] = 16,
    sigma: Annotated[float, Field(gt=0, description="smooth: noise, in standard deviations of T − T̄")] = 0.1,
    steps: Annotated[int, Field(ge=1, description="integrated: points of the way")] = 20,
    seed: Annotated[int, Field(ge=0, description="smooth: another seed gives other noise")] = 0,
) -> Map:
    """Gradient × input at the last attention layer's tokens (class-discriminative attention map); a quick, signed map
    for a class, concept or text.

    Sᵢ = Σ_j (T_ij − T̄_j) · ∂y/∂T_ij, T the normalised tokens that enter the last attention; T̄ = 0 as published, or the
    mean of the image's patch tokens, with which the map does not depend on where the network keeps its constants
    """
    if split != "total" and variant != "vanilla":
        raise OptionError(f"cdam.split={split} works with variant=vanilla only")
    if split != "total":
        tokens, grad = split_grad(trace, target, split)
    elif variant == "vanilla":
        tokens, grad = trace.entry_grad(target)
    else:
        count = samples if variant == "smooth" else steps
        tokens, grad = mean_grad(trace, target, variant, baseline, count, sigma, seed)
    return trace.to_patches(less_baseline(trace, tokens, baseline) * grad).sum(-1)


def mean_grad(
    trace: Trace, target: Target, variant: str, baseline: Baseline, count: int, sigma: float, seed: int
) -> tuple[Tensor, Tensor]:
    """T, and ∂y/∂T averaged over noise or over the path from the baseline, at which all tokens are T̄.

    Only the last block runs for every copy.
    """
    record = trace.cut()
    tokens = trace.batch_first(record.entry.detach())  # [B N D]
    offset = less_baseline(trace, tokens, baseline)
    fixed = target.fix(record.output)
    points, weights = path(count) if variant == "integrated" else ([1.0] * count, [1 / count] * count)
    streams = trace.generators(seed)
    spread = sigma * offset.flatten(1).std(1)
    total = torch.zeros_like(tokens)
    size = max(1, COPIES // len(trace))
    for start in range(0, count, size):
        part = slice(start, start + size)
        scale = torch.tensor(points[part], device=tokens.device, dtype=tokens.dtype)
        share = torch.tensor(weights[part], device=tokens.device, dtype=tokens.dtype)
        shift = torch.zeros(())
        if variant == "smooth":
            noise = [torch.randn((len(scale), *tokens.shape[1:]), generator=stream) for stream in streams]
            shift = torch.stack(noise).to(tokens) * spread.view(-1, 1, *[1] * (tokens.ndim - 1))  # [B S N D]
        moved = (tokens - offset)[:, None] + scaled_copies(offset, scale) + shift.to(tokens)
        grad = grad_at(trace, fixed, moved.flatten(0, 1), len(scale)).reshape(moved.shape)  # [B S N D]
        total += torch.einsum("bs...,s->b...", grad, share)
    return tokens, total


def scaled_copies(tokens: Tensor, scale: Tensor) -> Tensor:
    """Expand [B N D] to [B S N D], each copy scaled."""
    return tokens[:, None] * scale.view(1, -1, *[1] * (tokens.ndim - 1))


def grad_at(trace: Trace, target: Target, tokens: Tensor, copies: int) -> Tensor:
    """∂y/∂T at other tokens, `copies` of them for each image."""
    axis = trace.batch_axis
    last = trace.layout.layers - 1

    def edit(entry: Tensor) -> Tensor:
        return tokens.movedim(0, axis).to(entry.dtype)

    def repeat(stream: Tensor) -> Tensor:
        return stream.repeat_interleave(copies, axis)

    rows = [image for image in range(len(trace)) for _ in range(copies)]
    try:
        if trace.inputs:
            raise ModelError("each copy needs inputs of its own")
        run = trace.run(trace.images, Run.from_layer(last, edit).entering(repeat, len(tokens)))
    except (RuntimeError, ModelError):  # later layers cannot take more images: run everything for every copy
        run = trace.run(trace.images[rows], Run.from_layer(last, edit).of(rows))
    (grad,) = gradients(trace.score(target, run), [run.entry])
    return trace.batch_first(grad)


def split_grad(trace: Trace, target: Target, split: str) -> tuple[Tensor, Tensor]:
    """T, and the part of ∂y/∂T that passes through the last attention's values, or through its keys."""
    record = trace.cut()
    if trace.layout.obstacle is not None or not record.layers:
        raise Unsupported(
            f"cdam.split needs attention between all tokens; {trace.model.name} {trace.layout.obstacle}. "
            "Try split=total."
        )
    layer = record.layers[-1]
    (dout,) = gradients(trace.score(target, record), [layer.node])
    if split == "value":
        dvalues = sum_of(a.detach().mT @ layer.out_rows(dout, i) for i, a in layer.chunks(layer.only))
        node, along = layer.v, dvalues.to(layer.v.dtype)
    else:
        node, along = keys_grad(layer, dout)
    grad = torch.autograd.grad([node], [record.entry], [along], retain_graph=True, allow_unused=True)[0]
    grad = torch.zeros_like(record.entry) if grad is None else grad
    return trace.batch_first(record.entry.detach()), trace.batch_first(grad)


def keys_grad(layer: Attention, dout: Tensor) -> tuple[Tensor, Tensor]:
    """K in the autograd graph, and ∂y/∂K."""
    if layer.given is not None:
        if layer.keys is None:
            raise Unsupported(f"cdam.split=key cannot find the keys of {layer.name}; use split=value")
        found = layer.weights_grad(dout).to(layer.given.dtype)
        dweights = found.new_zeros(layer.given.shape)
        dweights[:, :, layer.only or slice(None)] = found
        (dkeys,) = torch.autograd.grad([layer.given], [layer.keys], [dweights], retain_graph=True)
        return layer.keys, dkeys
    assert layer.q is not None and layer.k is not None

    def part(i: slice | list[int], a: Tensor) -> Tensor:
        da = layer.weights_grad(dout, i)
        dscores = a * (da - (a * da).sum(-1, keepdim=True))
        return dscores.mT @ widen(layer.q[:, :, i]) * layer.scale  # type: ignore[index]

    return layer.k, sum_of(part(i, a.detach()) for i, a in layer.chunks(layer.only)).to(layer.k.dtype)
