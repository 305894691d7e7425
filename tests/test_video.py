"""Videos: tiny random networks of transformers, and of users, against what is right in another way."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace

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


def dense(net: Any, video: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """TimeSformer with dense attention over CLS and all tubelets: its output, A [B H N N], and which rows of A ask.

    Written out from its weights, without any layout.
    """
    (b, frames), places = video.shape[:2], (SIDE // PATCH) ** 2
    count, matrices, asking = 1 + frames * places, [], []
    cell = 1 + torch.arange(frames * places).view(frames, places)  # in the order of the map

    def attend(module: Any, tokens: Tensor, windows: list[Tensor]) -> Tensor:
        """Attention of tokens [B N D] within windows; a token of several windows gets the mean of what it gets."""
        q, k, v = module.attention.qkv(tokens).reshape(b, count, 3, 2, -1).permute(2, 0, 3, 1, 4)
        a, times = tokens.new_zeros(b, 2, count, count), tokens.new_zeros(count)
        for window in windows:
            scores = q[:, :, window] @ k[:, :, window].mT * q.shape[-1] ** -0.5
            a[:, :, window[:, None], window] += scores.softmax(-1)
            times[window] += 1
        a = a / times.clamp_min(1)[:, None]
        matrices.append(a)
        asking.append((times > 0).to(tokens))
        return module.output((a @ v).transpose(1, 2).flatten(2)) * (times > 0)[:, None]

    x = net.timesformer.embeddings(video)
    order = torch.cat(
        [torch.zeros(1, dtype=torch.long), 1 + torch.arange(frames * places).view(places, frames).T.flatten()]
    )
    x = x[:, order]  # frame by frame; the network has them place by place
    for block in net.timesformer.encoder.layer:
        after = attend(block.temporal_attention, block.temporal_layernorm(x), [cell[:, i] for i in range(places)])
        x = x + block.temporal_dense(after) * asking[-1][:, None]
        frame = [torch.cat([torch.zeros(1, dtype=torch.long), cell[t]]) for t in range(frames)]
        x = x + attend(block.attention, block.layernorm_before(x), frame)
        x = x + block.output(block.intermediate(block.layernorm_after(x)))
    return net.classifier(net.timesformer.layernorm(x)[:, 0]), matrices, asking


def cls_row(count: int) -> Tensor:
    row = torch.zeros(2, count)
    row[:, 0] = 1
    return row


def as_map(row: Tensor) -> Tensor:
    return row[:, 1:].reshape(2, *tubelets("timesformer"))


@pytest.mark.parametrize("frames", [2, FRAMES])
def test_divided_attention_is_dense_attention(frames: int) -> None:
    """Attention and rollout, against dense attention of the same weights; also of as many frames as noise videos."""
    net = build("timesformer", frames=frames)
    trace = Trace(Model(net), clips(frames))
    output, matrices, asking = dense(net, clips(frames))
    torch.testing.assert_close(trace.output, output.detach(), rtol=0, atol=1e-5)
    row, shape = cls_row(1 + frames * 9), (2, frames, 3, 3)
    last = (row[:, None] @ matrices[-1].detach().mean(1))[:, 0, 1:].reshape(shape)
    torch.testing.assert_close(trace.explain("attention").map, last, rtol=0, atol=1e-6)
    for heads in ("mean", "max"):
        row = cls_row(1 + frames * 9)
        for a, asks in zip(reversed(matrices), reversed(asking)):
            fused = a.detach().mean(1) if heads == "mean" else a.detach().amax(1)
            step = 0.5 * fused + torch.diag_embed(1 - 0.5 * asks)
            row = (row[:, None] @ (step / step.sum(-1, keepdim=True)))[:, 0]
        found = trace.explain("rollout", heads=heads).map
        torch.testing.assert_close(found, row[:, 1:].reshape(shape), rtol=0, atol=1e-6)


def test_divided_gradients_are_dense_gradients() -> None:
    """gae and grad_rollout, against dense attention of the same weights and its gradient."""
    net = build("timesformer").double()
    trace = Trace(Model(net), clips().double())
    output, matrices, asking = dense(net, clips().double())
    grads = torch.autograd.grad(output[:, 3].sum(), matrices)  # also through the scores of later layers
    row, rolled = cls_row(37).double(), cls_row(37).double()
    for a, grad, asks in zip(reversed(matrices), reversed(grads), reversed(asking)):
        product = (a * grad).detach()
        row = row + (row[:, None] @ product.clamp_min(0).mean(1))[:, 0]
        step = 0.5 * product.mean(1).clamp_min(0) + torch.diag_embed(1 - 0.5 * asks)
        rolled = (rolled[:, None] @ (step / step.sum(-1, keepdim=True)))[:, 0]
    gae = trace.explain("gae", target=3).map
    torch.testing.assert_close(gae, as_map(row).float(), rtol=1e-5, atol=1e-6 * float(gae.abs().max()))
    found = trace.explain("grad_rollout", target=3).map
    torch.testing.assert_close(found, as_map(rolled).float(), rtol=1e-5, atol=1e-6 * float(found.abs().max()))
