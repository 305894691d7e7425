from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitreous.attention import Attention, sum_of
from vitreous.capture import names_of
from vitreous.errors import Unsupported
from vitreous.memory import batch_size, in_batches
from vitreous.methods.attention.rollout import check_start
from vitreous.registry import method
from vitreous.rules.mode import Rules, warn_of
from vitreous.rules.relevance import Chefer, Double, divide
from vitreous.tail import tails
from vitreous.target import Target, fix, of_rows
from vitreous.trace import Record, Trace, gradients
from vitreous.types import Map, Weights

FOOTPRINT = 2  # how many times the memory of a plain gradient it takes


@method(cite="chefer2021transformer", targeted=True, attention=True)
def transformer_attribution(
    trace: Trace,
    target: Target,
    *,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the product")] = 0,
) -> Map:
    """Rollout over the relevance of attention (layer-wise relevance propagation, α = 1), weighted by its gradient.

    ρᵀ(Π_l (I + Ā⁽ˡ⁾) − I), Ā = mean_h (∇A ⊙ R_A)⁺; in float64, for R_A is ill-conditioned
    """
    check_start(trace, start_layer)
    size = batch_size(FOOTPRINT * trace.layout.footprint[1], trace.images.device)
    if len(trace) <= size:
        return rolled(trace, target, start_layer)
    fixed = fix(target, trace.output)

    def run(part: slice) -> Map:
        rows = range(len(trace))[part]
        return rolled(Trace(trace.model, trace.images[part]), of_rows(fixed, rows), start_layer)

    return torch.cat(in_batches(run, len(trace), size))


def rolled(trace: Trace, target: Target, start_layer: int) -> Map:
    """The product, carried as one row from the last layer to the first."""
    layers = relevances(trace, target, start_layer)
    read = trace.readout.double()
    gained = torch.zeros_like(read)  # ρᵀ(R − I), kept apart from ρ so that little is not lost in it
    tokens = trace.read_tokens
    for layer in reversed(layers):
        row = (read + gained)[:, None, None]  # [B 1 1 N]
        steps = ((row[..., rows] @ (da * ra).clamp_min_(0)).mean((1, 2)) for rows, ra, da in layer.chunks(tokens))
        gained = gained + sum_of(steps)
        tokens = None
    return trace.map(gained)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's attention with ∂y/∂O and the relevance of O."""

    attention: Attention
    grad: Tensor
    relevance: Tensor

    def chunks(self, tokens: list[int] | None = None) -> Iterator[tuple[slice | list[int], Weights, Weights]]:
        """Rows, R_A and ∂y/∂A: R_A = A ⊙ (R_O/O)·Vᵀ / 2."""
        layer, v = self.attention, self.attention.v
        share = divide(self.relevance, layer.node) / 2
        for rows, a in layer.chunks(layer.only or tokens):
            yield rows, (layer.out_rows(share, rows) @ v.mT).mul_(a), layer.out_rows(self.grad, rows) @ v.mT


def relevances(trace: Trace, target: Target, start_layer: int = 0) -> list[Layer]:
    """Every layer from `start_layer` on: one run, one pass back for the gradient and one for the relevance."""
    record, (chefer, rules) = trace.kept("chefer", partial(run_in_double, trace))
    layers = record.layers[start_layer:]
    nodes = [layer.node for layer in layers]
    grads = gradients(trace.score(target, record), nodes)
    found = [torch.zeros_like(node) for node in nodes]
    with chefer.carrying_relevance():
        for sign, ends, starts in beginnings(target, record):
            parts = torch.autograd.grad(ends, nodes, starts, retain_graph=True, allow_unused=True)
            found = [one if part is None else one + sign * part for one, part in zip(found, parts)]
    warn_of(rules, trace.model.module, trace.model.name)
    return [Layer(layer, grad, relevance) for layer, grad, relevance in zip(layers, grads, found)]


def run_in_double(trace: Trace) -> tuple[Record, tuple[Chefer, Rules]]:
    """A run in float64, whatever the model's precision, under Chefer's rules."""
    if trace.images.device.type == "mps":
        raise Unsupported(f"transformer_attribution needs float64, which {trace.images.device} has not; use the CPU")
    chefer = Chefer(len(trace), trace.batch_axis)
    images = trace.images.detach().double().requires_grad_()
    tail = tails(trace)  # found out without the rules
    with Rules(chefer.table, names_of(trace.model.module)) as rules, Double():
        return trace.run(images, grad=True, tail=tail), (chefer, rules)


def beginnings(target: Target, record: Record) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
    """Where relevance begins, and how much: at the outputs, what the score makes of them (of a class: one).

    What speaks against (the other class of a contrast) is followed apart, to be taken off. A score of the embedding z
    is one more linear layer with the weights ∂y/∂z.
    """
    assert record.output is not None and record.embedding is not None
    output, z = (t.detach().requires_grad_() for t in (record.output, record.embedding))
    with torch.enable_grad():
        weight, inner = gradients(target(output, z), [output, z])
    helps = (inner * z.detach()).clamp_min(0)
    helps = divide(helps, helps.sum(-1, keepdim=True).expand_as(helps))
    if weight.gt(0).any() or helps.any():
        yield 1, [record.output, record.embedding], [weight.clamp_min(0), helps]
    if weight.lt(0).any():
        yield -1, [record.output], [-weight.clamp_max(0)]
