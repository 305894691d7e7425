from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitreous._support.memory import in_batches
from vitreous.metrics.case import Case, Measured
from vitreous.registry import metric
from vitreous.trace.apply import images_at_once
from vitreous.trace.trace import Trace
from vitreous.types import Images, Scores


@metric(better="lower", cite="yeh2019fidelity", again=True)
def max_sensitivity(
    case: Case,
    *,
    samples: Annotated[int, Field(ge=1, description="images near each image")] = 10,
    radius: Annotated[
        float, Field(gt=0, description="how much a pixel may change, as a share of the image's range of values")
    ] = 0.02,
    seed: Annotated[int, Field(ge=0, description="another seed gives other images")] = 0,
) -> Measured:
    """The largest change of a map when the image changes very little; use it to find methods whose maps are unstable.

    max_δ ‖s(x + δ) − s(x)‖ / ‖s(x)‖, δ uniform in ±radius · (max x − min x), for the class of x; where s(x) is zero: 0
    if it stays so, else NaN
    """
    trace, count = case.trace, len(case.trace)

    def changes(part: slice) -> Scores:
        """Of a few samples, [k B]."""
        near = torch.cat([beside(trace, radius, seed * samples + i) for i in range(part.start, part.stop)])
        rows = list(range(count)) * (part.stop - part.start)
        maps = case.again(trace.like(near, rows), case.target.of_rows(rows))
        again = case.map.repeat(part.stop - part.start, *[1] * (case.map.ndim - 1))
        change: Tensor = (maps - again).flatten(1).norm(dim=1)
        return change

    at_once = max(1, images_at_once(trace.model, trace.images, trace.inputs) // count)
    most = torch.cat(in_batches(changes, samples, at_once, "max_sensitivity")).reshape(samples, count).amax(0)
    length = case.map.flatten(1).norm(dim=1)
    return Measured(torch.where(most == 0, 0, most / length.masked_fill(length == 0, torch.nan)))


def beside(trace: Trace, radius: float, seed: int) -> Images:
    """Each image with uniform noise of its own."""
    images = trace.images
    flat = images.float().flatten(1)
    width = radius * (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (images.ndim - 1))
    noise = torch.stack([torch.rand(images.shape[1:], generator=g) for g in trace.generators(seed)])
    return (images + width * (2 * noise.to(images.device) - 1)).to(images.dtype)
