from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.methods.lrp.propagate import relevance_map
from vitreous.registry import method
from vitreous.trace.rules.gradient import CP_LRP
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="ali2022xai", targeted=True, signed=True, several=True, replays=True)
def cp_lrp(
    trace: Trace,
    target: Target,
    *,
    wrt: Annotated[
        Literal["tokens", "image"], Field(description="relevance of the patches at the first block, or of the pixels")
    ] = "tokens",
) -> Map:
    """Relevance propagated through the values only, with attention held constant; use it beside attn_lrp, for evidence
    for and against a class.

    Σ x·∂y/∂x, where activations pass on ∂f/∂x := f/x and norms hold σ, attention holds A = softmax(Q·Kᵀ) constant
    """
    return relevance_map(trace, target, CP_LRP, wrt)
