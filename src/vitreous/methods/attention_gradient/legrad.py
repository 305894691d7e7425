from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import sum_of
from vitreous.errors import Unsupported
from vitreous.methods.common import GradientRules, table_of
from vitreous.registry import method
from vitreous.trace.ruled import mode
from vitreous.trace.rules.mode import Rules, warn_of
from vitreous.trace.run import Finished, Run, gradients, rows_of_run, score_of
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="bousselham2025legrad", targeted=True, attention=True, stages=True, replays=True, quick=True)
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

    1/L Σ_l mean over heads and queries of (∂s_l/∂A⁽ˡ⁾)⁺, s_l = head(pool(tokens after block l)), l over all layers, in
    models with stages over those of the last, whose tokens the classifier can read
    """
    count = len(trace)
    first = trace.layout.last_stage
    blocks = trace.layout.blocks_since(first)

    def pooled(tokens: tuple[Tensor, ...]) -> Tensor:
        """Rows appended to the batch: for each layer, identical tokens, so that any classifier receives their pool."""
        rows = []
        for t in tokens:
            axis = channels(trace, t)
            flat = t.movedim(axis, -1).flatten(1, -2)  # [B N D]
            one = flat.mean(1) if pool == "mean" else torch.einsum("bn,bnd->bd", own_readout(trace, flat), flat)
            rows.append(one.view(len(t), *[1] * (t.ndim - 2), -1).movedim(-1, axis).expand_as(t))
        return torch.cat(rows)

    def run() -> tuple[Finished, tuple[Finished, Rules | None]]:
        """The forward pass for the images themselves, and with the rows of every layer."""
        leaf = trace.images.detach().clone().requires_grad_()
        with mode(trace, table_of(rules)) as ruled:
            rows = list(range(count)) * (1 + blocks)
            whole = trace.run(leaf, Run.from_pixels().extended(pooled, since=first).of(rows))
        return rows_of_run(whole, slice(count)), (whole, ruled)

    record, ruled = trace.kept(f"legrad, {pool}, {rules}", run)[1]
    fixed = target.fix(trace.output)
    layers = record.layers[first:]
    scores = [score_of(fixed, record, slice(count * i, count * (i + 1))) for i in range(1, blocks + 1)]
    grads = gradients(scores, [layer.node for layer in layers])
    if ruled is not None:
        warn_of(ruled, trace.facts, trace.model.name)
    maps = []
    for number, (layer, grad) in enumerate(zip(layers, grads), first):
        stage = trace.layout.stage(number)
        copies = stage.copies(trace.readout) if stage.repeats else None
        pushed = sum_of(gained(layer.weights_grad(grad, i), copies, i) for i in layer.spans())  # [B H M]
        pushed = pushed[: count * stage.windows]
        maps.append(trace.map(stage.scatter_keys(pushed.mean(1) / stage.asking(layer.shape[2], pushed)), number))
    return torch.stack(maps).mean(0)


def gained(grad: Tensor, copies: Tensor | None, rows: slice | list[int]) -> Tensor:
    """Σ over these queries of (∂s/∂A)⁺, [B H M]; of a query that is one of several copies, as often as there are."""
    found = grad.clamp_min_(0)
    return (found if copies is None else found * copies[:, None, rows, None].to(found)).sum(2)


def channels(trace: Trace, tokens: Tensor) -> int:
    """The axis of the channels in what a block returns: the last, or the first of [B D h w]."""
    stages = trace.layout.stages
    first = tokens.ndim == 4 and bool(stages) and tokens.shape[-2:] == stages[-1].grid != tokens.shape[1:3]
    return 1 if first else -1


def own_readout(trace: Trace, tokens: Tensor) -> Tensor:
    """ρ for tokens in the order of the model."""
    divided = bool(trace.layout.stages and trace.layout.times)
    if divided or trace.layout.read_places != tokens.shape[1]:
        does = trace.layout.obstacle if divided else "pools its tokens in its last layer"
        said = f"{trace.model.name} {does}"
        raise Unsupported(
            f"legrad with pool=readout needs the tokens that the classifier reads; {said}. Try pool=mean."
        )
    return trace.layout.in_order(trace.readout).to(tokens)
