"""Beyond Intuition on a timm network: whole matrices of one image, with autograd of the attention that timm forms."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


class Seen:
    """One forward pass: y, and of each block the tokens x [N D], the values v [N D] and A [H N N]."""

    def __init__(self, net: nn.Module, image: Tensor, target: int) -> None:
        self.x: list[Tensor] = []
        self.v: list[Tensor] = []
        self.a: list[Tensor] = []
        with ExitStack() as stack, torch.enable_grad():
            for block in net.blocks:
                block.attn.fused_attn = False
                for hook in (
                    block.register_forward_pre_hook(lambda _, args: self.x.append(args[0][0])),
                    block.attn.qkv.register_forward_hook(lambda _, args, out: self.v.append(out[0].chunk(3, -1)[2])),
                    block.attn.attn_drop.register_forward_hook(self.keep),
                ):
                    stack.callback(hook.remove)
            self.y = net(image[None].clone().requires_grad_())[0, target]
        self.g = [grad[0] for grad in torch.autograd.grad(self.y, self.a)]

    def keep(self, module: Any, args: Any, out: Tensor) -> None:
        self.a.append(out)


def explain(net: nn.Module, image: Tensor, target: int, read: Tensor, variant: str, start: int, steps: int) -> Tensor:
    """ρᵀ(W ⊙ |R|), one value for each token."""
    scaled = [Seen(net, alpha * image, target).g[-1] for alpha in torch.linspace(0, 1, steps, dtype=image.dtype)]
    weight = torch.stack(scaled).mean(0).relu().mean(0)
    seen = Seen(net, image, target)
    r = torch.eye(len(read), dtype=image.dtype)
    for number, block in enumerate(net.blocks):
        if number < start - 1:
            continue
        a = seen.a[number][0].detach()
        if variant == "token":
            moved = (seen.v[number] @ block.attn.proj.weight.T).norm(dim=-1) / seen.x[number].norm(dim=-1)
            factor = a.mean(0) @ torch.diag(moved)
        else:
            sizes = torch.stack([(one.T @ g).abs().mean() for one, g in zip(a, seen.g[number])])
            factor = sum(share * one for share, one in zip(sizes / sizes.sum(), a))
        r = r + factor @ r
    return (read @ (weight * r.abs())).detach()
