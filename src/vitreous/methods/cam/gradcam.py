from __future__ import annotations

from torch import Tensor

from vitreous.methods.cam.common import At, Layer, Layers, Place, cam, graph_at, over_tokens
from vitreous.methods.common import Baseline, GradientRules
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(
    cite="selvaraju2017grad",
    targeted=True,
    signed=True,
    tokens=True,
    several=True,
    graph=graph_at,
    replays=True,
    quick=True,
    default=3,
)
def gradcam(
    trace: Trace,
    target: Target,
    *,
    layer: Layer = -1,
    at: At = "norm",
    layers: Layers = "one",
    rules: GradientRules = "plain",
    baseline: Baseline = "zero",
) -> Map:
    """The tokens that enter an attention layer, each channel weighted by its mean gradient; a quick, signed map for a
    class, also on Swin and its kind.

    Σ_k w_k·T_k, w_k = mean over tokens of ∂y/∂T_k
    """
    return cam(trace, target, Place(layer, at, layers, rules), mean_gradient, baseline)


def mean_gradient(tokens: Tensor, grad: Tensor) -> Tensor:
    return grad.mean(over_tokens(grad))
