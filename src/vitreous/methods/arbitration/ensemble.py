from __future__ import annotations

from math import inf
from typing import Annotated

import torch
from pydantic import Field

from vitreous.errors import OptionError, Unsupported
from vitreous.registry import METHODS, Method, Noted, method
from vitreous.trace.apply import refuse
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(targeted=True, signed=True, attention=True, alone=True, costly=True, cheap={"members": "attn_lrp:1,gae:1"})
def ensemble(
    trace: Trace,
    target: Target,
    *,
    members: Annotated[
        str, Field(description="methods with their weights; each map is divided by the sum of its absolute values")
    ] = "centred_lrp:4,token_ablation:1",
) -> Map:
    """The weighted mean of the maps of several methods; by default of relevance and of what happens without each patch,
    which together are more faithful than either.

    Σ_m w_m · s_m / Σ|s_m|, divided by Σ w_m
    """
    weights = parse_members(members)
    total = sum(weights.values())
    fixed = target.fix(trace.output)
    maps = [weight / total * shared(trace, fixed, METHODS[name]) for name, weight in weights.items()]
    return torch.stack(maps).sum(0)


def parse_members(text: str) -> dict[str, float]:
    """Read "centred_lrp:4,token_ablation:1"."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        declared = METHODS[name.strip()]
        try:
            found[declared.name] = float(weight or 1)
        except ValueError:
            raise OptionError(f"ensemble.members: {part.strip()!r} is not a method and its weight, as gae:2") from None
    if len(found) < 2 or ensemble.__name__ in found or not all(0 < weight < inf for weight in found.values()):
        raise OptionError(f"ensemble.members={text!r}: name two or more other methods, with weights above 0")
    return found


def shared(trace: Trace, target: Target, declared: Method) -> Map:
    """The map of a member, its absolute values summing to one."""
    refuse(trace, declared)
    made = declared.run(trace, target, **declared.check({}))
    values = (made.map if isinstance(made, Noted) else made).float()
    if values.shape[1:] != trace.layout.cells:
        raise Unsupported(f"ensemble joins maps with one value per patch; the map of {declared.name} has another size")
    return values / values.abs().sum(tuple(range(1, values.ndim)), keepdim=True)
