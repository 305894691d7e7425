from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vitreous.errors import Unsupported
from vitreous.methods.cam.common import At, Layer, Layers, Place, graph_at, tokens_at
from vitreous.methods.common import Baseline, GradientRules, less_baseline, sum_layers
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

ZERO, HALF = {torch.float32: 1e-4, torch.float64: 1e-4}, 1e-2  # what rounding leaves of |T|·|∂y/∂T|, by precision


def is_libra(options: Mapping[str, Any]) -> bool:
    return bool(options["rules"] == "libra")


@method(
    cite="draelos2020hirescam",
    targeted=True,
    signed=True,
    tokens=True,
    blocks=True,
    several=is_libra,
    graph=graph_at,
    replays=is_libra,
)
def hirescam(
    trace: Trace,
    target: Target,
    *,
    layer: Layer = -1,
    at: At = "block",
    layers: Layers = "one",
    rules: GradientRules = "libra",
    baseline: Baseline = "zero",
) -> Map:
    """Tokens × gradient of one layer, without averaging the gradient; a signed map for a class in which every patch has
    its own weights.

    Σ_k T_k·∂y/∂T_k
    """
    maps, sizes = [], []
    for tokens, grad in tokens_at(trace, target, Place(layer, at, layers, rules)):
        centred, slope = trace.to_patches(less_baseline(trace, tokens, baseline)), trace.to_patches(grad)
        maps.append((centred * slope).sum(-1))
        sizes.append(centred.norm(dim=-1) * slope.norm(dim=-1))
    found = sum_layers(trace, maps)
    if rules == "plain":
        refuse_zero(trace, found, sum_layers(trace, sizes))
    return found


def refuse_zero(trace: Trace, found: Map, size: Map) -> None:
    """Raise if the map is zero but for rounding, beside the length of tokens times that of their gradients."""
    largest, beside = found.flatten(1).abs().amax(1), size.flatten(1).amax(1)
    least = HALF if trace.autocast else ZERO.get(trace.model.dtype, HALF)
    if (largest <= least * beside).any():
        raise Unsupported(
            f"hirescam with rules=plain is zero in {trace.model.name}: the patches of this layer are read through a "
            "norm only, which does not change if its input is scaled, so that tokens and gradients are orthogonal. "
            "Use rules=libra, or at=norm."
        )
