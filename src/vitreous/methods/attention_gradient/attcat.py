from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.methods.common import Baseline, GradientRules, less_baseline, sum_layers, table_of
from vitreous.registry import method
from vitreous.trace.ruled import entering_blocks, received, ruled, token_grads
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(
    cite="qiang2022attcat",
    targeted=True,
    signed=True,
    attention=True,
    joins=True,
    several=True,
    replays=True,
    tried=[{"rules": "libra"}, {"rules": "libra", "baseline": "mean"}],
)
def attcat(
    trace: Trace,
    target: Target,
    *,
    rules: GradientRules = "plain",
    tokens: Annotated[
        Literal["entering", "leaving"],
        Field(description="the tokens of a layer: those that enter its block (AttCAT) or leave it (LibraGrad)"),
    ] = "entering",
    baseline: Baseline = "zero",
) -> Map:
    """Tokens × gradient at every block, weighted by the attention that each token receives; use it for evidence for
    and against a class.

    Σ_l ᾱ_l ⊙ Σ_c h_l ⊙ ∂y/∂h_l, ᾱ_l the mean of A⁽ˡ⁾ over heads and queries, h_l the tokens of block l
    """
    reads_patches = not set(trace.layout.patch_tokens).isdisjoint(trace.layout.readout)
    found = ruled(trace, table_of(rules), whole=tokens == "leaving" and reads_patches)
    streams = entering_blocks(trace, found)
    if tokens == "leaving":  # nothing reads the patches that leave a narrowed block
        streams = found.leaving[:-1] if found.narrowed else found.leaving
    shares = received(trace, found)  # the last layer's queries are all known, also if its block was narrowed
    maps = []
    for share, (h, grad) in zip(shares, token_grads(trace, found, target, streams)):
        product = (less_baseline(trace, h, baseline) * grad).sum(-1).flatten(1)  # [B N]
        maps.append(trace.map(share.to(product) * product))
    return sum_layers(trace, maps)
