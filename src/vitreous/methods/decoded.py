"""Relevance of the tokens of an encoder that a query reads through a decoder, as in DETR.

A step is one attention call with its heads fused: of the encoder Ā_ii [B N N], between queries Ā_qq [B Q Q], or from
queries to tokens Ā_qi [B Q N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.errors import OptionError, Unsupported
from vitreous.methods.common import fuse_heads, trim, whole
from vitreous.models.decoder import Decoder
from vitreous.models.readers import reader_weights
from vitreous.trace.run import gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import HeadRows, Row


@dataclass(frozen=True)
class Steps:
    """The steps of an encoder and of the decoder behind it, first to last."""

    encoder: list[Tensor]
    decoder: list[tuple[bool, Tensor]]  # whether it reads the tokens, and Ā
    asked: Row  # the weight of each query, [B Q]


def decoder_of(trace: Trace) -> Decoder:
    assert trace.layout.decoder is not None
    return trace.layout.decoder


def asked(trace: Trace) -> Row:
    """The weight of each query of the decoder: that of the target, or those that the output reads."""
    decoder = decoder_of(trace)
    queries = trace.queries or [tuple(range(len(decoder.readers)))] * len(trace)
    return reader_weights(decoder.readers, decoder.queries, queries).to(trace.images.device)


# ----------------------------------------------------------------------------------------------------------- attention


def cross_rows(trace: Trace, layer: int | None) -> list[HeadRows]:
    """What the query reads of each token in one layer of the decoder, or in all of them, [B H N] each."""
    decoder, weights = decoder_of(trace), asked(trace)
    calls = [call for call in trace.whole().decoded if call.number in decoder.cross]
    if layer is not None and not -len(calls) <= layer < len(calls):
        said = f"the decoder of {trace.model.name} has layers 0 to {len(calls) - 1}"
        raise OptionError(f"layer {layer} is out of range: {said}")
    chosen = calls if layer is None else [calls[layer]]
    return [call.read(weights.to(call.wide)) for call in chosen]


def read_through(trace: Trace, heads: str, discard: float, residual: float) -> Row:
    """What the query reads of each token of the encoder by a rollout through the decoder, [B N]."""
    decoder = decoder_of(trace)
    calls = [(call.number in decoder.cross, whole(call, heads)) for call in trace.whole().decoded]
    return rolled(Steps([], calls, asked(trace)), residual, discard)


def rolled(steps: Steps, residual: float, discard: float = 0.0, start_layer: int = 0) -> Row:
    """A rollout from the query to the tokens: rows of (r·I + (1−r)·Ā), normalised."""
    asks, read = steps.asked, None

    def moved(carried: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """What stays at its place, and what moves."""
        a = trim(a, discard, ()) if discard > 0 else a
        share = carried.to(a) / (residual + (1 - residual) * a.sum(-1)).clamp_min(1e-30)
        return residual * share, (1 - residual) * torch.einsum("bq,bqm->bm", share, a)

    for crosses, a in reversed(steps.decoder):
        asks, onward = moved(asks, a)
        if crosses:
            read = onward if read is None else read + onward
        else:
            asks = asks + onward
    assert read is not None, "a decoder reads tokens"
    for a in reversed(steps.encoder[start_layer:]):
        read = sum(moved(read, a))  # type: ignore[assignment]
    return read


# ----------------------------------------------------------------------------------------------- attention × gradient


def refuse_rules(trace: Trace, rules: str) -> None:
    if rules != "plain":
        said = f"the decoder of {trace.model.name} is followed with plain gradients only"
        raise Unsupported(f"rules={rules}: {said}; leave this option out")


def gradient_steps(trace: Trace, target: Target, *, clamp_last: bool = False) -> Steps:
    """Steps of A ⊙ ∂y/∂A, clamped at zero: (mean_h …)⁺ or, by default, mean_h (…)⁺."""
    record, decoder = trace.differentiable(), decoder_of(trace)
    calls = [*record.layers, *record.decoded]
    grads = gradients(trace.score(target, record), [call.node for call in calls])

    def fused(call: Attention, grad: Tensor) -> Float[Tensor, "B n m"]:
        parts = [call.weights_grad(grad, rows).mul_(a) for rows, a in call.chunks()]
        product = torch.cat(parts, 2).detach()
        return product.mean(1).clamp_min(0) if clamp_last else fuse_heads(product.clamp_min(0), "mean")

    made = [fused(call, grad) for call, grad in zip(calls, grads)]
    count = len(record.layers)
    crosses = [call.number in decoder.cross for call in record.decoded]
    return Steps(made[:count], list(zip(crosses, made[count:])), asked(trace))


def two_modalities(steps: Steps, start_layer: int = 0) -> Row:
    """GAE's rule for queries that read the tokens of an encoder.

    Between queries R_qq ← R_qq + Ā_qq R_qq and R_qi ← R_qi + Ā_qq R_qi; from queries to tokens R_qi ← R_qi +
    R̄_qqᵀ Ā_qi R̄_ii, where R̄ = I + (R − I) divided by its row sums, and 0/0 = 0. R̄_ii, the same in every layer of the
    decoder, is applied once at the end, to one row.
    """
    first = steps.decoder[0][1]
    between = first.new_zeros(len(first), first.shape[1], first.shape[1])  # R_qq − I
    reads: Tensor | None = None  # R_qi without R̄_ii
    for crosses, a in steps.decoder:
        if crosses:
            more = a + over_sums(between, between.sum(-1)).mT @ a
            reads = more if reads is None else reads + more
        else:
            between = between + a + a @ between
            reads = None if reads is None else reads + a @ reads
    assert reads is not None, "a decoder reads tokens"
    row = torch.einsum("bq,bqm->bm", steps.asked.to(reads), reads)
    encoder = steps.encoder[start_layer:]
    sums = torch.zeros_like(row)  # of the rows of R_ii − I
    for a in encoder:
        sums = sums + torch.einsum("bnm,bm->bn", a, 1 + sums)
    share, gained = over_sums(row, sums), torch.zeros_like(row)
    for a in reversed(encoder):
        gained = gained + torch.einsum("bn,bnm->bm", share + gained, a)
    return row + gained


def over_sums(values: Tensor, sums: Tensor) -> Tensor:
    """Each row (or entry) divided by its sum; 0 where that is 0."""
    sums = sums[..., None] if values.ndim > sums.ndim else sums
    return torch.where(sums > 0, values / sums.clamp_min(torch.finfo(sums.dtype).tiny), 0)
