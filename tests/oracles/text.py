"""grad_eclip, clip_surgery and maskclip, written plainly for the image tower of an open_clip network, one image."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def tokens(visual: Any, image: Tensor) -> list[Tensor]:
    """The tokens [N D] that enter each block, and those that leave the last."""
    found: list[Tensor] = []
    hooks = [
        b.register_forward_pre_hook(lambda m, args: found.append(args[0][0])) for b in visual.transformer.resblocks
    ]
    hooks.append(visual.transformer.register_forward_hook(lambda m, args, out: found.append(out[0])))
    visual(image[None])
    for hook in hooks:
        hook.remove()
    return found


def qkv(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every token, [N D] each, all heads side by side."""
    q, k, v = F.linear(block.ln_1(x), block.attn.in_proj_weight, block.attn.in_proj_bias).chunk(3, -1)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Head by head, [N D]."""
    parts = []
    for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1)):
        parts.append((a @ b.T / a.shape[-1] ** 0.5).softmax(-1) @ c)
    return torch.cat(parts, -1)


def after(visual: Any, block: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """The embedding of every token when the block's attention gave `mixed`, [N E]."""
    x = x + block.attn.out_proj(mixed)
    x = x + block.mlp(block.ln_2(x))
    return visual.ln_post(x) @ visual.proj


def eclip(visual: Any, image: Tensor, text: Tensor, heads: int, ksim: str) -> Tensor:
    block = visual.transformer.resblocks[-1]
    x = tokens(visual, image)[-2]
    q, k, v = qkv(block, x)
    mixed = attend(q, k, v, heads).detach().requires_grad_()
    with torch.enable_grad():
        score = F.cosine_similarity(after(visual, block, x, mixed)[0], text, dim=0)
    (grad,) = torch.autograd.grad(score, mixed)
    if ksim == "proj":
        q, k = block.attn.out_proj(q), block.attn.out_proj(k)
    close = F.cosine_similarity(q[:1], k[1:])
    close = torch.ones_like(close) if ksim == "none" else (close - close.min()) / (close.max() - close.min())
    return (close * (v[1:] @ grad[0])).clamp_min(0)


def maskclip(visual: Any, image: Tensor, text: Tensor, ksim: bool) -> Tensor:
    block = visual.transformer.resblocks[-1]
    x = tokens(visual, image)[-2]
    _, k, v = qkv(block, x)
    found = F.cosine_similarity(after(visual, block, x, v)[1:], text[None])
    k = block.attn.out_proj(k)
    return found * F.cosine_similarity(k[:1], k[1:]) if ksim else found


def surgery(visual: Any, image: Tensor, start: int) -> Tensor:
    """Unit embeddings of every token, CLS first; its own is the model's."""
    every, heads = tokens(visual, image), visual.transformer.resblocks[0].attn.num_heads
    x = every[start]
    for block, own in zip(visual.transformer.resblocks[start:], every[start:]):
        v = qkv(block, own)[2]
        x = x + block.attn.out_proj(attend(v, v, v, heads))
    x = torch.cat([every[-1][:1], x[1:]])
    return F.normalize(visual.ln_post(x) @ visual.proj, dim=-1)


def among(features: Tensor, texts: Tensor) -> Tensor:
    """Feature surgery: the map of every text, [T P]."""
    weights = (2 * features[0] @ texts.T).softmax(-1)
    scores = (features[1:] @ texts.T) * (weights / weights.mean())
    return (scores - scores.mean(-1, keepdim=True)).T
