from __future__ import annotations

from vitreous.methods.lrp.gamma import TRIED, GammaLinear, GammaPatch
from vitreous.methods.lrp.propagate import relevance_map
from vitreous.methods.lrp.shifts import Shifts, Wrt, averaged, unshifted
from vitreous.registry import method
from vitreous.trace.rules.gamma import gamma_table
from vitreous.trace.rules.gradient import CP_LRP
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="ali2022xai", targeted=True, signed=True, several=unshifted, replays=unshifted, tried=TRIED)
def cp_lrp(
    trace: Trace,
    target: Target,
    *,
    wrt: Wrt = "tokens",
    gamma_linear: GammaLinear = 0.0,
    gamma_patch: GammaPatch = 0.0,
    shifts: Shifts = 1,
) -> Map:
    """Relevance propagated through the values only, with attention held constant; use it beside attn_lrp, for evidence
    for and against a class.

    Σ x·∂y/∂x, where activations pass on ∂f/∂x := f/x and norms hold σ, attention holds A = softmax(Q·Kᵀ) constant;
    with γ, contributions to a linear layer's output that have its sign count 1 + γ times
    """
    table = gamma_table(CP_LRP, gamma_linear, gamma_patch)
    return averaged(lambda own, aim: relevance_map(own, aim, table, wrt), trace, target, wrt, shifts)
