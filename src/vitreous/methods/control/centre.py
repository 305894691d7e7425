from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method()
def centre(
    trace: Trace,
    target: Target,
    *,
    width: Annotated[float, Field(gt=0, description="standard deviation, in half sides of the image")] = 0.5,
) -> Map:
    """A blob in the middle of every image; a control to compare with, because objects are often photographed there.

    exp(−(y² + x²) / 2σ²), y and x from −1 to 1
    """
    h, w = trace.layout.grid
    y = (torch.arange(h, device=trace.images.device) + 0.5) / h * 2 - 1
    x = (torch.arange(w, device=trace.images.device) + 0.5) / w * 2 - 1
    blob = torch.exp(-(y[:, None] ** 2 + x**2) / (2 * width**2))
    return blob.expand(len(trace), *trace.layout.cells).clone()
