from __future__ import annotations

from vitreous.registry import method
from vitreous.trace.run import gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="shrikumar2017learning", targeted=True, signed=True, several=True)
def input_x_gradient(trace: Trace, target: Target) -> Map:
    """The gradient times the (normalised) pixel it belongs to.

    Σ_c x_c · ∂y/∂x_c
    """
    record = trace.pixels()
    (grad,) = gradients(trace.score(target, record), [record.images])
    return (record.images.detach().float() * grad.float()).sum(1)
