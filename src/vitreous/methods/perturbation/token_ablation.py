from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.registry import method
from vitreous.trace.perturb.drop_tokens import scored_as, scores_without
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


def of_logit(options: Mapping[str, Any]) -> bool:
    return bool(options["of"] == "logit")


@method(cite="brocki2023class", targeted=True, signed=True, attention=True, alone=True, replays=of_logit)
def token_ablation(
    trace: Trace,
    target: Target,
    *,
    of: Annotated[Literal["logit", "probability"], Field(description="of what the drop is measured")] = "logit",
) -> Map:
    """How much the score falls when a patch's token is removed from the sequence; the effect of each patch itself, at
    one forward pass for each.

    y(all tokens) − y(without token i), one run for each patch
    """
    fixed, whole = scored_as(trace, target, of)
    left = trace.layout.patch_numbers(trace.images.device)

    def without(i: int) -> Tensor:
        return scores_without(trace, i, fixed.of_image(i), left, "token_ablation", ("token_ablation", i))

    return torch.stack([whole[i] - without(i) for i in range(len(trace))]).reshape(-1, *trace.layout.cells)
