"""Penalties on an image: distance from grey, roughness, and steps at patch borders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import sum_of
from vitreous.types import Images, Scores

Patch = tuple[int, int]  # pixels down and across
LEAST = 1e-8  # under a root or a fraction


def distance_from_grey(images: Images) -> Scores:
    """½ Σ (I − ½)²."""
    return (images - 0.5).square().sum((1, 2, 3)) / 2


def total_variation(images: Images) -> Scores:
    """Σ √(Δ_y² + Δ_x²), the length of the gradient at every pixel of every channel."""
    here = images[:, :, :-1, :-1]
    down, across = images[:, :, 1:, :-1] - here, images[:, :, :-1, 1:] - here
    return (down.square() + across.square() + LEAST).sqrt().sum((1, 2, 3))


def discontinuity(images: Images, patch: Patch) -> Scores:
    """What the squared steps across each border line have beyond those inside the patches on both sides of it.

    Σ_lines n/2 · max(0, ⟨Δ²⟩_line − ⟨Δ²⟩_inside)        n: steps across a line; the inside is taken as it is
    """
    ways = [(x.shape[1] * x.shape[2] / 2, *energies(x, side)) for x, side in both_ways(images, patch)]
    return sum_of(n * beyond(lines, inside) for n, lines, inside in ways)


def beyond(lines: Float[Tensor, "U e"], inside: Float[Tensor, "U w"]) -> Scores:
    level = (inside[:, 1:] + inside[:, :-1]).detach() / 2
    return (lines - level).clamp_min(0).sum(1)


def border_ratio(images: Images, patch: Patch) -> Scores:
    """⟨Δ²⟩ of neighbouring pixels of two patches over ⟨Δ²⟩ inside patches; 1: no checkerboard, NaN: a single patch."""
    ways = both_ways(images, patch)
    lines, inside = zip(*(energies(x, side) for x, side in ways))
    across = [x.shape[2] for x, _ in ways]  # steps over one line
    within = [x.shape[2] * (side - 1) for x, side in ways]  # and inside one column of patches
    return weighted_mean(lines, across) / weighted_mean(inside, within).clamp_min(LEAST)


def weighted_mean(parts: Sequence[Float[Tensor, "U _"]], weights: Sequence[int]) -> Scores:
    total = sum_of(weight * part.sum(1) for weight, part in zip(weights, parts))
    count = sum(weight * part.shape[1] for weight, part in zip(weights, parts))
    return total / count if count else total * torch.nan


def both_ways(images: Images, patch: Patch) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """The images with the width of a patch, and their transposes with its height: borders always stand upright."""
    return (images, patch[1]), (images.mT, patch[0])


def energies(images: Images, side: int) -> tuple[Float[Tensor, "U e"], Float[Tensor, "U w"]]:
    """⟨Δ²⟩ of neighbours in a row: over each line between two columns of patches, and inside each column."""
    count = images.shape[3] // side
    whole = images[..., : count * side]
    steps = whole.diff(dim=3, append=whole[..., -1:]).square().mean((1, 2))  # [U X]
    columns = steps.reshape(len(images), count, side)
    return columns[:, :-1, -1], columns[:, :, :-1].mean(2)
