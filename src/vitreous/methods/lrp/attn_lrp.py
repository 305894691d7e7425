from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.methods.lrp.propagate import relevance_map
from vitreous.registry import method
from vitreous.trace.rules.gradient import ATTN_LRP
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="achtibat2024attnlrp", targeted=True, signed=True, several=True, replays=True, quick=True, default=2)
def attn_lrp(
    trace: Trace,
    target: Target,
    *,
    wrt: Annotated[
        Literal["tokens", "image"], Field(description="relevance of the patches at the first block, or of the pixels")
    ] = "tokens",
) -> Map:
    """Relevance propagated through all layers, attention included, back to the patches or pixels; use it to see
    evidence for and against a class.

    Σ x·∂y/∂x, where activations pass on ∂f/∂x := f/x, norms hold σ constant, and each factor of Q·Kᵀ and A·V gets half
    """
    return relevance_map(trace, target, ATTN_LRP, wrt)
