from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from vitreous.errors import Unsupported
from vitreous.images.masks import Mask
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.faithfulness.curves import Scale
from vitreous.registry import metric
from vitreous.trace.perturb.drop_tokens import Undroppable, refuse_dropping, scores_without
from vitreous.trace.trace import Trace


@metric(better="lower", cite="kang2025detecting", masks=True)
def token_shortcut(
    case: Case,
    *,
    pool: Annotated[
        Literal["mean", "max"], Field(description="of the tokens on each side: their mean (A-TSI) or maximum (M-TSI)")
    ] = "mean",
    cover: Annotated[
        float, Field(gt=0, le=1, description="the least share of a patch that must be in the mask to count as inside")
    ] = 0.5,
    of: Scale = "probability",
) -> Measured:
    """How much a single token beside the object changes the probability, relative to one on it; a property of the model
    and the image, the same for every method.

    token shortcut (spuriosity) index: mean, or max, of |Δp_i| over the tokens outside the mask / over those inside,
    Δp_i = p(target) − p(target without token i); NaN without tokens on both sides, or if none inside changes anything
    """
    trace, target = case.trace, case.scored(of)
    try:
        refuse_dropping(trace)
    except Undroppable as error:
        said = f"token_shortcut takes tokens out of the sequence, and {error.reason}"
        raise Unsupported(f"{said}; energy_in_mask of occlusion shows the same by hiding patches") from None
    whole = trace.score(target).detach()
    left = trace.layout.patch_numbers(trace.images.device)
    found = torch.full((len(trace),), torch.nan)
    for i, mask in enumerate(case.masks or []):
        if mask is not None and mask.any():
            run = scores_without(trace, i, target.of_image(i), left, "token_shortcut", ("token_ablation", i))
            found[i] = index((whole[i] - run).abs().cpu().double(), covered(trace, mask) >= cover, pool)
    return Measured(found.to(trace.images.device))


def index(drops: Float[Tensor, "n"], inside: Bool[Tensor, "n"], pool: str) -> float:
    """The drops outside over those inside; NaN if that is undefined."""
    if inside.all() or not inside.any():
        return math.nan
    on, beside = (float(side.mean() if pool == "mean" else side.max()) for side in (drops[inside], drops[~inside]))
    return beside / on if on > 0 else math.nan


def covered(trace: Trace, mask: Mask) -> Float[Tensor, "n"]:
    """The share of each patch that is in the mask."""
    layout, mask = trace.layout, mask.cpu()
    rows, columns = (torch.tensor(layout.lines(axis, mask.shape[axis])) for axis in (0, 1))
    seen = (rows >= 0)[:, None] & (columns >= 0)
    patch = rows[:, None] * layout.grid[1] + columns
    pixels, inside = (patch[some].bincount(minlength=layout.patches).double() for some in (seen, seen & mask))
    return inside / pixels.clamp_min(1)
