"""Videos: tiny random networks of transformers, and of users, against what is right in another way."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Attribution, Model, Trace
from vitreous.errors import InputError, ModelError, OptionError, Unsupported
from vitreous.images import videos

pytestmark = pytest.mark.filterwarnings("ignore::vitreous.errors.ModelWarning")
FRAMES, SIDE, PATCH = 4, 24, 8
SHARED: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 5}
PLAIN = ("videomae", "vivit", "vjepa2")
ALL = (*PLAIN, "timesformer")


def build(kind: str, attention: str = "sdpa", frames: int = FRAMES) -> nn.Module:
    import transformers as t

    size: dict[str, Any] = {"image_size": SIDE, "num_frames": frames, "intermediate_size": 16, **SHARED}
    if kind == "videomae":
        net = t.VideoMAEForVideoClassification(t.VideoMAEConfig(patch_size=PATCH, tubelet_size=2, **size))
    elif kind == "vivit":
        net = t.VivitForVideoClassification(t.VivitConfig(tubelet_size=[2, PATCH, PATCH], **size))
    elif kind == "timesformer":
        net = t.TimesformerForVideoClassification(t.TimesformerConfig(patch_size=PATCH, **size))
    else:
        made = t.VJEPA2Config(
            crop_size=SIDE,
            patch_size=PATCH,
            frames_per_clip=frames,
            tubelet_size=2,
            mlp_ratio=2.0,
            num_pooler_layers=1,
            pred_hidden_size=12,
            pred_num_attention_heads=2,
            pred_num_hidden_layers=1,
            **SHARED,
        )
        net = t.VJEPA2Model(made) if kind == "vjepa2 encoder" else t.VJEPA2ForVideoClassification(made)
    if kind != "timesformer":
        net.set_attn_implementation(attention)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random) * (0.3 if weight.ndim > 1 else 0.1))
            weight.add_(1 if weight.ndim == 1 and "norm" in type(net).__name__ else 0)
    return net.eval()


@cache
def model(kind: str) -> Model:
    return Model(build(kind))


@cache
def clips(frames: int = FRAMES) -> Tensor:
    return torch.randn(2, frames, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(7))


def tubelets(kind: str) -> tuple[int, int, int]:
    return (FRAMES if kind == "timesformer" else FRAMES // 2, SIDE // PATCH, SIDE // PATCH)


def spoilt(video: Tensor, kind: str, cell: tuple[int, int, int]) -> Tensor:
    """A video [T C Y X] with another content of one tubelet."""
    deep = FRAMES // tubelets(kind)[0]
    time, row, column = cell
    changed = video.clone()
    where = (
        slice(time * deep, (time + 1) * deep),
        slice(None),
        slice(row * PATCH, (row + 1) * PATCH),
        slice(column * PATCH, (column + 1) * PATCH),
    )
    changed[where] = 0.5 - changed[where]
    return changed


# ------------------------------------------------------------------------------------------------------------ layout


@pytest.mark.parametrize("kind", ALL)
def test_tubelets_are_measured(kind: str) -> None:
    layout = model(kind).layout
    deep = FRAMES // tubelets(kind)[0]
    assert layout.cells == tubelets(kind)
    assert layout.times == tuple((n * deep, (n + 1) * deep) for n in range(tubelets(kind)[0]))
    assert layout.patch == (PATCH, PATCH)


@pytest.mark.parametrize("kind", ALL)
def test_the_changed_tubelet_moves(kind: str) -> None:
    """The token that changes with a tubelet is the one that the layout names, before anything is mixed."""
    own, layout = model(kind), model(kind).layout
    cell = (1, 2, 0)
    both = torch.stack([clips()[0], spoilt(clips()[0], kind, cell)])
    embed = next(m for m in own.module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d))
    kept: list[Tensor] = []
    handle = embed.register_forward_hook(lambda module, args, out: kept.append(out))
    own.run(both)
    handle.remove()
    made = kept[0]
    made = made.reshape(2, FRAMES, -1, 3, 3).transpose(1, 2) if made.ndim == 4 else made  # [B D T h w]
    moved = (made[1] - made[0]).abs().amax(0)
    assert moved.flatten().argmax() == np.ravel_multi_index(cell, layout.cells)
    assert (moved > 0).sum() == 1
    where = layout.where(*cell)
    assert torch.equal((both[1] != both[0]).nonzero().amin(0), torch.tensor([where[1].start, 0, 16, 0]))


@pytest.mark.parametrize("kind", ALL)
def test_occlusion_hides_one_tubelet(kind: str) -> None:
    """Against a network that is run on videos in which one tubelet has the mean colour."""
    video = clips()[:1]
    found = vitreous.explain(model(kind), video, "occlusion", target=1).map[0]
    assert found.shape == tubelets(kind)
    deep = FRAMES // tubelets(kind)[0]
    mean = video.mean((1, 3, 4), keepdim=True).expand_as(video)
    with torch.no_grad():
        whole = model(kind).run(video)[0, 1]
        for cell in ((0, 0, 1), (1, 2, 0)):
            t, y, x = cell
            hidden = video.clone()
            place = (slice(None), slice(t * deep, (t + 1) * deep), slice(None))
            place += (slice(y * PATCH, (y + 1) * PATCH), slice(x * PATCH, (x + 1) * PATCH))
            hidden[place] = mean[place]
            torch.testing.assert_close(found[cell], whole - model(kind).run(hidden)[0, 1], rtol=1e-3, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("kind", PLAIN)
def test_attention_is_the_models_own(kind: str) -> None:
    net = build(kind, "eager")
    name = "pixel_values_videos" if kind == "vjepa2" else "pixel_values"
    with torch.no_grad():
        told = net(**{name: clips()}, output_attentions=True).attentions
    trace = Trace(model(kind), clips())
    for layer, own in zip(trace.attention, told):
        torch.testing.assert_close(layer.weights.detach(), own, rtol=0, atol=1e-5)
    if kind == "vivit":
        row = told[-1][:, :, 0, 1:].mean(1).reshape(2, *tubelets(kind))
        torch.testing.assert_close(trace.explain("attention").map, row, rtol=0, atol=1e-5)


def dense(trace: Trace) -> list[tuple[Tensor, Tensor]]:
    """Divided attention as dense matrices [B H N N] over CLS and all tubelets, and the share of each row that asks.

    Written out from the weights of TimeSformer, without any layout.
    """
    net, (frames, h, w), found = trace.model.module, trace.layout.cells, []
    places, b = h * w, len(trace)

    def attend(module: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        n, count, width = tokens.shape
        q, k, v = module.attention.qkv(tokens).reshape(n, count, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        a = (q @ k.mT * (width // 2) ** -0.5).softmax(-1)
        return a, module.output((a @ v).transpose(1, 2).reshape(n, count, width))

    cell = torch.arange(frames * places).view(frames, places)  # in the order of the map
    x = net.timesformer.embeddings(trace.images)
    for block in net.timesformer.encoder.layer:
        cls, patches = x[:, :1], x[:, 1:]  # tokens lie place by place, frame by frame within
        by_place = patches.reshape(b * places, frames, -1)
        a, out = attend(block.temporal_attention, block.temporal_layernorm(by_place))
        time = torch.zeros(b, 2, 1 + frames * places, 1 + frames * places)
        for number in range(places):
            index = 1 + cell[:, number]
            time[:, :, index[:, None], index] = a.view(b, places, 2, frames, frames)[:, number]
        found.append((time, torch.cat([torch.zeros(1), torch.ones(frames * places)])))
        patches = patches + block.temporal_dense(out.reshape(b, places * frames, -1))
        by_frame = patches.view(b, places, frames, -1).transpose(1, 2).reshape(b * frames, places, -1)
        spatial = torch.cat([cls.repeat_interleave(frames, 0), by_frame], 1)
        a, out = attend(block.attention, block.layernorm_before(spatial))
        space = torch.zeros_like(time)
        for number in range(frames):
            index = torch.cat([torch.zeros(1, dtype=torch.long), 1 + cell[number]])
            part = a.view(b, frames, 2, 1 + places, 1 + places)[:, number].clone()
            part[:, :, 0] /= frames
            space[:, :, index[:, None], index] += part
        found.append((space, torch.ones(1 + frames * places)))
        out = out.view(b, frames, 1 + places, -1)
        patches = patches + out[:, :, 1:].transpose(1, 2).reshape(b, places * frames, -1)
        x = torch.cat([cls + out[:, :, 0].mean(1, keepdim=True), patches], 1)
        x = x + block.output(block.intermediate(block.layernorm_after(x)))
    return found


def test_divided_attention_is_dense_attention() -> None:
    """Rollout and the attention of each layer, against dense matrices of the same weights."""
    trace = Trace(model("timesformer"), clips())
    with torch.no_grad():
        matrices = dense(trace)
    row = torch.zeros(2, 1 + 4 * 9)
    row[:, 0] = 1
    last = (row[:, None] @ matrices[-1][0].mean(1))[:, 0, 1:].reshape(2, 4, 3, 3)
    torch.testing.assert_close(trace.explain("attention").map, last, rtol=0, atol=1e-6)
    for a, asks in reversed(matrices):
        step = 0.5 * a.mean(1) + torch.diag_embed(1 - 0.5 * asks)
        row = (row[:, None] @ step)[:, 0]
    torch.testing.assert_close(trace.explain("rollout").map, row[:, 1:].reshape(2, 4, 3, 3), rtol=0, atol=1e-6)
