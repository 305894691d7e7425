from __future__ import annotations

from typing import Annotated

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from vitreous.images.masks import Mask
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.localisation.masked import with_masks
from vitreous.registry import metric


@metric(better="higher", cite="zhang2018top", masks=True)
def pointing_game(
    case: Case,
    *,
    tolerance: Annotated[
        float, Field(ge=0, description="how far from the object a point may lie, in pixels of the input; published: 15")
    ] = 0.0,
) -> Measured:
    """Whether the highest value of a map lies on the object; a simple check, easily passed where objects are large or
    central.

    1 if the centre of the patch (or the pixel) argmax s lies in the mask, else 0; of several equal maxima, the share
    that does, so that a map that is the same everywhere scores the object's share of the image
    """

    def hits(values: Float[Tensor, "rows columns"], mask: Mask) -> float:
        return near(mask, tolerance)[centres(values == values.max(), mask)].float().mean().item()

    return with_masks(case, case.map, hits)


def near(mask: Mask, tolerance: float) -> Mask:
    """The mask, and what lies no further than this from it."""
    if tolerance == 0:
        return mask
    from scipy.ndimage import distance_transform_edt

    return torch.from_numpy(distance_transform_edt(~mask.numpy()) <= tolerance)


def centres(chosen: Bool[Tensor, "rows columns"], mask: Mask) -> tuple[Tensor, ...]:
    """The pixels in the middle of the chosen cells of a map."""
    sides = zip(chosen.nonzero(as_tuple=True), chosen.shape, mask.shape)
    return tuple((2 * index + 1) * pixels // (2 * cells) for index, cells, pixels in sides)
