"""Chefer's relevance (CVPR 2021) step by step: positive and negative parts apart, one image, whole matrices."""

from __future__ import annotations

import torch
from oracles.lrp import Block, Plain, merge, normed, split
from torch import Tensor


def divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b == 0, 0, a / (b + 1e-9))


def through_linear(x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
    """Only contributions that raise an output count: of like signs."""
    like = x.clamp_min(0) @ weight.clamp_min(0).T + x.clamp_max(0) @ weight.clamp_max(0).T
    s = divide(r, like)
    return x.clamp_min(0) * (s @ weight.clamp_min(0)) + x.clamp_max(0) * (s @ weight.clamp_max(0))


def through_sum(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    s = divide(r, a + b)
    a, b = a * s, b * s
    size = a.sum().abs() + b.sum().abs()
    a_share, b_share = (divide(t.sum().abs(), size) * r.sum() for t in (a, b))
    return a * divide(a_share, a.sum()), b * divide(b_share, b.sum())


def through_product(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    s = divide(r, a @ b)
    return a * (s @ b.mT) / 2, b * (a.mT @ s) / 2


def through_fork(x: Tensor, *rs: Tensor) -> Tensor:
    return x * sum(divide(r, x) for r in rs)


def attribution(plain: Plain, tokens: Tensor, unit: int, start_layer: int = 0) -> Tensor:
    """The read-out row of Π(I + Ā), [N]."""
    steps: list[Tensor] = []
    follow(plain.blocks, plain, tokens.requires_grad_(), unit, steps)
    product = torch.eye(len(tokens)).to(tokens)
    for step in steps[::-1][start_layer:]:
        product = product + step @ product
    return product[plain.token].detach()


def follow(blocks: list[Block], plain: Plain, tokens: Tensor, unit: int, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Relevance of what enters these blocks, and y; Ā of every block is added to `steps`, the last block's first."""
    if not blocks:
        return from_head(plain, tokens, unit)
    block = blocks[0]
    entering = normed(tokens, block.norm1)
    q, k, v = split(entering, block)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    heads = weights @ v
    read = merge(heads)
    attended = read @ block.out[0].T + block.out[1]
    middle = tokens + attended
    hidden = normed(middle, block.norm2)
    active = block.act(hidden @ block.up[0].T + block.up[1])
    moved = active @ block.down[0].T + block.down[1]
    r, y = follow(blocks[1:], plain, middle + moved, unit, steps)
    r_middle, r_moved = through_sum(middle, moved, r)
    r_hidden = through_linear(hidden, block.up[0], through_linear(active, block.down[0], r_moved))
    r_tokens, r_attended = through_sum(tokens, attended, through_fork(middle, r_middle, r_hidden))
    r_heads = through_linear(read, block.out[0], r_attended).unflatten(1, (block.heads, -1)).transpose(0, 1)
    r_weights, r_v = through_product(weights, v, r_heads)
    (grad,) = torch.autograd.grad(y, weights, retain_graph=True)
    steps.append((grad * r_weights).clamp_min(0).mean(0))
    r_q, r_k = through_product(q, k.mT, r_weights)
    r_qkv = torch.cat([merge(r_q), merge(r_k.mT), merge(r_v)], 1)
    return through_fork(tokens, r_tokens, through_linear(entering, block.qkv[0], r_qkv)), y


def from_head(plain: Plain, tokens: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    last = tokens[[plain.token]]
    final = last if plain.norm is None else normed(last, plain.norm)
    if plain.head is None:
        y, r = final[0, unit], torch.zeros_like(final)
        r[0, unit] = 1
    else:
        weight = plain.head[0][[unit]]
        y, r = (final @ weight.T + plain.head[1][unit])[0, 0], through_linear(final, weight, torch.ones(1, 1).to(final))
    whole = torch.zeros_like(tokens)
    whole[[plain.token]] = r
    return whole, y
