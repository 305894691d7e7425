from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import Attention, run_of, sum_of, widen
from vitreous.errors import ModelError, OptionError, Unsupported
from vitreous.methods.attention.value_runs import Layer, need_blocks, need_chain, record, side_by_side
from vitreous.methods.common import need_positive
from vitreous.registry import method
from vitreous.trace.last_block import narrowing
from vitreous.trace.run import Finished, Run, gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map, Weights

PUBLISHED = 6  # the authors' start layer
COPIES = 128  # points of the path in one run of the last block

Factor = tuple[Attention, Float[Tensor, "B H"], Float[Tensor, "B N"]]  # a layer, the weights of its heads and tokens
Relation = Float[Tensor, "B n N"]  # the rows of the read-out
Path = Callable[[list[int], Float[Tensor, "V"]], Finished]  # a run of these images at these points of the path


@method(cite="chen2023beyond", targeted=True, attention=True, costly=True, cheap={"steps": 2})
def beyond_intuition(
    trace: Trace,
    target: Target,
    *,
    variant: Annotated[
        Literal["token", "head"],
        Field(description="what weights the attention: the lengths of the values, or the gradient of each head"),
    ] = "token",
    start_layer: Annotated[
        int,
        Field(
            ge=1,
            description="first layer of the product, counted from 1 as its authors do (other methods count from 0); 6 "
            "is the last layer of models with fewer; the authors start the head variant at 4",
        ),
    ] = PUBLISHED,
    steps: Annotated[int, Field(ge=2, description="points of the path from zero to the image, both included")] = 20,
    path: Annotated[
        Literal["input", "tokens"],
        Field(description="what follows the path: the image (as published), or only the tokens of the last block"),
    ] = "input",
) -> Map:
    """Attention of the upper layers, weighted by how much it changes the tokens, times the mean gradient of the last
    attention; a sharp map for a class.

    ρᵀ(W ⊙ R); W = mean_h (mean_α ∂y/∂A_last(α·x))⁺, α from 0 to 1; R = Π_l (I + B⁽ˡ⁾), l from start_layer on; token:
    B = mean_h A · diag(‖W_O v_j‖/‖x_j‖), x the tokens that enter the block; head: B = Σ_h I_h A_h, I_h = mean
    |A_hᵀ ∂y/∂A_h| over its sum over heads; path=tokens: A_last at the tokens between those of the zero image and of x
    """
    first, last = first_layer(trace, start_layer), trace.layout.layers - 1
    if variant == "token":
        need_blocks(trace, "beyond_intuition with variant=token", "variant=head")
    if path == "tokens":
        need_blocks(trace, "beyond_intuition with path=tokens", "path=input")
    clean = differentiable(trace, first if variant == "head" else last)
    fixed = target.fix(clean.output.detach().float())
    layers = {}
    if variant == "token" or path == "tokens":
        layers = recorded(trace, first if variant == "token" else last)
    factors = by_token(trace, layers) if variant == "token" else by_head(trace, fixed, clean, first)
    way = between_tokens(trace, layers[last]) if path == "tokens" else scaled_images(trace)
    rows = relation(trace, factors) * mean_slope(trace, fixed, clean, steps, way, short=path == "tokens")
    return trace.map(torch.einsum("bn,bnm->bm", trace.readout[:, read_rows(trace)].to(rows), rows))


def first_layer(trace: Trace, start_layer: int) -> int:
    """The number of the first layer, from 0."""
    count = trace.layout.layers
    if start_layer > count and start_layer != PUBLISHED:
        said = f"start_layer={start_layer} is out of range: {trace.model.name} has layers 1 to {count}"
        raise OptionError(f"{said} (beyond_intuition counts from 1, as its authors do)")
    return min(start_layer, count) - 1


def read_rows(trace: Trace) -> slice | list[int]:
    """The tokens that the classifier reads."""
    return slice(None) if trace.read_tokens is None else run_of(trace.read_tokens)


def differentiable(trace: Trace, layer: int) -> Finished:
    """The forward pass of the images, with gradients from this layer on."""
    return trace.cut(layer) if trace.layout.entries else trace.differentiable()


# ------------------------------------------------------------------------------------------------------------------ R


def relation(trace: Trace, factors: Iterator[Factor]) -> Relation:
    """R = Π (I + B), from the last layer to the first. B ≥ 0, so R is its own absolute value."""
    tokens = trace.read_tokens
    carried = torch.eye(trace.layout.tokens, device=trace.images.device)[read_rows(trace)]
    carried = carried.expand(len(trace), -1, -1)
    for call, heads, columns in factors:
        need_positive(trace, "beyond_intuition", [call])
        carried = carried.to(call.wide)
        parts = (
            carried[..., run_of(rows)] @ torch.einsum("bh,bhnm->bnm", heads, a.detach())
            for rows, a in call.chunks(tokens)
        )
        carried, tokens = carried + sum_of(parts) * columns[:, None], None
    return carried


def recorded(trace: Trace, first: int) -> dict[int, Layer]:
    """The layers from this one on, with their blocks."""
    layers = record(trace, range(len(trace)), list(range(max(0, first - 1), trace.layout.layers)))
    need_chain(trace, layers, "beyond_intuition with variant=token or path=tokens", "variant=head with path=input")
    return {number: layer for number, layer in layers.items() if number >= first}


def by_token(trace: Trace, layers: dict[int, Layer]) -> Iterator[Factor]:
    """All heads alike, each token by the length of what it moves over its own."""
    for number in sorted(layers, reverse=True):
        call = layers[number].attention
        heads = call.v.new_full(call.shape[:2], 1 / call.shape[1], dtype=call.wide)
        yield call, heads, lengths(trace, layers[number])


def lengths(trace: Trace, layer: Layer) -> Float[Tensor, "B N"]:
    """‖W_O v_j‖ / ‖x_j‖ of every token."""
    call = layer.attention
    if layer.projection is None or layer.block is None:
        raise Unsupported(
            "beyond_intuition with variant=token needs an output projection directly after the attention; "
            f"{call.name or trace.model.name} has another operation in between (a norm, a gate). Try variant=head."
        )
    moved, own = layer.projection(side_by_side(widen(call.v))), layer.block.entered
    lengths: Tensor = moved.norm(dim=-1) / own.norm(dim=-1).clamp_min(torch.finfo(own.dtype).tiny)
    return lengths


def by_head(trace: Trace, target: Target, run: Finished, first: int) -> Iterator[Factor]:
    """Each head by the mean size of AᵀG, G = ∂y/∂A, all tokens alike; AᵀG = (Aᵀ ∂y/∂O)·Vᵀ."""
    calls = run.layers[first - trace.layout.layers :]
    grads = gradients(trace.score(target, run), [call.node for call in calls])
    for call, grad in reversed(list(zip(calls, grads))):
        along = sum_of(a.detach().mT @ call.out_rows(grad, rows) for rows, a in call.chunks(call.only))  # [B H N d]
        values = widen(call.v.detach()).mT
        sizes = torch.stack([(one @ v).abs().mean((-1, -2)) for one, v in zip(along, values)])  # [B H]
        heads = sizes / sizes.sum(1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
        yield call, heads, torch.ones_like(values[:, 0, 0])


# ------------------------------------------------------------------------------------------------------------------ W


def mean_slope(trace: Trace, target: Target, clean: Finished, steps: int, path: Path, short: bool) -> Relation:
    """W; the path ends in the run of the images themselves. `short`: only the last block runs for each point."""
    total = slope(trace, target, clean)
    points = torch.linspace(0, 1, steps, dtype=torch.float64)[:-1].repeat_interleave(len(trace))
    images = list(range(len(trace))) * (steps - 1)

    def add(part: slice) -> None:
        rows = images[part]
        found = slope(trace, target.of_rows(rows), path(rows, points[part].to(total)))
        total.index_add_(0, torch.tensor(rows, device=total.device), found)

    footprint = trace.layout.footprint[0] // (trace.layout.layers if short else 1) + 2 * total[0].nbytes
    size = batch_size(footprint, total.device, COPIES if short else None)
    in_batches(add, len(images), size, "beyond_intuition")
    return (total / steps).clamp_min(0).mean(1)


def slope(trace: Trace, target: Target, run: Finished) -> Weights:
    """∂y/∂A of the last attention, the rows of the read-out: [B H n N]."""
    call = run.layers[-1]
    (grad,) = gradients(trace.score(target, run), [call.node])
    return call.weights_grad(grad, read_rows(trace)).detach()


def scaled_images(trace: Trace) -> Path:
    """The whole network on α·x."""

    def run(rows: list[int], points: Tensor) -> Finished:
        scaled = (widen(trace.images[rows]) * points.view(-1, *[1] * (trace.images.ndim - 1))).to(trace.images.dtype)
        if not trace.layout.entries:
            return trace.run(scaled.requires_grad_(), Run.from_pixels().of(rows))
        return trace.run(scaled, from_last(trace).of(rows))

    return run


def between_tokens(trace: Trace, layer: Layer) -> Path:
    """The last block on tokens between those that enter it for an image of zeros and for the image."""
    assert layer.block is not None
    axis = trace.batch_axis
    ends = widen(layer.block.given.movedim(axis, 0))

    def run(rows: list[int], points: Tensor) -> Finished:
        def enter(zero: Tensor) -> Tensor:
            start = widen(zero.movedim(axis, 0))  # of one image, or with inputs of each
            along = (ends[rows] - start) * points.view(-1, *[1] * (start.ndim - 1))
            return (start + along).to(zero.dtype).movedim(0, axis)

        try:
            how = from_last(trace).entering(enter, len(rows)).of(rows)
            return trace.run(torch.zeros_like(trace.images[:1]), how)
        except Unsupported:
            raise
        except ModelError as error:
            said = f"{trace.model.name} cannot run its last block on more rows than it has images"
            raise Unsupported(f"{said}, which path=tokens needs. Try path=input.") from error

    return run


def from_last(trace: Trace) -> Run:
    """A run with gradients from the last layer on."""
    return Run.from_layer(trace.layout.layers - 1).narrowed(narrowing(trace, fold=False))
