from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.methods.common import blocks_x_gradients
from vitreous.registry import method
from vitreous.trace.rules.gradient import ATTN_LRP, CP_LRP
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

TABLES = {"attn": ATTN_LRP, "cp": CP_LRP}


@method(
    cite="achtibat2024attnlrp",
    targeted=True,
    signed=True,
    tokens=True,
    blocks=True,
    joins=True,
    several=True,
    replays=True,
    quick=True,
    default=1,
    tried=[{"table": "cp"}],
)
def centred_lrp(
    trace: Trace,
    target: Target,
    *,
    table: Annotated[Literal["attn", "cp"], Field(description="the rules: those of attn_lrp or of cp_lrp")] = "attn",
) -> Map:
    """Relevance of each patch beside the image's mean patch, summed over the blocks; the default map for a class:
    quick, faithful and signed.

    Σ_l Σ_c (h_l − h̄_l) ⊙ ∂y/∂h_l by the rules of attn_lrp, h_l the tokens that enter block l, h̄_l their mean over
    the patches of the image
    """
    return blocks_x_gradients(trace, target, TABLES[table], "mean")
