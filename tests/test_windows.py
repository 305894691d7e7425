"""Attention in windows, over pooled keys and in stages, against dense attention of the same weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import windowed
from torch import Tensor, nn

import vitreous

# ------------------------------------------------------------------------- Swin with dense attention, written plainly


class Dense:
    """Replaces `_attn` of a Swin block: attention over all tokens and paddings, −∞ outside the windows."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.a = torch.empty(0)  # [B H N N], of tokens only
        block._attn = self

    def __call__(self, x: Tensor) -> Tensor:
        block, attn = self.block, self.block.attn
        (b, height, width, c), (side, _), (shift, _) = x.shape, block.window_size, block.shift_size
        count, heads = height * width, attn.num_heads
        ids = torch.roll(torch.arange(count).view(height, width), (-shift, -shift), (0, 1))
        down, across = -height % side, -width % side
        whole = torch.full((height + down, width + across), -1)
        whole[:height, :width] = ids
        whole[whole < 0] = count + torch.arange(int((whole < 0).sum()))
        windows = [
            whole[i : i + side, j : j + side].flatten()
            for i in range(0, height + down, side)
            for j in range(0, width + across, side)
        ]
        tokens = F.pad(x.flatten(1, 2), (0, 0, 0, whole.numel() - count))
        q, k, v = attn.qkv(tokens).reshape(b, -1, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        bias = x.new_full((heads, whole.numel(), whole.numel()), -torch.inf)
        own = attn._get_rel_pos_bias()[0]
        for number, window in enumerate(windows):
            mask = 0 if block.attn_mask is None else block.attn_mask[number]
            bias[:, window[:, None], window] = own + mask
        a = (q @ k.mT * attn.scale + bias).softmax(-1)
        here = a[:, :, :count]
        self.a = here[..., :count]
        if self.a.requires_grad:
            self.a.retain_grad()
        padded = here[..., count:]
        out = self.a @ v[:, :, :count] + padded @ v[:, :, count:]
        return attn.proj(out.transpose(1, 2).flatten(2)).view(b, height, width, c)


def dense_swin(net: nn.Module) -> tuple[nn.Module, list[Dense]]:
    twin: Any = copy.deepcopy(net)
    return twin, [Dense(block) for stage in twin.layers for block in stage.blocks]


def spread(fine: int, coarse: int) -> Tensor:
    """[coarse fine]: each cell of a coarse grid is shared by the (up to four) cells that were merged into it."""
    (h, w), (big_h, big_w) = fine, coarse  # type: ignore[misc]
    found = torch.zeros(big_h * big_w, h * w, dtype=torch.float64)
    for i in range(h):
        for j in range(w):
            found[i // 2 * big_w + j // 2, i * w + j] = 1
    return found / found.sum(1, keepdim=True)


def back(grids: list[tuple[int, int]], layers: list[Tensor]) -> Tensor:
    """ρᵀ Π layers, with the merges between them; a layer is [B N N]."""
    row = torch.full((1, grids[-1][0] * grids[-1][1]), 1.0, dtype=torch.float64)
    row = (row / row.numel())[:, None]
    for number in reversed(range(len(layers))):
        if number + 1 < len(layers) and grids[number + 1] != grids[number]:
            row = row @ spread(grids[number], grids[number + 1])  # type: ignore[arg-type]
        row = row @ layers[number]
    return row[:, 0]


def normalised(layer: Tensor) -> Tensor:
    return layer / layer.sum(-1, keepdim=True)


def swin_grids(name: str) -> list[tuple[int, int]]:
    return [(18, 22)] * 2 + [(9, 11)] * 2 if "padding" in name else [(16, 16)] * 2 + [(8, 8)] * 2


SWINS = ["Swin", "Swin with padding"]


@pytest.mark.parametrize("name", SWINS)
def test_rollout_in_windows_is_that_of_dense_masked_attention(name: str) -> None:
    model, images = windowed.model(name, torch.float64)
    twin, dense = dense_swin(model.module)
    with torch.no_grad():
        assert torch.allclose(twin(images), model.module(images), atol=1e-9)
    found = vitreous.explain(model, images, "rollout")
    layers = [normalised(torch.eye(one.a.shape[-1]) + one.a.mean(1)) for one in dense]
    grids = swin_grids(name)
    expected = back(grids, layers).reshape(-1, *grids[0])
    assert (found.map - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SWINS)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_attention_in_windows_is_that_of_dense_masked_attention(name: str, layer: int) -> None:
    model, images = windowed.model(name, torch.float64)
    twin, dense = dense_swin(model.module)
    with torch.no_grad():
        twin(images)
    a, grid = dense[layer].a, swin_grids(name)[layer]
    found = vitreous.explain(model, images, "attention", layer=layer, heads=1, query=(5, 7))
    cell = (5 // 2) * grid[1] + 7 // 2 if layer > 1 else 5 * grid[1] + 7
    expected = a[:, 1, cell]
    if layer > 1:
        expected = expected @ spread(swin_grids(name)[0], grid)  # type: ignore[arg-type]
    expected = expected.reshape(-1, *swin_grids(name)[0])
    assert (found.map - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SWINS)
def test_gae_in_windows_is_that_of_dense_masked_attention(name: str) -> None:
    model, images = windowed.model(name, torch.float64)
    twin, dense = dense_swin(model.module)
    twin(images)[:, 3].sum().backward()
    grids = swin_grids(name)
    found = vitreous.explain(model, images, "gae", 3)
    products = [(one.a * one.a.grad).clamp_min(0).mean(1) for one in dense if one.a.grad is not None]
    assert len(products) == 4
    whole = back(grids, [torch.eye(one.shape[-1]) + one for one in products])
    empty = back(grids, [torch.eye(one.shape[-1], dtype=one.dtype)[None] for one in products])
    expected = (whole - empty).detach().reshape(-1, *grids[0])
    assert (found.map - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SWINS)
def test_grad_rollout_in_windows_is_that_of_dense_masked_attention(name: str) -> None:
    model, images = windowed.model(name, torch.float64)
    twin, dense = dense_swin(model.module)
    twin(images)[:, 3].sum().backward()
    grids = swin_grids(name)
    found = vitreous.explain(model, images, "grad_rollout", 3)
    layers = []
    for one in dense:
        assert one.a.grad is not None
        layers.append(normalised(torch.eye(one.a.shape[-1]) + (one.a * one.a.grad).mean(1).clamp_min(0)))
    expected = back(grids, layers).detach().reshape(-1, *grids[0])
    assert (found.map - expected).abs().max() <= 1e-5 * expected.abs().max()
