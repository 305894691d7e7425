"""How a map is spread over its places, as numbers."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

Values = Float[Tensor, "B n"]
Numbers = Float[Tensor, "B"]


def entropy(values: Values) -> Numbers:
    """−Σ p ln p / ln n, p = |s| / Σ|s|; 1 where s is zero everywhere."""
    size = values.abs()
    total = size.sum(1, keepdim=True)
    share = torch.where(total > 0, size / total, 1 / size.shape[1])
    spread: Tensor = torch.special.entr(share).sum(1)
    return spread / max(math.log(size.shape[1]), 1e-12)


def gini(values: Values) -> Numbers:
    """Σᵢ (2i − n − 1) · |s|₍ᵢ₎ / (n Σ|s|), |s|₍ᵢ₎ rising; 0 where s is zero everywhere."""
    size = values.abs().sort(1).values
    count, total = size.shape[1], size.sum(1)
    place = 2 * torch.arange(1, count + 1, device=size.device) - count - 1
    return torch.where(total > 0, (place * size).sum(1) / (count * total), 0)
