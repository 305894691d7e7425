from __future__ import annotations

from vitreous.methods.lrp.gamma import TRIED, GammaLinear, GammaPatch
from vitreous.methods.lrp.propagate import relevance_map
from vitreous.methods.lrp.shifts import Shifts, Wrt, averaged, unshifted
from vitreous.registry import method
from vitreous.trace.rules.gamma import gamma_table
from vitreous.trace.rules.gradient import ATTN_LRP
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(
    cite="achtibat2024attnlrp",
    targeted=True,
    signed=True,
    several=unshifted,
    replays=unshifted,
    quick=True,
    default=2,
    tried=TRIED,
)
def attn_lrp(
    trace: Trace,
    target: Target,
    *,
    wrt: Wrt = "tokens",
    gamma_linear: GammaLinear = 0.0,
    gamma_patch: GammaPatch = 0.0,
    shifts: Shifts = 1,
) -> Map:
    """Relevance propagated through all layers, attention included, back to the patches or pixels; use it to see
    evidence for and against a class.

    Σ x·∂y/∂x, where activations pass on ∂f/∂x := f/x, norms hold σ constant, and each factor of Q·Kᵀ and A·V gets half;
    with γ, contributions to a linear layer's output that have its sign count 1 + γ times
    """
    table = gamma_table(ATTN_LRP, gamma_linear, gamma_patch)
    return averaged(lambda own, aim: relevance_map(own, aim, table, wrt), trace, target, wrt, shifts)
