"""The usual preprocessing (resize, crop, normalise) by its steps: what it makes of an image, and of which part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

COMPOSE, RESIZE, CROP, NORMALIZE, TO_TENSOR = (
    f"torchvision.transforms.transforms.{name}" for name in ("Compose", "Resize", "CenterCrop", "Normalize", "ToTensor")
)
TO_TENSORS = {TO_TENSOR, "timm.data.transforms.MaybeToTensor"}
COLOURS = TO_TENSORS | {NORMALIZE}  # steps that change no place
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the image


def applied(transform: Callable[[Any], Any], image: Any) -> Any:
    """What a preprocessing makes of an image.

    If its last steps are those of torchvision that turn pixels into numbers and normalise them, numpy computes the same
    numbers. Torch divides such an image among its threads, which takes milliseconds where a core is busy otherwise.
    """
    steps: Any = getattr(transform, "transforms", None)
    usual = kind_of(transform) == COMPOSE and isinstance(steps, list) and len(steps) >= 2
    if not usual or kind_of(steps[-2]) not in TO_TENSORS or kind_of(steps[-1]) != NORMALIZE:
        return transform(image)
    for step in steps[:-2]:
        image = step(image)
    mean, std = (np.asarray(each, np.float32).reshape(-1, 1, 1) for each in (steps[-1].mean, steps[-1].std))
    if not isinstance(image, Image.Image) or image.mode != "RGB" or not std.all():  # a zero: it says what is wrong
        return steps[-1](steps[-2](image))
    values = np.asarray(image).transpose(2, 0, 1).astype(np.float32, order="C")
    values /= 255
    values -= mean
    values /= std
    return torch.from_numpy(values)


def kind_of(step: Any) -> str:
    return f"{type(step).__module__}.{type(step).__qualname__}"


def known_box(transform: Callable[[Any], Any], size: tuple[int, int]) -> Box | None:
    """The part of an image of this (width, height) that becomes the input; None if some step is not a usual one."""
    (left, top), (wide, high), now = (0.0, 0.0), size, size  # the part so far, and its size in pixels after each step
    steps: Any = getattr(transform, "transforms", None)
    if not isinstance(steps, list):
        return None
    for step in steps:
        kind = kind_of(step)
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
