"""Norm-based attention: the vector that token i takes from token j is what it loses without j's value."""

from __future__ import annotations

from typing import Any

import torch
from oracles.value_zeroing import run
from torch import Tensor, nn

from vitreous import Layout


def taken(forward: Any, image: Tensor, block: nn.Module, layout: Layout, layer: int, projects: bool) -> Tensor:
    """Σ_h A^h_ij W_O^h v_j^h of every i and j: [N N D], by difference."""
    outs = []
    for token in [None, *range(layout.tokens)]:
        mode = run(forward, image, block, layout, layer, token)[2]
        out = mode.projected if projects else mode.mixed
        outs.append(out.reshape(layout.tokens, -1) if projects else out.transpose(0, 1).flatten(1))  # [N D]
    return torch.stack([outs[0] - out for out in outs[1:]], 1)


def norms(vectors: Tensor, entered: Tensor | None) -> Tensor:
    """S [N N]; `entered`: the tokens x [N D], which are added to what each takes from itself."""
    vectors = vectors.clone()
    if entered is not None:
        for i, x in enumerate(entered):
            vectors[i, i] += x
    return vectors.norm(dim=-1)


def rolled(matrices: list[Tensor], read: Tensor, identity: bool) -> Tensor:
    """ρᵀ of the product of rows that sum to one, half of each the token itself (`identity`)."""
    eye = product = torch.eye(len(read), dtype=torch.float64)
    for s in matrices:
        s = s / s.sum(1, keepdim=True)
        product = ((s + eye) / 2 if identity else s) @ product
    return read.double() @ product
