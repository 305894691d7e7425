"""Relevance propagation in plain matrices: every contribution is formed, divided by their sum and given its share.

One image, its tokens [N D] as they enter the first block, all in float64; weights are read from the networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Linear = tuple[Tensor, Tensor]  # weight, bias
Norm = tuple[Tensor, Tensor, float]  # weight, bias, ε


@dataclass
class Block:
    """A pre-norm block."""

    norm1: Norm
    qkv: Linear  # rows: all of q, then of k, then of v
    out: Linear
    norm2: Norm
    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]
    heads: int = 2


@dataclass
class Plain:
    """Blocks, a last norm (or none) and a classifier (or none), read at one token."""

    blocks: list[Block]
    norm: Norm | None
    head: Linear | None
    token: int = 0


# -------------------------------------------------------------------------------------------- weights, by library


def linear_of(module: Any) -> Linear:
    return module.weight.detach(), module.bias.detach()


def norm_of(module: Any) -> Norm:
    return module.weight.detach(), module.bias.detach(), module.eps


def joined(*modules: Any) -> Linear:
    return torch.cat([m.weight for m in modules]).detach(), torch.cat([m.bias for m in modules]).detach()


def packed(attention: Any) -> Linear:
    return attention.in_proj_weight.detach(), attention.in_proj_bias.detach()


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def timm(net: Any) -> Plain:
    blocks = [
        Block(norm_of(b.norm1), linear_of(b.attn.qkv), linear_of(b.attn.proj), norm_of(b.norm2),
              linear_of(b.mlp.fc1), linear_of(b.mlp.fc2), F.gelu) for b in net.blocks
    ]  # fmt: skip
    return Plain(blocks, norm_of(net.norm), linear_of(net.head))


def torchvision(net: Any) -> Plain:
    blocks = [
        Block(norm_of(b.ln_1), packed(b.self_attention), linear_of(b.self_attention.out_proj), norm_of(b.ln_2),
              linear_of(b.mlp[0]), linear_of(b.mlp[3]), F.gelu) for b in net.encoder.layers
    ]  # fmt: skip
    return Plain(blocks, norm_of(net.encoder.ln), linear_of(net.heads.head))


def clip(net: Any) -> Plain:
    blocks = [
        Block(norm_of(b.layer_norm1), joined(b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj),
              linear_of(b.self_attn.out_proj), norm_of(b.layer_norm2), linear_of(b.mlp.fc1), linear_of(b.mlp.fc2),
              quick_gelu) for b in net.encoder.layers
    ]  # fmt: skip
    return Plain(blocks, norm_of(net.post_layernorm), None)


def hand_written(net: Any) -> Plain:
    blocks = [
        Block(norm_of(b.norm), linear_of(b.qkv), linear_of(b.out), norm_of(b.mlp[0]),
              linear_of(b.mlp[1]), linear_of(b.mlp[3]), F.gelu) for b in (net.first, net.second, net.third)
    ]  # fmt: skip
    return Plain(blocks, norm_of(net.norm), linear_of(net.head), token=-1)


def sequence(net: Any) -> Plain:
    blocks = [
        Block(norm_of(b.norm1), packed(b.self_attn), linear_of(b.self_attn.out_proj), norm_of(b.norm2),
              linear_of(b.linear1), linear_of(b.linear2), F.relu) for b in net.body.layers
    ]  # fmt: skip
    return Plain(blocks, None, linear_of(net.head))


READERS: dict[str, Callable[[Any], Plain]] = {
    "timm ViT": timm,
    "timm ViT unfused": timm,
    "torchvision ViT": torchvision,
    "HF CLIP vision sdpa": clip,
    "HF CLIP vision eager": clip,
    "hand-written": hand_written,
    "sequence first": sequence,
}


def read(name: str, net: nn.Module) -> Plain:
    return READERS[name](net)


# ------------------------------------------------------------------------------------------------------ the forward


def normed(x: Tensor, norm: Norm) -> Tensor:
    weight, bias, eps = norm
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def split(x: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: [H N d]."""
    weight, bias = block.qkv
    made = (x @ weight.T + bias).reshape(len(x), 3, block.heads, -1)
    q, k, v = made.permute(1, 2, 0, 3)
    return q, k, v


def merge(heads: Tensor) -> Tensor:
    """[H N d] to [N D]."""
    return heads.transpose(0, 1).flatten(1)


# ---------------------------------------------------------------------------------------------------------- the rules


def through_linear(x: Tensor, weight: Tensor, bias: Tensor, r: Tensor, gamma: float = 0.0) -> Tensor:
    """Each input's contribution to each output, as a share of that output; the bias keeps its own.

    Contributions of the same sign as the output count 1 + γ times.
    """
    parts, bias = x[:, None] * weight, bias.expand(len(x), -1)  # [N out in], [N out]
    sign = (parts.sum(-1) + bias).sign()
    parts = torch.where(parts.sign() == sign[..., None], (1 + gamma) * parts, parts)
    bias = torch.where(bias.sign() == sign, (1 + gamma) * bias, bias)
    return (parts / (parts.sum(-1) + bias)[..., None] * r[..., None]).sum(1)


def through_residual(a: Tensor, b: Tensor, r: Tensor, gamma: float = 0.0) -> tuple[Tensor, Tensor]:
    """a + b: an operand of the same sign as the sum counts 1 + γ times."""
    y = a + b
    one, other = (torch.where(z.sign() == y.sign(), (1 + gamma) * z, z) for z in (a, b))
    return r * one / (one + other), r * other / (one + other)


def through_norm(x: Tensor, norm: Norm, r: Tensor) -> Tensor:
    """A norm with a constant σ is a linear layer, another one for each token."""
    weight, bias, eps = norm
    width = x.shape[-1]
    sigma = (x.var(-1, correction=0) + eps).sqrt()
    centre = torch.eye(width).to(x) - 1 / width
    rows = [
        through_linear(x[i : i + 1], weight[:, None] * centre / sigma[i], bias, r[i : i + 1]) for i in range(len(x))
    ]
    return torch.cat(rows)


def through_product(a: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """z_ij = Σ_k a_ik·b_kj: each term gives half of its share to either factor."""
    terms = a[:, :, None] * b[None]  # [i k j]
    shares = terms / terms.sum(1, keepdim=True) * r[:, None] / 2
    return shares.sum(2), shares.sum(0)


def through_softmax(scores: Tensor, r: Tensor) -> Tensor:
    """Taylor: x·(R − s·ΣR)."""
    return scores * (r - scores.softmax(-1) * r.sum(-1, keepdim=True))


def through_attention(q: Tensor, k: Tensor, v: Tensor, r: Tensor, constant: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One head."""
    scores = q @ k.T / q.shape[-1] ** 0.5
    weights = scores.softmax(-1)
    if constant:
        terms = weights[:, :, None] * v[None]
        return torch.zeros_like(q), torch.zeros_like(k), (terms / terms.sum(1, keepdim=True) * r[:, None]).sum(0)
    r_weights, r_v = through_product(weights, v, r)
    r_q, r_k = through_product(q, k.T, through_softmax(scores, r_weights))
    return r_q, r_k.T, r_v


def relevance(
    plain: Plain, tokens: Tensor, unit: int, constant: bool, residual: float = 0.0, linear: float = 0.0
) -> Tensor:
    """Relevance of all tokens [N D] that enter the first block; `constant`: CP-LRP, else AttnLRP.

    `residual`: γ of ResLRP. `linear`: γ of the γ rule in linear layers.
    """
    if not plain.blocks:
        return from_head(plain, tokens, unit, linear)
    block, rest = plain.blocks[0], Plain(plain.blocks[1:], plain.norm, plain.head, plain.token)
    entering = normed(tokens, block.norm1)
    q, k, v = split(entering, block)
    read = merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)
    attended = read @ block.out[0].T + block.out[1]
    middle = tokens + attended
    hidden = normed(middle, block.norm2)
    inner = hidden @ block.up[0].T + block.up[1]
    active = block.act(inner)
    moved = active @ block.down[0].T + block.down[1]
    r = relevance(rest, middle + moved, unit, constant, residual, linear)
    r_middle, r_moved = through_residual(middle, moved, r, residual)
    r_inner = through_linear(active, *block.down, r_moved, linear)  # and through the activation: all of it
    r_middle = r_middle + through_norm(middle, block.norm2, through_linear(hidden, *block.up, r_inner, linear))
    r_tokens, r_attended = through_residual(tokens, attended, r_middle, residual)
    r_heads = through_linear(read, *block.out, r_attended, linear).unflatten(1, (block.heads, -1)).transpose(0, 1)
    found = [through_attention(*one, constant) for one in zip(q, k, v, r_heads)]
    r_qkv = torch.cat([merge(torch.stack(part)) for part in zip(*found)], 1)
    return r_tokens + through_norm(tokens, block.norm1, through_linear(entering, *block.qkv, r_qkv, linear))


def from_head(plain: Plain, tokens: Tensor, unit: int, gamma: float = 0.0) -> Tensor:
    """Relevance of the last block's output."""
    last = tokens[[plain.token]]
    final = last if plain.norm is None else normed(last, plain.norm)
    if plain.head is None:
        r = torch.zeros_like(final)
        r[0, unit] = final[0, unit]
    else:
        weight, bias = plain.head[0][[unit]], plain.head[1][[unit]]
        r = through_linear(final, weight, bias, final @ weight.T + bias, gamma)
    whole = torch.zeros_like(tokens)
    whole[[plain.token]] = r if plain.norm is None else through_norm(last, plain.norm, r)
    return whole
