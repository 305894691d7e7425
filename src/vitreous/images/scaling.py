"""A preprocessing that resizes, crops the centre and normalises, done for many images at once on their device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous.images.jpeg import Header
from vitreous.images.preprocess import Preprocess
from vitreous.images.resampling import REACH, Frame, resampled

TRIED = ((1.3, 1.8), (2.5, 1.3), (0.9, 0.7))  # height and width of noise with which it is compared, in short sides
MOST_ROWS = 1 << 15  # of images that are resized at once


@dataclass(frozen=True, eq=False)
class Scaling:
    """The steps of a `Preprocess`; they make of an image, bit by bit, what the preprocessing makes of it."""

    short: int  # the length of the shorter side after resizing
    size: tuple[int, int]  # of the centre that is kept
    filter: str
    colours: Tensor  # the input for each of 256 values, [3 256]

    @classmethod
    def of(cls, steps: Preprocess, device: torch.device) -> Scaling | None:
        """The steps of torchvision's transforms; None if there are others, or if the result differs on this device."""
        with suppress(Exception):  # a user's own steps may have any attributes, and take no image but their own
            found = cls.read(steps.transform)
            if found.equals(steps, device):
                return found
        return None

    @classmethod
    def read(cls, transform: Any) -> Scaling:
        resize, crop, *rest = transform.transforms
        (short,) = [resize.size] if isinstance(resize.size, int) else resize.size
        if resize.max_size is not None or resize.interpolation.value not in REACH:
            raise ValueError("another way of resizing")
        ramp: Any = Image.fromarray(np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, 2))
        for step in rest:
            ramp = step(ramp)
        return cls(short, tuple(crop.size), resize.interpolation.value, ramp[:, 0].clone())

    def equals(self, steps: Preprocess, device: torch.device) -> bool:
        """Whether the preprocessing makes the same of noise."""
        noise = np.random.default_rng(0)
        headers = [Header((int(high * self.short), int(wide * self.short))) for high, wide in TRIED]
        images = [noise.integers(0, 256, (*header.size, 3), np.uint8) for header in headers]
        pixels = [torch.from_numpy(image).to(device).permute(2, 0, 1) for image in images]
        made = self(pixels, headers).cpu()
        return all(torch.equal(one, steps(Image.fromarray(image))) for one, image in zip(made, images))

    def __call__(self, pixels: Sequence[Tensor], headers: Sequence[Header]) -> Tensor:
        """The input of the model, made of images as stored, uint8 [3 Y X]."""
        parts = []
        for part in in_parts(headers):
            frames, start = [], 0
            for header in headers[part]:
                frames.append(self.frame(header, start))
                start += 3 * header.size[0] * header.size[1]
            held = torch.cat([image.flatten() for image in pixels[part]])
            parts.append(resampled(held, frames, self.size, self.filter))
        each = torch.cat(parts)
        colours = self.colours.to(each.device)
        return torch.stack([colours[channel][each[:, channel].int()] for channel in range(3)], 1)

    def frame(self, header: Header, start: int) -> Frame:
        first, steps = header.steps()
        high, wide = header.upright
        long = int(self.short * max(high, wide) / min(high, wide))
        scaled = (self.short, long) if high <= wide else (long, self.short)
        top, left = (round((side - kept) / 2) for side, kept in zip(scaled, self.size))
        if min(top, left) < 0:
            raise ValueError("the image would be padded")
        return Frame(start + first, steps, header.upright, scaled, (top, left))


def in_parts(headers: Sequence[Header]) -> list[slice]:
    """Slices of images that are resized at once, which bounds the memory that this takes."""
    starts, most = [0], 0
    for i, header in enumerate(headers):
        most = max(most, header.upright[0])
        if i > starts[-1] and (i + 1 - starts[-1]) * most > MOST_ROWS:
            starts.append(i)
            most = header.upright[0]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(headers)])]
