from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="selvaraju2017grad", targeted=True, signed=True, tokens=True, several=True, replays=True, quick=True)
def gradcam(
    trace: Trace,
    target: Target,
    *,
    layer: Annotated[int, Field(description="layer from 0, or from the end by -1, -2, …")] = -1,
) -> Map:
    """The tokens that enter an attention layer, each channel weighted by its mean gradient; a quick, signed map for a
    class, also on Swin and its kind.

    Σ_k w_k·T_k, w_k = mean over patches of ∂y/∂T_k
    """
    tokens, grad = trace.entry_grad(target, layer)
    weight = trace.to_patches(grad).mean((1, 2))  # [B D]
    return torch.einsum("bhwd,bd->bhw", trace.to_patches(tokens), weight)
