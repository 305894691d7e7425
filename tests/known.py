"""A small Vision Transformer whose true attribution is known."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitreous import Model

CLS = 8.0  # how much the read-out token weighs for itself


class Attend(nn.Module):
    """Every token reads the brightness of every token (times `share`), by weights that no image changes."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2, 2) for _ in range(3))
        for part, scale, shift in ((self.q, (0, 0), (0, 1)), (self.k, (0, 1), (0, 0)), (self.v, (share, 0), (0, 0))):
            part.weight.data, part.bias.data = torch.diag(torch.tensor(scale)).float(), torch.tensor(shift).float()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x)[:, None] for part in (self.q, self.k, self.v))  # [B 1 N 2]
        return x + F.scaled_dot_product_attention(q, k, v, scale=1.0)[:, 0]


class Known(nn.Module):
    """score = gain · Σ w_i b_i / (CLS + Σ w_i), b_i the brightness of patch i, w_i ≥ 0 its weight.

    The second class scores 0, so that the first's probability is σ(score). A token: (brightness, log of its weight).
    """

    def __init__(self, weights: Tensor, patch: int, gain: float) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 2, patch, patch)
        self.cut.weight.data.zero_()[0] = 1 / (3 * patch * patch)
        self.cut.bias.data.zero_()
        logs = torch.tensor([CLS, *weights.flatten().tolist()]).log().clamp_min(-30)
        self.places = nn.Parameter(torch.stack([torch.zeros_like(logs), logs], 1)[None])  # [1 N 2]
        self.blocks = nn.ModuleList([Attend(0), Attend(1)])
        self.head = nn.Linear(2, 2)
        self.head.weight.data = torch.tensor([[gain, 0.0], [0.0, 0.0]])
        self.head.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        x = torch.cat([x.new_zeros(len(x), 1, 2), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def known(weights: Tensor, patch: int = 8, gain: float = 4.0) -> Model:
    """A model that reads patches by these weights [h w]."""
    net = Known(weights, patch, gain).eval()
    return Model(net, preprocess=None, labels=["seen", "nothing"], name="known")


def truth(images: Tensor, weights: Tensor, gain: float = 4.0) -> Tensor:
    """What each patch adds to the score [B h w]: it falls by as much when the patch turns grey (zero)."""
    patch = images.shape[-1] // weights.shape[-1]
    return gain * weights * F.avg_pool2d(images.mean(1, keepdim=True), patch)[:, 0] / (CLS + weights.sum())
