"""What stands in place of hidden pixels, and coarse masks that are as large as the image only when needed."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous.attention import widen
from vitreous.methods.gradient.integrated_gradients import begin
from vitreous.trace import Trace
from vitreous.types import Images

Fill = Literal["mean", "blur", "zero"]
Stretch = Float[Tensor, "..."]  # [size cells], perhaps of each mask: how much of each cell is in each pixel


def filled(trace: Trace, fill: Fill) -> Images:
    """Each image with all its pixels hidden: its mean colour, itself blurred, or zero (normalised: the usual mean)."""
    if fill == "mean":
        return widen(trace.images).mean((2, 3), keepdim=True).to(trace.images.dtype).expand_as(trace.images)
    return begin(trace, fill, seed=0)


def stretch(cells: int, size: int) -> Float[Tensor, "size cells"]:
    """Bilinear resizing along one side, as a matrix."""
    each = torch.eye(cells, dtype=torch.float64)[None, None]
    return F.interpolate(each, (size, cells), mode="bilinear", antialias=True)[0, 0]


def enlarge(coarse: Float[Tensor, "K a b"], down: Stretch, across: Stretch) -> Float[Tensor, "K Y X"]:
    """Coarse masks in the size of the image."""
    return down @ coarse @ across.mT
