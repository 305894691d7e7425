"""Views inside a model: queries and keys are the model's own, numbers follow their formulas, figures do not collide."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import zoo
from conftest import Run, off
from machine import ROUNDING, rare
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import entropy
from test_capture import Elsewhere
from test_plot import collisions, words
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace, inspect
from vitreous.errors import InputError, OptionError, Unsupported
from vitreous.inspect import channels
from vitreous.plot.discarded import save_gif
from vitreous.version import VERSION

RANDOM = np.random.default_rng(0)
LIMITS = channels.Limits(0.03, 0.3, 0.2)
Both = tuple[Tensor, Tensor]  # queries and keys [H N d]


# ------------------------------------------------------------------------------- queries and keys are the model's own


def seen_by(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, dict[str, Any], Any]:
    """What a module is given, and what it returns, in one run."""
    kept: list[Any] = []
    hook = module.register_forward_hook(lambda _, args, more, out: kept.append((args, more, out)), with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    return kept[0]


def by_head(tokens: Tensor, heads: int = 2) -> Tensor:
    """[1 N H·d] to [H N d]."""
    return tokens[0].unflatten(-1, (heads, -1)).transpose(0, 1)


def fused(net: nn.Module, x: Tensor) -> Both:
    """timm: one linear layer for queries, keys and values."""
    _, _, out = seen_by(net.blocks[1].attn.qkv, lambda: net(x))
    q, k, _ = out.chunk(3, -1)
    return by_head(q), by_head(k)


def normed(net: nn.Module, x: Tensor) -> Both:
    """timm: what leaves the norms of queries and keys."""
    attention = net.blocks[1].attn
    q, k = (seen_by(part, lambda: net(x))[2] for part in (attention.q_norm, attention.k_norm))
    return q[0], k[0]


def turned(net: nn.Module, x: Tensor) -> Both:
    """timm with rotary positions: turned by timm's own function."""
    from timm.layers import apply_rot_embed_cat

    attention = net.blocks[1].attn
    _, more, _ = seen_by(attention, lambda: net(x))
    first, half = attention.num_prefix_tokens, getattr(attention, "rotate_half", False)

    def turn(t: Tensor) -> Tensor:
        return torch.cat([t[:, :first], apply_rot_embed_cat(t[:, first:], more["rope"], half=half)], 1)

    q, k = normed(net, x)
    return turn(q), turn(k)


def projected(net: nn.Module, x: Tensor, block: str) -> Both:
    """Hugging Face: a linear layer each."""
    attention = net.get_submodule(block)
    q, k = (seen_by(part, lambda: net(x))[2] for part in (attention.q_proj, attention.k_proj))
    return by_head(q), by_head(k)


def turned_hf(net: nn.Module, x: Tensor) -> Both:
    """Hugging Face DINOv3: turned by its own function."""
    from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

    block = "model.layer.1.attention"
    _, more, _ = seen_by(net.get_submodule(block), lambda: net(x))
    q, k = apply_rotary_pos_emb(*projected(net, x, block), *more["position_embeddings"])
    return q, k


def in_one(net: nn.Module, x: Tensor, block: str, run: Callable[[Tensor], Any] | None = None) -> Both:
    """nn.MultiheadAttention: the upper two thirds of its one projection."""
    attention = net.get_submodule(block)
    args, more, _ = seen_by(attention, lambda: (run or net)(x))
    entered = args[0] if args else more["query"]
    entered = entered if attention.batch_first else entered.transpose(0, 1)
    with torch.no_grad():
        q, k, _ = F.linear(entered, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    return by_head(q), by_head(k)


@cache
def with_norms() -> nn.Module:
    """A timm ViT whose queries and keys have norms of their own."""
    sizes = {"img_size": 64, "num_classes": 7, "embed_dim": 32, "depth": 3, "num_heads": 2}
    torch.manual_seed(0)
    net: nn.Module = timm.create_model("vit_tiny_patch16_224", qk_norm=True, **sizes).eval()
    for block in net.blocks:
        nn.init.normal_(block.attn.q_norm.weight, 1.0, 0.3)
    return net


REFERENCES: dict[str, Callable[[nn.Module, Tensor], Both]] = {
    "timm ViT": fused,
    "timm ViT 224×448": fused,
    "timm ViT with norms": normed,
    "timm SigLIP": fused,
    "timm DINOv3": turned,
    "timm EVA-02": turned,
    "HF ViT sdpa": lambda net, x: projected(net, x, "vit.layers.1.attention"),
    "HF DINOv3 sdpa": turned_hf,
    "torchvision ViT": lambda net, x: in_one(net, x, "encoder.layers.encoder_layer_1.self_attention"),
    "open_clip ViT-B-32": lambda net, x: in_one(
        net, x, "visual.transformer.resblocks.1.attn", lambda x: net.encode_image(x)
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_queries_and_keys_are_the_models_own(name: str) -> None:
    net = with_norms() if name == "timm ViT with norms" else zoo.network(name)
    x = zoo.images(name if name in zoo.ZOO else "timm ViT", 1)
    q, k = REFERENCES[name](net, x)
    model = Model(net, name="reference")
    view = inspect.qk(model, x, layer=1, head=None)
    layout = model.layout_at((x.shape[-2], x.shape[-1]))
    places = [(one.head, one.channel) for one in view.ranking]
    assert sorted(places) == [(h, c) for h in range(q.shape[0]) for c in range(q.shape[2])]
    for ours, theirs in ((view.q, q), (view.k, k)):
        patches = theirs[:, layout.prefix : layout.prefix + layout.patches]
        wanted = np.stack([patches[h, :, c].reshape(layout.grid).numpy() for h, c in places])
        assert off(ours, wanted) < 1e-6
    alone = inspect.qk(model, x, layer=1, head=1)
    assert len(alone.ranking) == q.shape[2] and {one.head for one in alone.ranking} == {1}


def test_turning_and_norms_are_seen() -> None:
    """The references would not pass for plain projections."""
    x = zoo.images("timm DINOv3", 1)
    net = zoo.network("timm DINOv3")
    assert off(turned(net, x)[0], normed(net, x)[0]) > 0.1
    x = zoo.images("timm ViT", 1)
    assert off(normed(with_norms(), x)[0], fused(with_norms(), x)[0]) > 0.1


def test_models_that_hide_their_queries_are_refused() -> None:
    net = zoo.HandWritten().eval()  # by an einsum whose axes begin with the heads
    net.first, net.second, net.third = (Elsewhere() for _ in range(3))
    model, images = Model(net), zoo.images("hand-written", 1)
    with pytest.raises(Unsupported, match="without visible queries and keys; use a fused one"):
        inspect.qk(model, images)
    assert inspect.heads(model, images).maps.shape == (3, 2, 4, 4)


@pytest.mark.parametrize("name", ["HF ViT", "HF DINOv3"])
def test_written_out_attention_shows_the_same_queries_and_keys(name: str) -> None:
    fused, eager = zoo.model(f"{name} sdpa"), Model(copy.deepcopy(zoo.network(f"{name} eager")))
    eager.module.load_state_dict(fused.module.state_dict())
    one, other = (inspect.qk(model, zoo.images(f"{name} sdpa", 1), layer=1, head=1) for model in (fused, eager))
    mine, theirs = (np.argsort([channel.channel for channel in view.ranking]) for view in (one, other))
    assert off(other.q[theirs], one.q[mine]) < 1e-5 and off(other.k[theirs], one.k[mine]) < 1e-5
    assert off(other.leaving[theirs], one.leaving[mine]) < 1e-3, "the scale is fitted"


# ----------------------------------------------------------------------------------------------------------- channels


def pictures(count: int = 5, size: tuple[int, int] = (5, 7)) -> np.ndarray:
    return RANDOM.normal(size=(count, *size)).astype(np.float32)


def test_the_share_between_two_classes() -> None:
    made = pictures()
    for ours, picture in zip(channels.split_share(made), made.astype(np.float64), strict=True):
        values, best = np.sort(picture.ravel()), 0.0
        for cut in range(1, len(values)):
            low, high = values[:cut], values[cut:]
            within = (low.var() * len(low) + high.var() * len(high)) / len(values)
            best = max(best, 1 - within / values.var())
        assert ours == pytest.approx(best, abs=1e-9)
    two = np.where(pictures() > 0.3, 2.0, -1.0)
    assert channels.split_share(two) == pytest.approx(np.ones(5))
    assert channels.split_share(np.ones((1, 4, 4))) == [0]


def test_morans_i() -> None:
    made = pictures()
    h, w = made.shape[1:]
    spots = [(y, x) for y in range(h) for x in range(w)]
    near = np.array([[abs(a - c) + abs(b - d) == 1 for c, d in spots] for a, b in spots], float)
    for ours, picture in zip(channels.moran(made), made.astype(np.float64), strict=True):
        z = picture.ravel() - picture.mean()
        assert ours == pytest.approx(len(z) / near.sum() * (z @ near @ z) / (z @ z), abs=1e-9)
    board = np.indices((6, 6)).sum(0)[None] % 2 * 1.0
    assert channels.moran(board) == pytest.approx([-1.0])
    assert channels.moran(np.ones((1, 4, 4))) == [0]


def test_what_leaves_and_what_arrives() -> None:
    """The mean, over all partners of the same sign, of s·q·k; its sign is theirs."""
    q, k = pictures(3, (4, 4)), pictures(3, (4, 4))
    scale = np.array([0.5, 1.0, 2.0], np.float32)
    leaving, arriving = channels.meeting(k, q, scale), channels.meeting(q, k, scale)
    for c in range(3):
        pairs = scale[c] * np.outer(q[c], k[c])  # [query key]
        pairs = np.maximum(pairs, 0)
        assert off(leaving[c].ravel(), pairs.mean(0) * np.sign(k[c].ravel())) < 1e-5
        assert off(arriving[c].ravel(), pairs.mean(1) * np.sign(q[c].ravel())) < 1e-5


def measured(q: np.ndarray, k: np.ndarray, **limits: float) -> inspect.Channel:
    given = channels.Limits(**{**vars(LIMITS), **limits})
    return channels.measure(q[None], k[None], np.ones(1, np.float32), [(0, 0, 0)], given)[0]


LEFT = np.where(np.arange(10) < 4, 1.0, -1.0)[None].repeat(10, 0).astype(np.float32)


def test_patterns_by_the_signs() -> None:
    ones, noise = np.ones_like(LEFT), RANDOM.choice([-1.0, 1.0], LEFT.shape).astype(np.float32)
    one = measured(ones, LEFT)
    assert (one.pattern, one.reads) == ("one-way", "all patches read k⁺ (40%)")
    assert one.score == pytest.approx(channels.moran(LEFT[None])[0])  # two values: all variance lies between them
    assert measured(-ones, LEFT).reads == "all patches read k⁻ (60%)"
    itself, other = measured(LEFT, LEFT), measured(-LEFT, LEFT)
    assert (itself.pattern, itself.likeness) == ("two-way", pytest.approx(1))
    assert itself.reads == "q⁺ (40%) reads k⁺ (40%), q⁻ reads k⁻: regions read themselves"
    assert (other.pattern, other.likeness) == ("two-way", pytest.approx(-1))
    assert other.reads == "q⁺ (60%) reads k⁺ (40%), q⁻ reads k⁻: regions read each other"
    across = measured(LEFT.T.copy(), LEFT)
    assert across.pattern == "two-way" and across.reads.endswith("q⁻ reads k⁻")
    assert measured(LEFT, ones).reads == "the key has one sign (100%): no side to choose"
    assert measured(ones, noise).reads == "no clear regions in the key"
    assert measured(noise, LEFT).reads == "no clear regions in the query"
    assert all(measured(*pair).pattern == "none" for pair in ((LEFT, ones), (ones, noise), (noise, LEFT)))


def test_limits_move_the_patterns() -> None:
    few = -np.ones_like(LEFT)
    few[:2, :2] = 1  # four patches of a hundred
    assert measured(few, LEFT).pattern == "two-way"
    assert measured(few, LEFT, least=0.05).pattern == "one-way"
    assert measured(LEFT, LEFT, coherence=0.99).pattern == "none"
    assert "themselves" in measured(few, LEFT).reads and "themselves" not in measured(few, LEFT, likeness=0.3).reads


def test_channels_are_ranked_and_chosen() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    view = inspect.qk(model, x, layer=2, head=1, channels=[7, 3])
    scores = [one.score for one in view.ranking]
    assert scores == sorted(scores, reverse=True)
    assert [view.ranking[i].channel for i in view.shown] == [7, 3]
    assert off(scores, channels.split_share(view.k) * np.maximum(channels.moran(view.k), 0)) < 1e-6
    everything = inspect.qk(model, x, layer=None, head=None, count=2)
    assert len(everything.ranking) == 3 * 2 * 16 and everything.shown == (0, 1)
    assert everything.where == "layers 0–2, heads 0–1"
    assert sum(everything.counts.values()) == 96
    centred = inspect.qk(model, x, centred=True)
    assert np.abs(centred.k.mean((1, 2))).max() < 1e-6
    for options, said in [
        ({"channels": [16]}, "channel 16 is out of range: this head has channels 0 to 15"),
        ({"head": None, "channels": [1]}, "say which layer and which head"),
        ({"head": 2}, "head 2 is out of range"),
        ({"layer": 3}, "layer 3 is out of range"),
        ({"least": 0.7}, r"least=0.7: give a number from 0 to 0.5"),
        ({"count": 0}, "count=0: give at least 1"),
    ]:
        with pytest.raises(OptionError, match=said):
            inspect.qk(model, x, **options)  # type: ignore[arg-type]


@pytest.mark.shared
def test_the_two_published_channels_are_found(deit: Model, shared: Path) -> None:
    """Channel 26 of layer 8 tells all about the plane; channel 59 of layer 11 flows both ways."""
    plane = shared / "data" / "photos" / "plane2.png"
    one = inspect.qk(deit, plane, layer=8, head=0, channels=[26])
    found = one.ranking[one.shown[0]]
    assert (found.pattern, found.query_positive, found.reads) == ("one-way", 1.0, "all patches read k⁺ (6%)")
    bright = one.k[one.shown[0]] > 0
    rows, columns = np.nonzero(bright)
    assert 3 <= rows.mean() <= 8 and 4 <= columns.mean() <= 10  # where the plane is
    two = inspect.qk(deit, plane, layer=11, head=0, channels=[59])
    assert two.ranking[two.shown[0]].pattern == "two-way"


# ---------------------------------------------------------------------------------------------- heads, layers, discard


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv3", "timm SigLIP", "hand-written", "HF DINOv2 eager"])
def test_heads_are_the_readouts_attention(name: str) -> None:
    model, x = zoo.model(name), zoo.images(name, 1)
    trace = Trace(model, x)
    view = inspect.heads(model, trace)
    layout = trace.layout
    for layer, maps in zip(trace.attention, view.maps, strict=True):
        rows = torch.einsum("n,hnm->hm", trace.readout[0], layer.weights[0].detach())
        patches = rows[:, layout.prefix : layout.prefix + layout.patches]
        assert off(maps.reshape(len(maps), -1), patches) < 1e-5
    assert off(view.patches, view.maps.sum((2, 3))) < 1e-6 and view.patches.max() < 1 + 1e-5
    for width, map in zip(view.width.ravel(), view.maps.reshape(-1, layout.patches), strict=True):
        assert width == pytest.approx(np.exp(entropy(map)) / layout.patches, rel=1e-4)
    narrow, wide = view.extremes
    assert view.width[narrow] == view.width.min() and view.width[wide] == view.width.max()
    last = inspect.heads(model, trace, layers=[-1])
    assert last.layers == (2,) and off(last.maps[0], view.maps[2]) <= ROUNDING
    assert f"layer {narrow[0]}, head {narrow[1]}" in view.said


@pytest.mark.parametrize("heads", ["mean", "min", "max"])
def test_layers_and_all_of_them(heads: Any) -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    view = inspect.layers(model, x, heads=heads)
    trace = Trace(model, x)
    fuse = {"mean": torch.mean, "min": torch.amin, "max": torch.amax}[heads]
    each = np.stack([fuse(layer.weights[0].detach()[:, 0, 1:], 0).reshape(4, 4).numpy() for layer in trace.attention])
    assert off(view.maps, each) < 1e-5
    assert off(view.mean, each.mean(0)) < 1e-5 and off(view.min, each.min(0)) < 1e-5
    assert off(view.max, each.max(0)) < 1e-5
    assert off(view.rollout, vitreous.explain(model, x, "rollout", heads=heads).map[0]) < 1e-6


def test_discarding() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    view = inspect.discard(model, x, ratios=[0.9, 0.0, 0.5, 0.5], heads="max", residual=0.3)
    assert view.ratios == (0.0, 0.5, 0.9)
    for ratio, map in zip(view.ratios, view.maps, strict=True):
        alone = vitreous.explain(model, x, "rollout", heads="max", discard=ratio, residual=0.3).map[0]
        assert off(map, alone) < 1e-6
    for map, kept in zip(view.maps.reshape(3, -1), view.kept, strict=True):
        order = np.sort(map)[::-1]
        count = next(n for n in range(1, 17) if order[:n].sum() >= 0.5 * map.sum())
        assert kept == pytest.approx(count / 16)
    for options in ({"ratios": [1.0]}, {"ratios": [0.5], "residual": 2.0}, {"ratios": []}, {"heads": "sum"}):
        with pytest.raises(OptionError):
            inspect.discard(model, x, **options)  # type: ignore[arg-type]


def test_the_animation_loops_and_is_small(tmp_path: Path, tiny: Model, cat: Path) -> None:
    view = inspect.discard(tiny, cat, ratios=[0, 0.3, 0.6, 0.9])
    file, frames = view.save(tmp_path / "cat.gif"), view.frames()
    with Image.open(file) as moving:
        assert (moving.n_frames, moving.info["loop"]) == (4, 0)
        times = []
        for i in range(4):
            moving.seek(i)
            assert moving.size == frames[0].size
            times.append(moving.info["duration"])
        assert times[0] == times[-1] > times[1] == times[2]
        shown = np.asarray(moving.convert("RGB"), np.float32)
    assert np.abs(shown - np.asarray(frames[-1], np.float32)).mean() < 3  # 256 colours are enough
    assert file.stat().st_size < 600_000
    assert len({frame.size for frame in frames}) == 1


@pytest.mark.slow
def test_a_large_animation_is_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = [Image.fromarray(RANDOM.integers(0, 256, (300, 400, 3)).astype(np.uint8)) for _ in range(3)]
    monkeypatch.setattr("vitreous.plot.discarded.MOST", 200_000)
    save_gif(noise, tmp_path / "noise.gif")
    with Image.open(tmp_path / "noise.gif") as moving:
        assert moving.n_frames == 3 and moving.width < 400
        assert moving.width / moving.height == pytest.approx(4 / 3, 0.02)
    with pytest.raises(InputError, match="there is no frame to write"):
        save_gif([], tmp_path / "empty.gif")


# --------------------------------------------------------------------------------------------------------------- flow


@pytest.mark.parametrize("name", ["timm ViT", "timm DINOv2 registers", "hand-written"])
def test_flow_is_a_row_and_a_column(name: str) -> None:
    model, x = zoo.model(name), zoo.images(name, 1)
    trace = Trace(model, x)
    layout = trace.layout
    token, behind = layout.prefix + 1 * 4 + 2, layout.prefix + 16
    view = inspect.flow(model, x, patch=(1, 2), layer=1, head=1)
    a = trace.attention[1].weights[0, 1].detach()
    assert off(view.reads[0], a[token, layout.prefix : behind].reshape(4, 4)) < 1e-5
    assert off(view.read_by[0], a[layout.prefix : behind, token].reshape(4, 4)) < 1e-5
    near = [layout.prefix + y * 4 + x_ for y in (0, 1, 2) for x_ in (1, 2, 3) if (y, x_) != (1, 2)]
    shares = dict(zip(view.parts, view.reads_parts[0]))
    assert shares["itself"] == pytest.approx(a[token, token].item(), abs=1e-6)
    assert shares["neighbours"] == pytest.approx(a[token, near].sum().item(), abs=1e-6)
    assert view.read_by_all[0] == pytest.approx(a[:, token].sum().item(), rel=1e-5)
    for sums in (view.reads_parts.sum(1), view.read_by_parts.sum(1), view.sizes.sum()):
        assert sums == pytest.approx(1, abs=1e-5)
    everything = inspect.flow(model, trace, patch=(1, 2), layer=None, head=1)
    assert everything.layers == (0, 1, 2) and off(everything.reads[1], view.reads[0]) < 1e-6
    read = inspect.flow(model, trace)
    mean = trace.attention[-1].weights[0].detach().mean(0)
    assert off(read.read_by[0].ravel(), (mean @ trace.readout[0])[layout.prefix : behind]) < 1e-5
    assert read.patch is None and read.parts[0] == "patches"


def test_a_corner_has_three_neighbours() -> None:
    view = inspect.flow(zoo.model("timm ViT"), zoo.images("timm ViT", 1), patch=(3, 0))
    assert dict(zip(view.parts, view.sizes * 17)) == pytest.approx(
        {"itself": 1, "neighbours": 3, "other patches": 12, "CLS": 1}
    )


def test_a_pixel_finds_its_patch(tiny: Model) -> None:
    wide = Image.fromarray(RANDOM.integers(0, 256, (100, 200, 3)).astype(np.uint8))  # the middle 100×100 is seen
    view = inspect.flow(tiny, wide, at=(51, 1))
    assert view.patch == (0, 0)
    assert inspect.flow(tiny, wide, at=(149, 99)).patch == (13, 13)
    assert inspect.flow(tiny, wide, at=(101, 52)).patch == (7, 7)
    with pytest.raises(OptionError, match=r"at 10,10 is cut off before the model: it sees x from 50 to 150"):
        inspect.flow(tiny, wide, at=(10, 10))
    with pytest.raises(OptionError, match="the image has 200×100 pixels"):
        inspect.flow(tiny, wide, at=(200, 10))
    ready = zoo.images("timm ViT 224×448", 1)
    assert inspect.flow(zoo.model("timm ViT 224×448"), ready, at=(447, 0)).patch == (0, 27)


def test_patches_that_are_not_there() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    with pytest.raises(OptionError, match="patch 4,0 is out of range: there are rows 0 to 3 and columns 0 to 3"):
        inspect.flow(model, x, patch=(4, 0))
    with pytest.raises(OptionError, match="not both"):
        inspect.flow(model, x, patch=(0, 0), at=(1, 1))
    with pytest.raises(OptionError, match="head 5 is out of range"):
        inspect.flow(model, x, head=5)


# ------------------------------------------------------------------------------------------------- figures and files

VIEWS: dict[str, Callable[[Model, Any], inspect.View]] = {
    "heads": inspect.heads,
    "layers": inspect.layers,
    "qk": inspect.qk,
    "flow": lambda model, x: inspect.flow(model, x, patch=(0, 3)),
    "flow of all layers": lambda model, x: inspect.flow(model, x, patch=(0, 3), layer=None, head=1),
    "flow of the read-out": inspect.flow,
    "discard": lambda model, x: inspect.discard(model, x, ratios=[0, 0.5, 0.9]),
}


def drawn(name: str, view: str) -> tuple[inspect.View, Figure]:
    made = VIEWS[view](zoo.model(name), zoo.images(name, 1))
    return made, made.figure()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["timm ViT", *rare("timm ViT 224×448", "timm SigLIP")])
def test_figures_do_not_collide(name: str, view: str) -> None:
    made, figure = drawn(name, view)
    assert not collisions(figure)
    title = max(words(figure), key=lambda word: len(word) if made.origin in word else 0)
    assert f"of {made.model} on image 0" in title and "ayer" in title
    if view not in ("layers", "discard"):
        assert "head" in title
    assert any(VERSION in word for word in words(figure))


def fake_heads(layers: int, heads: int, grid: tuple[int, int]) -> inspect.Heads:
    maps = RANDOM.random((layers, heads, *grid)).astype(np.float32)
    photo = Image.new("RGB", (grid[1] * 8, grid[0] * 8), "grey")
    return inspect.Heads(
        model="vit", image="a.png", photo=photo, layers=tuple(range(layers)), readout="CLS", maps=maps / maps.sum()
    )


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 12), (12, 3), *rare((24, 16), (32, 2))])
def test_every_head_has_a_place(layers: int, heads: int) -> None:
    view = fake_heads(layers, heads, (6, 9))
    figure = view.figure(same_scale=layers == 12)
    assert not collisions(figure)
    told = words(figure)
    assert {f"layer {i}" for i in range(layers)} <= set(told)
    size = figure.get_size_inches()
    assert max(size) < 24
    assert len(figure.axes[0].images) == layers * heads + 1 + (layers == 12)


def test_a_layer_with_fewer_heads_leaves_gaps() -> None:
    view = fake_heads(3, 4, (5, 5))
    view.maps[1, 2:] = np.nan
    assert len(view.figure().axes[0].images) == 12 - 2 + 1
    json.loads(json.dumps(view.details, allow_nan=False))


def test_one_scale_for_all_heads() -> None:
    view = fake_heads(2, 2, (5, 5))
    view.maps[0, 0] *= 10
    alone, common = (view.figure(same_scale=same).axes[0].images for same in (False, True))
    assert np.asarray(common[-1].get_array()).mean() < np.asarray(alone[-1].get_array()).mean() - 20


def test_files_hold_everything(tmp_path: Path) -> None:
    for view in VIEWS.values():
        made = view(zoo.model("timm ViT"), zoo.images("timm ViT", 1))
        with np.load(made.save(tmp_path / "view.npz")) as stored:
            told = json.loads(str(stored["provenance"]))
            assert (told["view"], told["model"], told["version"]) == (made.name, "timm-vit", VERSION)
            assert set(stored) == {*made.arrays, "provenance"}
            for key, values in made.arrays.items():
                assert np.array_equal(stored[key], values)
        json.dumps(made.details, allow_nan=False)
    with pytest.raises(OptionError, match=r"cannot draw a \.gif"):
        inspect.heads(zoo.model("timm ViT"), zoo.images("timm ViT", 1)).save(tmp_path / "heads.gif")
    assert made._repr_png_().startswith(b"\x89PNG")
    assert made.save(tmp_path / "view.svg").read_bytes().startswith(b"<?xml")


def test_what_cannot_be_looked_at() -> None:
    for name, view in VIEWS.items():
        with pytest.raises(
            Unsupported, match=rf"inspect {name.split()[0]} needs attention between all tokens; timm-swin"
        ):
            view(zoo.model("timm Swin"), zoo.images("timm Swin", 1))
    with pytest.raises(InputError, match="one image at a time, not at 2"):
        inspect.heads(zoo.model("timm ViT"), zoo.images("timm ViT", 2))
    with pytest.raises(OptionError, match="name at least one"):
        inspect.heads(zoo.model("timm ViT"), zoo.images("timm ViT", 1), layers=[])


def test_nothing_is_left_behind() -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    before = model.module(x)
    for view in VIEWS.values():
        view(model, x)
    assert off(model.module(x).detach(), before.detach()) <= ROUNDING
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


def test_it_is_used_by_its_name() -> None:
    """`test_public` sees that nothing is imported before."""
    assert vitreous.inspect is sys.modules["vitreous.inspect"] and "inspect" in vitreous.__all__


# ------------------------------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_every_command_writes_what_it_says(run: Run, cat: Path) -> None:
    for asked, files in [
        (["heads", "--layers", "0-2,-1", "--same-scale", "--cells"], ["png"]),
        (["layers", "--heads", "min", "--bare"], ["png"]),
        (["qk", "--layer", "8", "--head", "1", "--channels", "3,7"], ["png"]),
        (["flow", "--at", "100,90", "--layer", "-2", "--head", "0", "--format", "svg,npz"], ["svg"]),
        (["discard", "--steps", "2", "--heads", "max"], ["png", "gif"]),
    ]:
        said = run("inspect", *asked, cat, "--out", "out")
        assert said.code == 0
        for ending in (*files, "npz"):
            assert f"out/cat.{asked[0]}.{ending}" in said.out
            assert Path(f"out/cat.{asked[0]}.{ending}").stat().st_size > 1000
        with np.load(f"out/cat.{asked[0]}.npz") as stored:
            told = json.loads(str(stored["provenance"]))
        assert told["image"] == "cat.jpg" and told["said"] in " ".join(said.out.split())
    assert set(Path("out").glob("*heads*")) == {Path("out/cat.heads.png"), Path("out/cat.heads.npz")}


def test_programs_get_json(run: Run, cat: Path) -> None:
    said = json.loads(run("inspect", "qk", cat, "--layer", "all", "--head", "all", "--count", "1", "--json").out)
    (entry,) = said["images"]
    assert (said["view"], said["model"]) == ("qk", "vitreous_tiny")
    assert sum(entry["counts"].values()) == 12 * 3 * 64
    assert [one["rank"] for one in entry["channels"]] == list(range(1, 11))
    scores = [one["score"] for one in entry["channels"]]
    assert scores == sorted(scores, reverse=True)


def test_what_is_typed_wrong_is_said(run: Run, cat: Path) -> None:
    for asked, said in [
        (["heads", "--layers", "1-x"], "--layers 1-x: 1-x is not a whole number"),
        (["heads", "--layers", "0-99"], "layer 12 is out of range: vitreous_tiny has layers 0 to 11"),
        (["heads", "--format", "gif"], "--format gif: give png, svg, pdf, npz or none"),
        (["layers", "--heads", "most"], "heads=most: give mean, min or max"),
        (["qk", "--head", "first"], "--head first: first is not a whole number"),
        (["flow", "--patch", "7"], "--patch 7: write two numbers with a comma between them, e.g. 7,7"),
        (["flow", "--patch", "20,1"], "patch 20,1 is out of range: there are rows 0 to 13 and columns 0 to 13"),
    ]:
        assert run("inspect", *asked, cat).error == said


@pytest.mark.slow
def test_results_are_not_looked_at_again(run: Run, cat: Path, tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(cat.read_bytes())
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    for _ in range(2):
        said = json.loads(run("inspect", "discard", ".", "--out", ".", "--steps", "2", "--json").out)
        assert [entry["image"] for entry in said["images"]] == ["cat.jpg"]
        assert [entry["image"] for entry in said["failed"]] == ["broken.jpg"]
