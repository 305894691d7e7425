from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import sum_of
from vitreous.methods.common import GradientRules, table_of
from vitreous.registry import method
from vitreous.trace.ruled import mode
from vitreous.trace.rules.mode import Rules, warn_of
from vitreous.trace.run import Finished, Run, gradients, rows_of_run, score_of
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="bousselham2025legrad", targeted=True, attention=True, replays=True, quick=True)
def legrad(
    trace: Trace,
    target: Target,
    *,
    pool: Annotated[
        Literal["mean", "readout"],
        Field(description="the tokens of a layer that its score reads: all, or the read-out"),
    ] = "mean",
    rules: GradientRules = "plain",
) -> Map:
    """The patches to which more attention would raise the score, averaged over all layers; use it to outline the object
    of a class or a text.

    1/L Σ_l mean over heads and queries of (∂s_l/∂A⁽ˡ⁾)⁺, s_l = head(pool(tokens after block l))
    """
    count = len(trace)
    read = trace.readout

    def pooled(tokens: tuple[Tensor, ...]) -> Tensor:
        """Rows appended to the batch: for each layer, identical tokens, so that any classifier receives their pool."""
        alike = [t.mean(1) if pool == "mean" else torch.einsum("bn,bnd->bd", read.to(t), t) for t in tokens]
        return torch.cat([one[:, None].expand_as(t) for one, t in zip(alike, tokens)])

    def run() -> tuple[Finished, tuple[Finished, Rules | None]]:
        """The forward pass for the images themselves, and with the rows of every layer."""
        leaf = trace.images.detach().clone().requires_grad_()
        with mode(trace, table_of(rules)) as ruled:
            rows = list(range(count)) * (1 + trace.layout.layers)
            whole = trace.run(leaf, Run.from_pixels().extended(pooled).of(rows))
        return rows_of_run(whole, slice(count)), (whole, ruled)

    record, ruled = trace.kept(f"legrad, {pool}, {rules}", run)[1]
    fixed = target.fix(trace.output)
    scores = [score_of(fixed, record, slice(count * i, count * (i + 1))) for i in range(1, len(record.layers) + 1)]
    grads = gradients(scores, [layer.node for layer in record.layers])
    if ruled is not None:
        warn_of(ruled, trace.model.module, trace.model.name)
    maps = []
    for layer, grad in zip(record.layers, grads):
        pushed = sum_of(layer.weights_grad(grad, i).clamp_min_(0).sum(2) for i in layer.spans())  # [B H M]
        maps.append(trace.map(pushed[:count].mean(1) / layer.shape[2]))
    return torch.stack(maps).mean(0)
