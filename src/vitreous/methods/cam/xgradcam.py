from __future__ import annotations

from torch import Tensor

from vitreous.methods.cam.common import At, Layer, Layers, Place, cam, graph_at, over_tokens
from vitreous.methods.common import Baseline, GradientRules
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

TINY = 1e-7  # added to the sum of activations, as the authors do


@method(
    cite="fu2020axiom",
    targeted=True,
    signed=True,
    tokens=True,
    blocks=True,
    several=True,
    graph=graph_at,
    replays=True,
    tried=[{"rules": "libra", "layers": "all"}],
)
def xgradcam(
    trace: Trace,
    target: Target,
    *,
    layer: Layer = -1,
    at: At = "block",
    layers: Layers = "one",
    rules: GradientRules = "plain",
    baseline: Baseline = "zero",
) -> Map:
    """The tokens of a layer, each channel weighted by its gradient where it is active; a signed map for a class, to be
    used with rules=libra and layers=all.

    Σ_k w_k·T_k, w_k = Σ_j a_jk·∂y/∂T_jk / Σ_j a_jk over tokens j; a = |T| (at=block) or T (at=norm)
    """
    weigh = absolute_share if at == "block" else signed_share
    return cam(trace, target, Place(layer, at, layers, rules), weigh, baseline)


def absolute_share(tokens: Tensor, grad: Tensor) -> Tensor:
    return signed_share(tokens.abs(), grad)


def signed_share(active: Tensor, grad: Tensor) -> Tensor:
    every = over_tokens(grad)
    return (active * grad).sum(every) / (active.sum(every) + TINY)
