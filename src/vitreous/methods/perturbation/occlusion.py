from __future__ import annotations

from typing import Annotated, Literal

import torch
from jaxtyping import Bool
from pydantic import Field
from torch import Tensor

from vitreous.errors import OptionError
from vitreous.registry import method
from vitreous.trace.perturb.drop_tokens import scored_as
from vitreous.trace.perturb.fills import Fill, filled
from vitreous.trace.perturb.hide_patches import Hidden, scores_hidden
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


@method(cite="zeiler2014visualizing", targeted=True, signed=True, alone=True, cheap={"window": 2, "stride": 2})
def occlusion(
    trace: Trace,
    target: Target,
    *,
    fill: Annotated[
        Fill, Field(description="what hides: the image's mean colour, its blurred self, or zeros")
    ] = "mean",
    window: Annotated[int, Field(ge=1, description="side of what is hidden at a time, in patches")] = 1,
    stride: Annotated[int, Field(ge=1, description="from one window to the next, in patches")] = 1,
    of: Annotated[Literal["logit", "probability"], Field(description="of what the drop is measured")] = "logit",
) -> Map:
    """How much the score falls when a window of the image is hidden; a direct test for any network, at one forward pass
    for each window.

    mean of y(x) − y(x with the window hidden) over the windows that cover a patch; they begin every `stride` patches,
    the last ones end at the border
    """
    if stride > window:
        raise OptionError(f"occlusion.stride={stride} leaves gaps between windows of {window}; use at most {window}")
    fixed, whole = scored_as(trace, target, of)
    windows = all_windows(trace.layout.cells, window, stride).to(trace.images.device)
    count, cover = len(trace), filled(trace, fill)
    rows = [image for image in range(count) for _ in windows]
    key = "occlusion", window, stride, fill
    hidden = scores_hidden(trace, fixed, rows, windows.repeat(count, *[1] * len(trace.extent)), cover, "occlusion", key)
    falls = whole[:, None] - hidden.reshape(count, -1)  # [B V]
    share = windows.flatten(1).to(falls)
    return (falls @ (share / share.sum(0))).reshape(-1, *trace.layout.cells)


def all_windows(cells: tuple[int, ...], window: int, stride: int) -> Hidden:
    """Every window: a rectangle of rows and columns of patches; of a video, so many tubelets long."""
    every = [spans(side, min(window, side), stride) for side in cells]  # (t T) (r h) (c w)
    found = torch.ones((1, *[1] * len(cells)), dtype=torch.bool)
    for axis, some in enumerate(every):
        shape = [-1 if other == axis else 1 for other in range(len(cells))]
        found = (found[:, None] & some.view(1, len(some), *[some.shape[1] if n == -1 else 1 for n in shape])).flatten(
            0, 1
        )
    return found


def spans(side: int, length: int, stride: int) -> Bool[Tensor, "spans side"]:
    """Spans of this length that cover a side."""
    first = torch.tensor([*range(0, side - length, stride), side - length])[:, None]
    place = torch.arange(side)
    return (first <= place) & (place < first + length)
