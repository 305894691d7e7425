from __future__ import annotations

from vitreous.registry import method
from vitreous.trace.run import gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="shrikumar2017learning", targeted=True, signed=True, several=True, replays=True, quick=True)
def input_x_gradient(trace: Trace, target: Target) -> Map:
    """Each (normalised) pixel times its gradient, a first estimate of what it adds to the score; quick and signed, for
    any network.

    Σ_c x_c · ∂y/∂x_c
    """
    record = trace.pixels()
    (grad,) = gradients(trace.score(target, record), [record.images])
    return (record.images.detach().float() * grad.float()).sum(1)
