from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.errors import Unsupported
from vitreous.methods.lrp.propagate import relevance_map
from vitreous.methods.lrp.shifts import Shifts, Wrt, averaged
from vitreous.registry import Noted, method
from vitreous.trace.ruled import ruled
from vitreous.trace.rules.gradient import ATTN_LRP, CP_LRP
from vitreous.trace.rules.residual import ResidualSum, residual_table
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="berend2026reslrp", targeted=True, signed=True)
def res_lrp(
    trace: Trace,
    target: Target,
    *,
    gamma: Annotated[
        float, Field(ge=0, description="how much more the operand with the sign of the sum counts; 0: no difference")
    ] = 1.0,
    table: Annotated[
        Literal["attn", "cp"], Field(description="the rules of all other layers: those of attn_lrp or of cp_lrp")
    ] = "attn",
    wrt: Wrt = "tokens",
    shifts: Shifts = 1,
) -> Noted:
    """Relevance propagated through all layers, kept from growing at every residual addition; use it for evidence for
    and against a class in deep or windowed models.

    At y = a + b: R_a = w_a·a / (w_a·a + w_b·b) · R, w_z = 1 + γ·[sign z = sign y]; all other layers as in attn_lrp or
    cp_lrp. amplification = Σ(|R_a| + |R_b|) / Σ|R| at each residual addition, in the order of the forward pass
    """
    base = ATTN_LRP if table == "attn" else CP_LRP
    notes = []

    def one(own: Trace, aim: Target) -> Map:
        rules = residual_table(base, gamma, len(own), own.batch_axis)
        found = ruled(own, rules)
        assert found.rules is not None
        rule = found.rules.table.rules["add"]
        assert isinstance(rule, ResidualSum)
        if not rule.sums:
            said = "no residual addition x + f(x) of two tensors is visible"
            raise Unsupported(f"{own.model.name}: {said}, which this method needs; use attn_lrp or cp_lrp")
        rule.forget()
        made = relevance_map(own, aim, found.rules.table, wrt)
        notes.append(rule.amplification(own.images.device))
        return made

    made = averaged(one, trace, target, wrt, shifts)
    return Noted(made, {"amplification": notes[0]})
