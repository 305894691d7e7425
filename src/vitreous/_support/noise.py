"""Random numbers of each image, which are the same on every device: counter-based normal ones, and their keys."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

STRIDE, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of SplitMix64, as signed
LOW = 0xFFFFFFFF


def normal(keys: Int[Tensor, "B"], count: int, turn: int = 0) -> Float[Tensor, "B {count}"]:
    """Draw `count` standard normal numbers for each key; each `turn` gives independent ones.

    √(−2 ln u)·cos 2πv and ·sin 2πv (Box–Muller transform); u and v are the halves of SplitMix64's output
    """
    counter = torch.arange((count + 1) // 2, device=keys.device, dtype=torch.int64)
    start = mixed(mixed(keys) + turn)
    bits = mixed(start[:, None] + counter * STRIDE)
    length = uniform(bits >> 32 & LOW).log_().mul_(-2).sqrt_()
    angle = uniform(bits & LOW).mul_(2 * math.pi)
    return torch.cat([length * angle.cos(), length * angle.sin()], 1)[:, :count]


def mixed(z: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The finaliser of SplitMix64; the masks remove the sign bits that a shift of signed integers brings in."""
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * FIRST
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * SECOND
    return z ^ (z >> 31 & (1 << 33) - 1)


def uniform(bits: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Map 32 bits to a number in (0, 1]."""
    return (bits.float() + 0.5) * 2.0**-32


def image_keys(images: Float[Tensor, "B *image"], seed: int) -> Int[Tensor, "B"]:
    """A random key per image that depends on the image and the seed, not on batch, device or precision."""
    coarse = images.to(torch.bfloat16).contiguous().view(torch.int16).flatten(1)  # the same for every precision
    odd = torch.arange(1, 2 * coarse.shape[1], 2, device=coarse.device) * 0x9E3779B1
    marks = [(bits.long() * odd).sum() for bits in coarse]  # whole numbers: exact in any order, on any device
    return (torch.stack(marks) ^ (seed * 0xC2B2AE35) % 2**63) & (2**63 - 1)
