"""Resize and crop many images of different sizes at once, on any device, with the same bits as Pillow.

Pillow resizes across, rounds to 8 bits, and resizes down, unless an image is much higher than wide. Its weights are
whole numbers, so sums are exact, whatever their order: the result is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PRECISION = 22  # bits of a weight, as in Pillow
REACH = {"bilinear": 1.0, "bicubic": 2.0}  # how many pixels a filter reaches


@dataclass(frozen=True)
class Frame:
    """Where an image lies in a buffer of bytes, and which part of it is wanted after resizing.

    Steps are bytes from one value to the next; those of a rotated or mirrored image may be negative.
    """

    start: int  # of the upper left pixel, upright
    steps: tuple[int, int, int]  # to the next channel, down, and to the right
    size: tuple[int, int]  # height and width, upright
    scaled: tuple[int, int]  # height and width after resizing
    corner: tuple[int, int]  # the first row and column that are kept


def resampled(held: Tensor, frames: Sequence[Frame], size: tuple[int, int], filter: str) -> Tensor:
    """The images that lie in `held`, resized and cropped to one height and width: uint8 [B 3 Y X]."""
    told = torch.tensor([(f.start, *f.steps, *f.size, *f.scaled, *f.corner) for f in frames])
    start, channel, down, right, high, wide, to_high, to_wide, top, left = told.to(held.device)[:, :, None].unbind(1)
    across, along = weights(wide, to_wide, left, size[1], filter), weights(high, to_high, top, size[0], filter)
    above = along.first[:, :1]  # the first row that is needed
    count = int((along.first[:, -1:] - above).max()) + along.count
    rows = (above + torch.arange(count, device=held.device)).clamp(max=high - 1)  # [B rows]
    base = start + channel * torch.arange(3, device=held.device)  # [B 3]
    base = (base[:, :, None] + (rows * down)[:, None])[..., None]  # [B 3 rows 1]
    middle = across.summed(lambda x: held[base + (x * right)[:, None, None]])  # [B 3 rows X]

    def line(y: Tensor) -> Tensor:
        return middle.gather(2, (y - above)[:, None, :, None].expand(-1, 3, -1, size[1]))

    return along.summed(line, down=True)


@dataclass(frozen=True, eq=False)
class Weights:
    """Along one axis: the first pixel that each pixel of the result is made of, and the weights of it and the next."""

    first: Tensor  # [B n]
    each: Tensor  # int32 [B n count]
    length: Tensor  # of the axis, [B 1]

    @property
    def count(self) -> int:
        return self.each.shape[2]

    def summed(self, pixels: Callable[[Tensor], Tensor], down: bool = False) -> Tensor:
        """The weighted sum of the pixels at places [B n], rounded as Pillow does."""
        total: Tensor | int = 1 << (PRECISION - 1)
        for tap in range(self.count):
            weight = self.each[:, None, :, tap, None] if down else self.each[:, None, None, :, tap]
            total = pixels((self.first + tap).clamp(max=self.length - 1)) * weight + total
        assert isinstance(total, Tensor)
        return (total >> PRECISION).clamp_(0, 255).to(torch.uint8)


def weights(length: Tensor, scaled: Tensor, skipped: Tensor, kept: int, filter: str) -> Weights:
    """Those of `kept` pixels after the first `skipped`, where an axis of some length is scaled to another."""
    scale = length.double() / scaled  # [B 1]
    wide = scale.clamp(min=1.0)
    reach = wide * REACH[filter]
    centre = (skipped + torch.arange(kept, device=length.device) + 0.5) * scale  # [B n]
    first = (centre - reach + 0.5).long().clamp(min=0)
    last = torch.minimum((centre + reach + 0.5).long(), length)
    taps = torch.arange(int((last - first).max()), device=length.device)
    place = first[..., None] + taps
    each = curve((place - centre[..., None] + 0.5) * (1 / wide)[..., None], filter) * (place < last[..., None])
    each = each / each.sum(2, keepdim=True) * (1 << PRECISION)
    return Weights(first, (each + each.sign() * 0.5).int(), length)


def curve(x: Tensor, filter: str) -> Tensor:
    """The filter at a distance: a triangle, or the cubic with a = −1/2."""
    x = x.abs()
    if filter == "bilinear":
        return (1 - x).clamp(min=0)
    near, far = ((1.5 * x) - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
