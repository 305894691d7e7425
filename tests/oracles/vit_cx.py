"""ViT-CX step by step: large maps, clusters by hand, one run at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def saliency(
    run: Callable[[Tensor], Tensor], image: Tensor, features: Tensor, noise: Tensor, threshold: float
) -> tuple[Tensor, list[set[int]]]:
    """One image [1 3 Y X] and its feature maps [D h w]: a map [Y X] and which channels make each mask."""
    large = F.interpolate(features[None].double(), tuple(image.shape[2:]), mode="bilinear", antialias=True)[0]
    single = torch.stack([stretched(one) for one in large])
    groups = complete_linkage(single.flatten(1), threshold)
    masks = [stretched(sum(single[i] for i in sorted(group))) for group in groups]
    whole, total, weight = float(run(image)), torch.zeros_like(large[0]), torch.zeros_like(large[0])
    for mask in masks:
        m = mask.to(image)
        score = float(run(image * m + noise * (1 - m))) - float(run(image + noise * (1 - m))) + whole
        total, weight = total + score * mask, weight + mask
    return total / weight / len(masks), groups


def stretched(one: Tensor) -> Tensor:
    return (one - one.min()) / (one.max() - one.min())


def complete_linkage(vectors: Tensor, threshold: float) -> list[set[int]]:
    """Join the two nearest groups until none are nearer than the threshold; groups are as far as their farthest two."""
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    far = 1 - unit @ unit.T
    groups = [{i} for i in range(len(vectors))]
    while len(groups) > 1:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i)]
        gap, i, j = min((max(float(far[a, b]) for a in groups[i] for b in groups[j]), i, j) for i, j in pairs)
        if gap >= threshold:
            break
        groups[j] |= groups.pop(i)
    return groups
