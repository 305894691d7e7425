"""Average the relevance of pixels over shifted images, which removes the pattern of the patch grid from a map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vitreous._support.progress import steps
from vitreous.errors import OptionError
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

Wrt = Annotated[
    Literal["tokens", "image"], Field(description="relevance of the patches at the first block, or of the pixels")
]
Shifts = Annotated[
    int, Field(ge=1, description="with wrt=image: average over so many shifts of the image within one patch")
]


def unshifted(options: Mapping[str, Any]) -> bool:
    """Whether one forward pass makes the map."""
    return bool(options["shifts"] == 1)


def averaged(one: Callable[[Trace, Target], Map], trace: Trace, target: Target, wrt: Wrt, shifts: int) -> Map:
    """The mean of `one` over shifted images, each map shifted back.

    The shifts are k·patch/shifts, down and across alike, from minus half a patch on; one of them is none. The image is
    rolled: what leaves it on one side enters on the other. So each pixel is in every shifted image once, and the sum of
    the map is the mean of the sums.
    """
    if shifts == 1:
        return one(trace, target)
    if wrt != "image":
        raise OptionError(f"shifts={shifts} needs wrt=image: the patches do not move with the image")
    patch = trace.layout.patch or (1, 1)
    if shifts > max(patch):
        raise OptionError(f"shifts={shifts} is too many: a patch of {trace.model.name} is {max(patch)} pixels wide")
    total = one(trace, target)
    fixed = target.fix(trace.output)
    others = [k for k in range(-(shifts // 2), shifts - shifts // 2) if k]
    for k in steps(others, len(others), "shifts"):
        way = (round(k * patch[0] / shifts), round(k * patch[1] / shifts))
        total = total + one(rolled(trace, way), fixed).roll((-way[0], -way[1]), (-2, -1))
    return total / shifts


def rolled(trace: Trace, way: tuple[int, int]) -> Trace:
    """A trace of the shifted images."""
    return trace.like(trace.images.roll(way, (-2, -1)))  # with its autocast, which is off while a method runs
