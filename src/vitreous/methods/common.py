"""Shared by several methods: their gradient and baseline, layer checks, fusing heads, discarding, quadrature points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.shown import Visitor
from vitreous.errors import OptionError, Unsupported
from vitreous.models.stages import Stage
from vitreous.trace.ruled import Pair, entering_blocks, follow_ruled, ruled, show_grads
from vitreous.trace.rules.libra import LIBRA
from vitreous.trace.rules.mode import Table
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map, Row

GradientRules = Annotated[
    Literal["plain", "libra"],
    Field(description="the gradient: plain, or Libra's, in which attention, the σ of norms and gates are constant"),
]
Baseline = Annotated[
    Literal["zero", "mean"],
    Field(description="subtracted from each token: nothing, or the mean token of the image's patches"),
]


def graph_of(options: Mapping[str, Any]) -> str:
    """The forward pass of a method that reads all layers under these rules."""
    return "model" if options["rules"] == "plain" else "libra"


def table_of(rules: GradientRules) -> Table | None:
    """The table of this gradient; None: plain."""
    return LIBRA if rules == "libra" else None


def following(trace: Trace, rules: GradientRules) -> Callable[[Target, Visitor], None]:
    """`Trace.follow` with this gradient; makes the forward pass that everything after it uses."""
    if rules == "plain":
        trace.followed(seen=False)
        return trace.follow
    return partial(follow_ruled, trace, ruled(trace, LIBRA))


def check_start(trace: Trace, start_layer: int) -> None:
    """Raise if there is no such layer."""
    last = trace.layout.layers - 1
    if start_layer > last >= 0:
        raise OptionError(f"start_layer={start_layer} is out of range: {trace.model.name} has layers 0 to {last}")


def fuse_heads(values: Tensor, heads: str | int) -> Tensor:
    """Reduce [B H …] to [B …]: the mean, maximum or minimum over heads, or one head."""
    if heads == "mean":
        return values.mean(1)
    if heads == "max":
        return values.amax(1)
    if heads == "min":
        return values.amin(1)
    assert isinstance(heads, int)
    if not 0 <= heads < values.shape[1]:
        raise OptionError(f"head {heads} is out of range: the layer has heads 0 to {values.shape[1] - 1}")
    return values[:, heads]


def whole(layer: Attention, heads: str) -> Float[Tensor, "B N M"]:
    """Ā: all rows of a layer with the heads fused."""
    return torch.cat([fuse_heads(a, heads) for _, a in layer.chunks()], 1)


def need_positive(trace: Trace, name: str, layers: Iterable[Attention]) -> None:
    """Raise if an attention weight is negative, as it may be where heads are mixed."""
    for layer in layers:
        least = min(float(a.min()) for _, a in layer.chunks(layer.only)) if layer.mixed else 0.0
        if least < 0:
            said = f"{trace.model.name} changes its attention between softmax and values (in {layer.name})"
            told = f"down to {least:.2g}. Try gae, grad_rollout or attention."
            raise Unsupported(f"{name} needs weights that are not negative; {said}, {told}")


def need_positive_rows(trace: Trace, name: str, layer: Attention, heads: str, residual: float) -> None:
    """Raise if a row of r·I + (1−r)·Ā cannot be normalised: heads that are mixed may leave any sum."""
    sums = whole(layer, heads).sum(-1) if layer.mixed else None
    least = 1.0 if sums is None else float((residual + (1 - residual) * sums).min())
    if least <= 0:
        said = f"{trace.model.name} changes its attention between softmax and values (in {layer.name})"
        told = f"a row with the skip connection then sums to {least:.2g}, so that it cannot be normalised"
        raise Unsupported(f"{name}: {said}; {told}. Try gae, grad_rollout or attention.")


def less_baseline(trace: Trace, tokens: Tensor, baseline: Baseline) -> Tensor:
    """Tokens [B N D] or [B h w D] minus the baseline: nothing, or the mean over the patches of the same image."""
    if baseline == "zero":
        return tokens
    placed = trace.to_patches(tokens)
    mean = placed.mean(tuple(range(1, placed.ndim - 1)))  # [B D]
    return tokens - mean.view(len(mean), *[1] * (tokens.ndim - 2), -1)


def sum_layers(trace: Trace, maps: list[Map]) -> Map:
    """The sum of the maps of several layers; raise unless all have the same grid."""
    grids = sorted({tuple(map.shape[1:]) for map in maps}, reverse=True)
    if len(grids) > 1:
        told = " and ".join("×".join(map(str, grid)) for grid in grids)
        said = f"{trace.model.name} merges its tokens on the way ({told}), so layers cannot be summed patch by patch"
        raise Unsupported(f"{said}. Try attn_lrp, cp_lrp or gradcam.")
    return torch.stack(maps).sum(0)


def tokens_x_gradients(trace: Trace, pairs: list[Pair], baseline: Baseline) -> Map:
    """Σ_l Σ_c (h_l − baseline) ⊙ ∂y/∂h_l on the patch grid."""
    return sum_layers(trace, [token_x_gradient(trace, baseline, *pair) for pair in pairs])


def token_x_gradient(trace: Trace, baseline: Baseline, tokens: Tensor, grad: Tensor) -> Map:
    return trace.to_patches(less_baseline(trace, tokens, baseline) * grad).sum(-1)


def blocks_x_gradients(trace: Trace, target: Target, table: Table, baseline: Baseline) -> Map:
    """The same of the tokens that enter each block, under a table; each product is made during the backward pass."""
    found = ruled(trace, table, seen=False)
    maps: dict[int, Map] = {}

    def visit(number: int, tokens: Tensor, grad: Tensor) -> None:
        maps[number] = token_x_gradient(trace, baseline, tokens, grad)

    show_grads(trace, found, target, entering_blocks(trace, found), visit)
    return sum_layers(trace, [maps[number] for number in sorted(maps)])


def keeps_all(options: Mapping[str, Any]) -> bool:
    """Whether no attention is discarded."""
    return bool(options["discard"] == 0)


def trim(a: Float[Tensor, "B N M"], discard: float, keep: tuple[int, ...]) -> Float[Tensor, "B N M"]:
    """Set the smallest share of each image's entries to zero, except the attention of read-out tokens to themselves."""
    drop = int(a[0].numel() * discard)
    if drop == 0:
        return a
    limit = a.flatten(1).kthvalue(drop).values  # [B]
    trimmed = a.masked_fill(a <= limit[:, None, None], 0)
    own = list(keep)
    trimmed[:, own, own] = a[:, own, own]
    return trimmed


def trim_slots(
    a: Float[Tensor, "B N M"], discard: float, stage: Stage, keep: Bool[Tensor, "W N M"] | None = None
) -> Float[Tensor, "B N M"]:
    """The same within windows: the share of those of an image's entries that are not padding, except `keep`."""
    real = stage.pairs(a.device)  # [W N M]
    each = a.reshape(-1, *real.shape)  # [B W N M]
    drop = int(int(real.sum()) * discard)
    if drop == 0:
        return a
    limit = each.masked_fill(~real, torch.inf).flatten(1).kthvalue(drop).values
    gone = each <= limit[:, None, None, None]
    if keep is not None:
        gone &= ~keep
    return each.masked_fill(gone, 0).reshape_as(a)


def repeated_step(carried: Row, stage: Stage, a: Float[Tensor, "W n m"], residual: float) -> Row:
    """One factor of a rollout where a token asks in several windows: its row is the sum of those of its copies."""
    sums = stage.scatter_queries(a.sum(-1))
    asks = stage.queries.slots_of_place.to(carried) > 0
    share = torch.where(
        asks, carried / (residual + (1 - residual) * sums).clamp_min(torch.finfo(a.dtype).tiny), carried
    )
    moved = (1 - residual) * (stage.asked(share)[:, None] @ a)[:, 0]
    return torch.where(asks, residual * share, carried) + stage.scatter_keys(moved)


def path(steps: int) -> tuple[list[float], list[float]]:
    """Points and weights of Gauss–Legendre quadrature on [0, 1]; the weights sum to one."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    return ((points + 1) / 2).tolist(), (weights / 2).tolist()
