from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.errors import Unsupported
from vitreous.methods.attention.value_runs import Projection
from vitreous.methods.text.keys import projected
from vitreous.methods.text.token_runs import own_values, read_alone, recorded, scored, with_attention
from vitreous.registry import method
from vitreous.trace.run import Finished
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="zhou2022extract", targeted=True, attention=True, level=True)
def maskclip(
    trace: Trace,
    target: Target,
    *,
    ksim: Annotated[
        bool, Field(description="times the similarity of a patch's key to that of the token that is read")
    ] = False,
) -> Map:
    """The score of each patch alone, its value in place of attention in the last block; use it to find a text's region.

    y(z_j), z = x + W_O v + b_O, z + MLP(z), x what enters the last block; `ksim`: times Σ_i ρ_i cos(W_O k_i, W_O k_j)
    """
    known = recorded(trace, "maskclip", trace.layer_number(-1))

    def run() -> tuple[Finished, Any]:
        tokens, call, projection = with_attention(trace, known.blocks[0], partial(own_values, "maskclip"))
        return known.run, (read_alone(trace, known, tokens), call, projection)

    found, call, projection = trace.kept("maskclip", run)[1]
    scores = scored(trace, found, target.fix(trace.output))
    return scores * trace.map(key_similarity(trace, call, projection)) if ksim else scores


def key_similarity(trace: Trace, call: Attention, projection: Projection | None) -> Float[Tensor, "B M"]:
    """Σ_i ρ_i cos(W_O k_i + b_O, W_O k_j + b_O)."""
    qk = call.projected()
    keys = None if qk is None else projected(projection, qk[1])
    if keys is None:
        raise Unsupported(f"maskclip.ksim needs keys and an output projection; {trace.model.name} shows none")
    unit = F.normalize(keys, dim=-1)
    read = torch.einsum("bn,bnd->bd", trace.readout.to(unit), unit)
    return torch.einsum("bd,bmd->bm", read, unit)
