"""Attention in windows, over pooled keys and in stages, against dense attention of the same weights."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import windowed
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Trace
from vitreous.errors import Unsupported

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
counting, quick = (importlib.import_module(name) for name in ("counting", "quick"))

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


def spread(fine: tuple[int, int], coarse: tuple[int, int]) -> Tensor:
    """[coarse fine]: each cell of a coarse grid is shared by the (up to four) cells that were merged into it."""
    (h, w), (big_h, big_w) = fine, coarse
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
            row = row @ spread(grids[number], grids[number + 1])
        row = row @ layers[number]
    return row[:, 0]


def normalised(layer: Tensor) -> Tensor:
    return layer / layer.sum(-1, keepdim=True)


def swin_grids(name: str) -> list[tuple[int, int]]:
    return [(18, 22)] * 2 + [(9, 11)] * 2 if "padding" in name else [(16, 16)] * 2 + [(8, 8)] * 2


SWINS = [pytest.param("Swin", marks=[pytest.mark.slow]), "Swin with padding"]


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
@pytest.mark.parametrize("layer", [1, *(pytest.param(one, marks=[pytest.mark.slow]) for one in (0, 3))])
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
        expected = expected @ spread(swin_grids(name)[0], grid)
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


# ----------------------------------------------------------------------------------------------------- every family

QUICK = ("Swin with padding",)
EVERY = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in windowed.STAGED]
SLOW = [pytest.param(name, marks=[pytest.mark.slow]) for name in windowed.STAGED]
NO_PROJECTION = ("MViTv2", "MViTv2 with CLS", "LeViT")  # something stands between attention and projection
NO_BLOCKS = ("MaxViT", "Twins", "LeViT", "HF PVT", "HF PVTv2")  # no module returns the tokens after each layer
METHODS_HERE = ("attention", "rollout", "grad_rollout", "gae", "norm_attention", "legrad")


def made(name: str, method: str, images: Tensor, **options: Any) -> Tensor:
    target = 1 if METHODS[method].targeted else None
    return vitreous.explain(windowed.kept(name)[0], images, method, target, **options).map


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("method", METHODS_HERE)
def test_maps_lie_on_the_finest_grid_and_do_not_depend_on_the_batch(name: str, method: str) -> None:
    model, images = windowed.kept(name)
    if (method == "norm_attention" and name in NO_PROJECTION) or (method == "legrad" and name in NO_BLOCKS):
        with pytest.raises(Unsupported, match="needs"):
            made(name, method, images)
        return
    whole, alone = made(name, method, images), made(name, method, images[1:])
    assert whole.shape == (2, *model.layout_at(tuple(images.shape[-2:])).grid)
    assert (whole[1] - alone[0]).abs().max() <= 1e-5 * whole.abs().max()
    assert whole.flatten(1).std(1).min() > 0


@pytest.mark.parametrize("name", EVERY)
def test_every_layer_reproduces_its_output_in_the_arranged_axes(name: str) -> None:
    model, images = windowed.kept(name)
    trace = Trace(model, images)
    for layer, stage in zip(trace.attention, trace.layout.stages, strict=True):
        layer.verify()
        assert layer.shape[0] == 2 * stage.windows


@pytest.mark.parametrize("name", EVERY)
def test_a_patch_that_changes_moves_its_own_cell(name: str) -> None:
    """The queries, keys and values of a patch's own slot in the first layer change most, wherever it is."""
    model, images = windowed.kept(name)
    size = (images.shape[-2], images.shape[-1])
    layout = model.layout_at(size)
    stage, (h, w) = layout.stages[0], layout.grid
    found = []
    for row, column in ((0, 4), (4, 0), (h // 8 * 4, w // 8 * 4)):
        changed = images.clone()
        changed[(slice(None), slice(None), *layout.rectangle(row, column))] += 1
        pair = [Trace(model, x).attention[0] for x in (images, changed)]
        values = [stage_values(one, stage) for one in pair]
        moved = stage.keys.scatter((values[1] - values[0]).norm(dim=-1))[:, stage.special :]
        found.append((divmod(int(moved.sum(0).argmax()), w), (row, column)))
    pooled = int(stage.keys.places_of_slot.max())  # a pooled key moves all of its patches alike
    for (y, x), (row, column) in found:
        assert max(abs(y - row), abs(x - column)) < (2 if pooled == 1 else pooled**0.5 + 1)


def stage_values(layer: Any, stage: Any) -> Tensor:
    return layer.v.transpose(1, 2).flatten(2)  # type: ignore[no-any-return]  # [B·W m H·d]


def test_cells_that_are_cut_out_move_exactly_their_own() -> None:
    model, images = windowed.kept("Swin with padding")
    layout = model.layout_at((36, 44))
    stage = layout.stages[1]  # shifted and padded
    changed = images.clone()
    changed[(slice(None), slice(None), *layout.rectangle(17, 20))] += 1
    rows = [stage_values(Trace(model, x).attention[0], stage) for x in (images, changed)]
    moved = layout.stages[0].keys.scatter((rows[1] - rows[0]).norm(dim=-1))
    assert moved[0].nonzero().flatten().tolist() == [17 * 22 + 20]


@pytest.mark.parametrize("name", SLOW)
def test_options_that_work_within_windows(name: str) -> None:
    _, images = windowed.kept(name)
    plain = made(name, "rollout", images)
    for options in ({"heads": "max"}, {"heads": "min"}, {"discard": 0.5}, {"residual": 0.1}):
        other = made(name, "rollout", images, **options)
        assert other.isfinite().all() and (other - plain).abs().max() > 0
    assert (
        made(name, "rollout", images, heads="max", discard=1e-9) - made(name, "rollout", images, heads="max")
    ).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["HF Swin", "HF Swinv2", "HF PVT", "HF PVTv2", "HF SegFormer", "HF Hiera"])
@pytest.mark.slow
def test_weights_are_those_that_transformers_returns(kind: str) -> None:
    net, size = windowed.network(kind)
    net.set_attn_implementation("eager")  # type: ignore[operator]
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        told = net(images, output_attentions=True).attentions
    if not told:
        pytest.skip("this class returns none")
    trace = Trace(vitreous.Model(net, name=kind), images)
    given = [one for one in told if one is not None]
    last, theirs = trace.attention[-1].weights, given[-1]
    theirs = theirs if isinstance(theirs, Tensor) else theirs[-1]
    assert (theirs.reshape(last.shape) - last).abs().max() < 1e-5


def test_what_needs_all_tokens_is_refused_with_what_works() -> None:
    model, images = windowed.kept("Swin with padding")
    refused = [one for one in METHODS.values() if one.attention and not one.stages]
    assert {"value_zeroing", "attention_flow", "token_ablation", "transformer_attribution"} <= {m.name for m in refused}
    for one in refused:
        with pytest.raises(Unsupported, match=rf"{one.name} needs attention between all tokens; .*Try attention, "):
            vitreous.explain(model, images, one.name, 1 if one.targeted else None)
    with pytest.raises(Unsupported, match="norm_attention with residual needs attention between all tokens"):
        vitreous.explain(model, images, "norm_attention", residual=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "limit"), [("attention", 1.1), ("rollout", 1.3), ("grad_rollout", 2.6), ("gae", 2.6)]
)
def test_cost_on_swin_tiny(method: str, limit: float) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = vitreous.Model(timm.create_model("swin_tiny_patch4_window7_224").eval(), name="swin")
    image = torch.randn(1, 3, 224, 224)
    target = 1 if METHODS[method].targeted else None
    vitreous.explain(model, image, method, target)
    with quick.counted_runs() as runs, counting.Flops() as counter:
        vitreous.explain(model, image, method, target)
    assert len(runs) == 1
    assert counter.total / quick.forward(model, image) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gae", "grad_rollout"])
def test_several_targets_at_once_are_those_one_by_one(method: str) -> None:
    model, images = windowed.kept("Swin with padding")
    together = vitreous.explain_targets(model, images, method, [0, 1, 3])
    for target, found in zip([0, 1, 3], together, strict=True):
        alone = vitreous.explain(model, images, method, target).map
        assert (found.map - alone).abs().max() <= 1e-5 * alone.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Swin with padding", "Hiera", "HF Swin"])
def test_half_precision_gives_nearly_the_same(name: str) -> None:
    single, images = windowed.model(name)
    half = vitreous.Model(windowed.network(name, torch.bfloat16)[0], name="half")
    wide, narrow = (vitreous.explain(one, x, "rollout").map for one, x in ((single, images), (half, images.bfloat16())))
    assert [stage.grid for stage in half.layout_at(tuple(images.shape[-2:])).stages]
    assert (wide - narrow).abs().max() <= 0.2 * wide.abs().max()


@pytest.mark.slow
def test_norms_that_start_at_zero_hide_no_layer() -> None:
    torch.manual_seed(0)
    net, size = windowed.swin_v2()
    model = vitreous.Model(net.eval(), name="fresh")
    assert [stage.grid for stage in model.layout_at(size).stages] == [(16, 16)] * 2 + [(8, 8)] * 2
    assert vitreous.explain(model, torch.randn(1, 3, *size), "rollout").map.shape == (1, 16, 16)


class Sides(nn.Module):
    """A Swin whose classifier also reads the tokens of its first stage, or those before the last layer."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.early = windowed.swin()[0], early
        self.head = nn.Linear(16 + 32 if early else 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        one = self.net.layers[0](self.net.patch_embed(x))
        last = self.net.layers[1]
        inner = last.blocks[0](last.downsample(one))
        read = [one if self.early else inner, last.blocks[1](inner)]
        return self.head(torch.cat([tokens.mean((1, 2)) for tokens in read], -1))


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stage_that_is_also_read_elsewhere_is_refused(early: bool) -> None:
    model, images = vitreous.Model(Sides(early).eval(), classifier=True), torch.randn(1, 3, 32, 32)
    with pytest.raises(Unsupported, match=r"reads the tokens of several stages \(also those of net\.layers\."):
        vitreous.explain(model, images, "rollout")
    assert vitreous.explain(model, images, "gradient", 1).map.shape == (1, 32, 32)
