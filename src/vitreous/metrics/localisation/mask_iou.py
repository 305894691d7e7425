from __future__ import annotations

from typing import Annotated, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from vitreous.images.masks import Mask
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.localisation.masked import with_masks
from vitreous.registry import metric

Grid = Float[Tensor, "rows columns"]


@metric(better="higher", cite="chefer2021transformer", masks=True)
def mask_iou(
    case: Case,
    *,
    threshold: Annotated[
        Literal["mean", "area"],
        Field(description="what counts as the object: more than the map's mean, or as many of the highest as it has"),
    ] = "mean",
) -> Measured:
    """How well a map, cut at a threshold, covers the object (intersection over union); use it to judge maps as
    segmentations.

    |P ∩ M| / |P ∪ M|, P = pixels with s > mean s (none where s is the same everywhere); `area`: the |M| highest, of
    equal ones a share of each
    """

    def overlap(values: Grid, mask: Mask) -> float:
        chosen = above_mean(values) if threshold == "mean" else highest(values, int(mask.sum()))
        shared = chosen[mask].sum()
        return float(shared / (chosen.sum() + mask.sum() - shared))

    return with_masks(case, case.pixels, overlap)


def above_mean(values: Grid) -> Grid:
    above = (values - values.min()).double()  # exactly 0 where all are the same
    return (above > above.mean()).double()


def highest(values: Grid, count: int) -> Grid:
    """1 for the highest values, a share for those that are equal at the edge."""
    least = values.flatten().topk(count).values[-1]
    surely, equal = (values > least).double(), (values == least).double()
    return surely + equal * (count - surely.sum()) / equal.sum()
