"""The Libra gradient of a plain pre-norm ViT: autograd, with what is constant detached by hand.

One image, its tokens [N D] as they enter the first block; weights are read from the networks as in lrp.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oracles.lrp import Block, Norm, Plain
from torch import Tensor


@dataclass
class Passed:
    """A forward pass: the tokens before each block and behind the last, A of every block (a leaf) and the output."""

    streams: list[Tensor]
    attention: list[Tensor]
    output: Tensor


def norm(x: Tensor, given: Norm) -> Tensor:
    weight, bias, eps = given
    mean = x.mean(-1, keepdim=True)
    sigma = ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt().detach()
    return (x - mean) / sigma * weight + bias


def block(x: Tensor, given: Block) -> tuple[Tensor, Tensor]:
    n, width = x.shape
    q, k, v = (norm(x, given.norm1) @ given.qkv[0].mT + given.qkv[1]).view(n, 3, given.heads, -1).permute(1, 2, 0, 3)
    a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).detach().requires_grad_()  # [H N N]
    x = x + (a @ v).transpose(0, 1).reshape(n, width) @ given.out[0].mT + given.out[1]
    z = norm(x, given.norm2) @ given.up[0].mT + given.up[1]
    gate = (given.act(z) / z).detach()
    return x + (z * gate) @ given.down[0].mT + given.down[1], a


def classify(net: Plain, token: Tensor) -> Tensor:
    token = token if net.norm is None else norm(token, net.norm)
    return token if net.head is None else token @ net.head[0].mT + net.head[1]


def passed(net: Plain, tokens: Tensor) -> Passed:
    streams, attention = [tokens.detach().clone().requires_grad_()], []
    for one in net.blocks:
        x, a = block(streams[-1], one)
        streams.append(x)
        attention.append(a)
    return Passed(streams, attention, classify(net, streams[-1][net.token]))


def fullgrad(net: Plain, tokens: Tensor, unit: int) -> Tensor:
    """Σ_l Σ_c h_l ⊙ ∂y/∂h_l of every token."""
    run = passed(net, tokens)
    streams = run.streams[:-1]
    grads = torch.autograd.grad(run.output[unit], streams)
    return sum(((h * grad).sum(-1) for h, grad in zip(streams, grads)), torch.zeros(len(tokens)))


def attcat(net: Plain, tokens: Tensor, unit: int, leaving: bool, centred: list[int] | None = None) -> Tensor:
    """Σ_l ᾱ_l ⊙ Σ_c h ⊙ ∂y/∂h; `centred`: the patches whose mean is subtracted from h."""
    run = passed(net, tokens)
    streams = run.streams[1:] if leaving else run.streams[:-1]
    total = torch.zeros(len(tokens), dtype=tokens.dtype)
    for a, h, grad in zip(run.attention, streams, torch.autograd.grad(run.output[unit], streams)):
        less = h if centred is None else h - h[centred].mean(0)
        total += a.mean((0, 1)) * (less * grad).sum(-1)
    return total


def weights_grads(net: Plain, tokens: Tensor, unit: int) -> list[tuple[Tensor, Tensor]]:
    """A and ∂y/∂A of every block."""
    run = passed(net, tokens)
    return list(zip(run.attention, torch.autograd.grad(run.output[unit], run.attention)))


def gae(net: Plain, tokens: Tensor, unit: int) -> Tensor:
    row = torch.eye(len(tokens), dtype=tokens.dtype)
    for a, grad in weights_grads(net, tokens, unit):
        row = row + (a * grad).clamp_min(0).mean(0) @ row
    return row[net.token]


def grad_rollout(net: Plain, tokens: Tensor, unit: int) -> Tensor:
    eye = torch.eye(len(tokens), dtype=tokens.dtype)
    rolled = eye
    for a, grad in weights_grads(net, tokens, unit):
        step = ((a * grad).mean(0).clamp_min(0) + eye) / 2
        rolled = step / step.sum(-1, keepdim=True) @ rolled
    return rolled[net.token]


def legrad(net: Plain, tokens: Tensor, unit: int) -> Tensor:
    """The mean over blocks of what attention would raise the score of the mean token behind each."""
    x, maps = tokens, []
    for one in net.blocks:
        x, a = block(x.detach(), one)
        (grad,) = torch.autograd.grad(classify(net, x.mean(0))[unit], a)
        maps.append(grad.clamp_min(0).mean((0, 1)))
    return torch.stack(maps).mean(0)
