from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vitreous.methods.common import GradientRules, table_of
from vitreous.methods.lrp.propagate import relevance_map
from vitreous.methods.lrp.shifts import Shifts, averaged, unshifted
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


def graph_of(options: Mapping[str, Any]) -> str:
    if options["shifts"] > 1:
        return ""
    return "libra" if options["rules"] == "libra" else "model" if options["wrt"] == "image" else ""


@method(
    cite="shrikumar2017learning",
    targeted=True,
    signed=True,
    several=unshifted,
    graph=graph_of,
    replays=unshifted,
    quick=True,
)
def input_x_gradient(
    trace: Trace,
    target: Target,
    *,
    wrt: Annotated[
        Literal["image", "tokens"], Field(description="the pixels, or the patches at the first block")
    ] = "image",
    rules: GradientRules = "plain",
    shifts: Shifts = 1,
) -> Map:
    """Each (normalised) pixel times its gradient, a first estimate of what it adds to the score; quick and signed, for
    any network.

    Σ_c x_c · ∂y/∂x_c
    """
    if wrt == "tokens" or rules == "libra":
        table = table_of(rules)
        return averaged(lambda own, aim: relevance_map(own, aim, table, wrt), trace, target, wrt, shifts)
    return averaged(of_pixels, trace, target, wrt, shifts)


def of_pixels(trace: Trace, target: Target) -> Map:
    return (trace.images.detach().float() * trace.pixel_grad(target).float()).sum(-3)
