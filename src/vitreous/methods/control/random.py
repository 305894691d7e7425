from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method()
def random(
    trace: Trace,
    target: Target,
    *,
    seed: Annotated[int, Field(ge=0, description="another seed gives another map")] = 0,
) -> Map:
    """Uniform noise; the control that a map must beat to say anything about the model.

    U(0, 1) for each patch, drawn from the image and the seed
    """
    noise = torch.stack([torch.rand(trace.layout.cells, generator=g) for g in trace.generators(seed)])
    return noise.to(trace.images.device)
