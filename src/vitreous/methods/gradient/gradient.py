from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vitreous.methods.gradient.channels import Reduce, keeps_sign, reduce_channels
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="simonyan2014deep", targeted=True, signed=keeps_sign, several=True, graph="model", replays=True, default=4)
def gradient(
    trace: Trace,
    target: Target,
    *,
    reduce: Annotated[
        Reduce, Field(description="how the colour channels become one: only sum keeps the sign")
    ] = "abs-mean",
) -> Map:
    """How much the score changes when a pixel changes a little; a quick map of single pixels for any network, but a
    noisy one.

    ∂y/∂x
    """
    return reduce_channels(trace.pixel_grad(target).float(), reduce)
