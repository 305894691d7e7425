from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous._support.precision import widest
from vitreous.capture.attention import Attention, run_of, sum_of, widen
from vitreous.capture.capture import ModuleNames
from vitreous.errors import Unsupported
from vitreous.methods.common import check_start
from vitreous.registry import method
from vitreous.trace.last_block import narrowing
from vitreous.trace.rules.cast import Cast
from vitreous.trace.rules.exact import Exact, known_as
from vitreous.trace.rules.mode import Rules, warn_of
from vitreous.trace.rules.relevance import CALL, Chefer
from vitreous.trace.rules.relevance_backward import divide
from vitreous.trace.rules.relevance_layers import Attended
from vitreous.trace.rules.relevance_split import full_float32
from vitreous.trace.run import NO_LAYER, Finished, Run, gradients, rows_of_run
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map, Row, Weights

Precision = Literal["double", "split", "single"]
FOOTPRINT = {"double": 5, "split": 5, "single": 4}  # bytes of memory per number that a plain gradient keeps
IN_CACHES = 2**29  # bytes per batch on a CPU, where fewer images at a time are faster


def is_single(options: Mapping[str, Any]) -> bool:
    return bool(options["precision"] == "single")


@method(cite="chefer2021transformer", targeted=True, attention=True, replays=is_single)
def transformer_attribution(
    trace: Trace,
    target: Target,
    *,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
    precision: Annotated[
        Precision, Field(description="double: exact; split: to 1e-5, faster; single: the model's own, fastest, rough")
    ] = "double",
) -> Map:
    """Rollout over the relevance of attention (layer-wise relevance propagation), weighted by its gradient; the
    costlier predecessor of gae.

    ρᵀ(Π_l (I + Ā⁽ˡ⁾) − I), Ā = mean_h (∇A ⊙ R_A)⁺; in float64, for R_A is ill-conditioned: in the model's own
    precision maps look alike, but their numbers differ
    """
    check_start(trace, start_layer)
    size = at_once(trace, precision)
    if len(trace) <= size:
        return rolled(trace, target, start_layer, precision)
    runs: list[Finished] = []

    def run(part: slice) -> Map:
        rows = range(len(trace))[part]
        own = trace.like(trace.images[part], rows)
        found = rolled(own, target.of_rows(rows), start_layer, precision)
        runs.append(rows_of_run(own.any_finished(), slice(None)))
        return found

    found = torch.cat(in_batches(run, len(trace), size))
    trace.kept("chefer", lambda: (joined(trace.images, runs), None))
    return found


def at_once(trace: Trace, precision: Precision) -> int:
    """The number of images per batch."""
    each = trace.layout.footprint[1] * FOOTPRINT[precision] // trace.images.dtype.itemsize
    cpu = trace.images.device.type == "cpu"
    return batch_size(each, trace.images.device, max(1, IN_CACHES // max(1, each)) if cpu else None)


def joined(images: Images, runs: list[Finished]) -> Finished:
    """Concatenate the results of several batches."""
    outputs, embeddings = zip(*((run.output, run.embedding) for run in runs))
    return Finished(images, (), NO_LAYER, output=torch.cat(outputs), embedding=torch.cat(embeddings))


def rolled(trace: Trace, target: Target, start_layer: int, precision: Precision) -> Map:
    """The product over layers, carried as one row from the last layer to the first."""
    layers = relevances(trace, target, start_layer, precision)
    read = trace.readout.to(torch.float32 if precision == "single" else torch.float64)
    gained = torch.zeros_like(read)  # ρᵀ(R − I), kept apart from ρ so that small values are not lost to rounding
    tokens = trace.read_tokens
    for layer in reversed(layers):
        row = (read + gained).float()[:, None, None]  # [B 1 1 N]
        gained = gained + sum_of(carried(row[..., rows], ra, da) for rows, ra, da in layer.chunks(tokens))
        tokens = None
    return trace.map(gained)


def carried(row: Tensor, ra: Weights, da: Weights) -> Row:
    """rowᵀĀ, [B N]."""
    return (row.to(ra.dtype) @ (da * ra).clamp_min_(0)).float().mean((1, 2))


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's attention with ∂y/∂O and the relevance of O."""

    attention: Attention
    grad: Tensor
    relevance: Tensor
    seen: tuple[Weights, Weights | None] | None = None  # R_A and ∂y/∂A, if the backward passes kept them

    def chunks(self, tokens: list[int] | None = None) -> Iterator[tuple[slice | list[int], Weights, Weights]]:
        """Rows, R_A and ∂y/∂A, in float32 or less: R_A = A ⊙ (R_O/O)·Vᵀ / 2."""
        if self.seen is not None:
            yield self.seen_rows(tokens)
            return
        layer, v = self.attention, self.attention.v.detach().float()
        share, grad = (divide(widen(self.relevance), layer.node.detach()) / 2).float(), self.grad.float()
        for some, a in layer.chunks(layer.only or tokens):
            rows = run_of(some)
            yield rows, (layer.out_rows(share, rows) @ v.mT).mul_(a), layer.out_rows(grad, rows) @ v.mT

    def seen_rows(self, tokens: list[int] | None) -> tuple[slice | list[int], Weights, Weights]:
        assert self.seen is not None
        layer, (ra, da) = self.attention, self.seen
        if da is None:
            da = layer.fold(self.grad).to(ra.dtype) @ layer.v.detach().to(ra.dtype).mT
        if layer.only is not None or tokens is None:
            return run_of(layer.only or slice(None)), ra, da
        rows = run_of(tokens)
        return rows, ra[:, :, rows], da[:, :, rows]


def relevances(trace: Trace, target: Target, start_layer: int = 0, precision: Precision = "double") -> list[Layer]:
    """Every layer from `start_layer` on: one forward pass, one backward pass for the gradient, one for relevance."""
    with full_float32() if precision == "split" else nullcontext():
        return propagated(trace, target, start_layer, precision)


def propagated(trace: Trace, target: Target, start_layer: int, precision: Precision) -> list[Layer]:
    """The layers, with the gradient and the relevance of each."""
    record, (chefer, rules) = trace.kept(f"chefer, {precision}", partial(run_under_rules, trace, precision))
    layers = record.layers[start_layer:]
    nodes = [layer.node for layer in layers]
    grads = gradients(trace.score(target, record), nodes)
    found = [torch.zeros_like(node) for node in nodes]
    begun = list(beginnings(target, record))
    for sign, ends, starts in begun:
        with chefer.carrying_relevance():
            parts = torch.autograd.grad(ends, nodes, starts, retain_graph=True, allow_unused=True)
        found = [one if part is None else one.add_(part, alpha=sign) for one, part in zip(found, parts)]
    warn_of(rules, trace.facts, trace.model.name)
    seen = [taken(layer, len(begun)) for layer in layers]
    return [Layer(*each) for each in zip(layers, grads, found, seen)]


def taken(layer: Attention, passes: int) -> tuple[Weights, Weights | None] | None:
    """R_A and ∂y/∂A (or only the first) of this attention, if exactly one relevance pass went through it."""
    call: Attended | None = getattr(layer.node, CALL, None)
    if call is None or call.ra is None:
        return None
    ra, da, call.ra, call.da = call.ra, call.da, None, None
    return (layer.fold(ra), None if da is None else layer.fold(da)) if passes == 1 else None


def run_under_rules(trace: Trace, precision: Precision) -> tuple[Finished, tuple[Chefer, Rules]]:
    """A forward pass under Chefer's rules: in float64 whatever the model's precision, or in its own.

    `split`: in float64 too, but its graph, and so its backward passes, in float32.
    """
    chefer = Chefer(len(trace), trace.batch_axis, torch.float32 if precision == "single" else torch.float64)
    dtype = dtype_of(precision, trace.images)
    images = trace.images.detach().to(dtype, copy=True).requires_grad_()
    narrow = narrowing(trace, fold=False)  # checked without the rules
    own = precision == "single" and dtype == trace.images.dtype
    cast = Exact() if precision == "split" else nullcontext() if own else Cast(dtype)
    if precision == "split":
        known_as(images, trace.images.detach().double())
    with Rules(chefer.table, ModuleNames(trace.model.module)) as rules, cast:
        record = trace.run(images, Run.from_pixels().narrowed(narrow).of(range(len(trace))))
    if isinstance(cast, Exact) and cast.lost:
        return run_under_rules(trace, "double")
    return record, (chefer, rules)


def dtype_of(precision: Precision, images: Images) -> torch.dtype:
    """The precision of the graph: float64, or float32 if split, or the model's own; float32 for float16, whose range is
    too small.
    """
    if precision == "single":
        return torch.float32 if images.dtype == torch.float16 else images.dtype
    if widest(images.device) != torch.float64:
        raise Unsupported(f"{images.device} has no float64: use transformer_attribution's precision=single, or the CPU")
    return torch.float32 if precision == "split" else torch.float64


def beginnings(target: Target, record: Finished) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
    """The tensors at which relevance starts, and its initial values: at the outputs, their weight in the score (1 for
    a class).

    Evidence against, such as the other class of a contrast, is propagated separately and subtracted. A score of the
    embedding z counts as one more linear layer with the weights ∂y/∂z.
    """
    output, z = (t.detach().requires_grad_() for t in (record.output, record.embedding))
    with torch.enable_grad():
        weight, inner = gradients(target(output, z), [output, z])
    if target.one_class:  # needs no GPU synchronisation
        yield 1, [record.output], [weight]
        return
    helps = (inner * z.detach()).clamp_min(0)
    helps = divide(helps, helps.sum(-1, keepdim=True).expand_as(helps))
    if weight.gt(0).any() or helps.any():
        yield 1, [record.output, record.embedding], [weight.clamp_min(0), helps]
    if weight.lt(0).any():
        yield -1, [record.output], [-weight.clamp_max(0)]
