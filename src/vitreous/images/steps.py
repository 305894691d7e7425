"""Where the usual preprocessing (resize, crop, normalise) finds its input in an image, told from its steps alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RESIZE, CROP = "torchvision.transforms.transforms.Resize", "torchvision.transforms.transforms.CenterCrop"
COLOURS = {  # steps that change no place
    "torchvision.transforms.transforms.ToTensor",
    "torchvision.transforms.transforms.Normalize",
    "timm.data.transforms.MaybeToTensor",
}
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the image


def known_box(transform: Callable[[Any], Any], size: tuple[int, int]) -> Box | None:
    """The part of an image of this (width, height) that becomes the input; None if some step is not a usual one."""
    (left, top), (wide, high), now = (0.0, 0.0), size, size  # the part so far, and its size in pixels after each step
    steps: Any = getattr(transform, "transforms", None)
    if not isinstance(steps, list):
        return None
    for step in steps:
        kind = f"{type(step).__module__}.{type(step).__qualname__}"
        if kind == RESIZE and step.max_size is None:
            now = resized(now, step.size)
        elif kind == CROP and step.size[1] <= now[0] and step.size[0] <= now[1]:
            crop = step.size[1], step.size[0]
            x, y = (round((side - kept) / 2) for side, kept in zip(now, crop))
            left, top = left + wide * x / now[0], top + high * y / now[1]
            wide, high, now = wide * crop[0] / now[0], high * crop[1] / now[1], crop
        elif kind not in COLOURS:
            return None
    return left, top, left + wide, top + high


def resized(size: tuple[int, int], to: int | list[int] | tuple[int, ...]) -> tuple[int, int]:
    """Width and height after a resize of torchvision: of the short side, or to a given height and width."""
    sides = [to] if isinstance(to, int) else list(to)
    if len(sides) == 2:
        return sides[1], sides[0]
    longer = int(sides[0] * max(size) / min(size))
    return (sides[0], longer) if size[0] <= size[1] else (longer, sides[0])
