from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitreous.methods.attention.head_similarity import class_saliency, similarities, weighted_heads
from vitreous.registry import Noted, method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace


@method(cite="lee2022cass", targeted=True, attention=True, costly=True, cheap={"samples": 2})
def cass_attention(
    trace: Trace,
    target: Target,
    *,
    space: Annotated[
        Literal["patch", "pixel"], Field(description="where attention and saliency are compared")
    ] = "patch",
    samples: Annotated[int, Field(ge=1, description="noisy copies of each image for the saliency")] = 16,
    sigma: Annotated[float, Field(gt=0, description="noise, as a share of the image's range of values")] = 0.15,
    seed: Annotated[int, Field(ge=0, description="another seed gives other noise")] = 0,
) -> Noted:
    """The attention of all heads, each weighted by its similarity to a saliency map of the class; shows what the heads
    that follow the class look at.

    Σ_{l,h} S_lh · ρᵀA⁽ˡ⁾ₕ, S_lh = cos(|SmoothGrad|, ρᵀA⁽ˡ⁾ₕ)
    """
    phi = class_saliency(trace, target, space=space, samples=samples, sigma=sigma, seed=seed)
    scores = similarities(trace, phi, space)  # [B L H]
    return Noted(weighted_heads(trace, scores), {"cass": scores})
