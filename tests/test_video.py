"""Videos: tiny random networks of transformers, and of users, against what is right in another way."""

from __future__ import annotations

import re
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
from vitreous.errors import InputError, ModelError, Unsupported
from vitreous.images import videos

pytestmark = pytest.mark.filterwarnings("ignore::vitreous.errors.ModelWarning")
FRAMES, SIDE, PATCH = 4, 24, 8
SHARED: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 5}
PLAIN = ("videomae", "vivit", "vjepa2")
ALL = (*PLAIN, "timesformer")
SHOWN = {"videomae": "VideoMAE", "vivit": "ViViT", "vjepa2": "V-JEPA 2", "timesformer": "TimeSformer"}


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


def dense(net: Any, video: Tensor, streams: bool = False) -> Any:
    """TimeSformer with dense attention over CLS and all tubelets: its output, A [B H N N], and which rows of A ask.

    `streams`: also the tokens behind each block.

    Written out from its weights, without any layout.
    """
    (b, frames), places = video.shape[:2], (SIDE // PATCH) ** 2
    count, matrices, asking, after = 1 + frames * places, [], [], []
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
        timed = attend(block.temporal_attention, block.temporal_layernorm(x), [cell[:, i] for i in range(places)])
        x = x + block.temporal_dense(timed) * asking[-1][:, None]
        frame = [torch.cat([torch.zeros(1, dtype=torch.long), cell[t]]) for t in range(frames)]
        x = x + attend(block.attention, block.layernorm_before(x), frame)
        x = x + block.output(block.intermediate(block.layernorm_after(x)))
        after.append(x)
    found = net.classifier(net.timesformer.layernorm(x)[:, 0]), matrices, asking
    return (*found, after) if streams else found


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


@pytest.mark.slow
def test_divided_legrad_is_dense_legrad() -> None:
    """legrad: the score that the classifier gives to the mean token behind each block, and its gradient for A."""
    net = build("timesformer").double()
    video = clips().double()
    found = vitreous.explain(Model(net), video, "legrad", target=3).map
    maps = []
    for block in range(2):
        _, matrices, _, streams = dense(net, video, streams=True)
        pooled = streams[block].mean(1)
        score = net.classifier(net.timesformer.layernorm(pooled))[:, 3].sum()
        for number in (2 * block, 2 * block + 1):
            (grad,) = torch.autograd.grad(score, matrices[number], retain_graph=True)
            may = (matrices[number] > 0).double()
            asked = may.mean(1).sum(1)[:, 1:]
            maps.append((grad * may).clamp_min(0).mean(1).sum(1)[:, 1:] / asked)
    expected = torch.stack(maps).mean(0).reshape(2, *tubelets("timesformer")).float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))
    with pytest.raises(Unsupported, match="attends over time and over space in turn"):
        vitreous.explain(Model(net), video, "legrad", target=3, pool="readout")


@pytest.mark.slow
def test_divided_norms_are_dense_norms() -> None:
    """norm_attention, of which every copy of the CLS token as a key counts alone."""
    net = build("timesformer").double()
    trace = Trace(Model(net), clips().double())
    found = trace.explain("norm_attention", layer=-1).map
    layer = net.timesformer.encoder.layer[-1]
    _, matrices, _ = dense(net, clips().double())
    kept: list[Tensor] = []
    handle = layer.attention.attention.qkv.register_forward_hook(lambda module, args, out: kept.append(out))
    trace.model.run(clips().double())
    handle.remove()
    values = kept[0].reshape(2, FRAMES, 10, 3, 2, -1)[:, :, 1:, 2].flatten(1, 2)  # [B T·h·w H d]
    weight = layer.attention.output.dense.weight.reshape(12, 2, -1)  # [D H d]
    parts = torch.einsum("bhn,bnhd,chd->bnc", matrices[-1][:, :, 0, 1:], values, weight)
    torch.testing.assert_close(found, parts.norm(dim=-1).reshape(2, FRAMES, 3, 3).float(), rtol=1e-4, atol=1e-7)
    assert (trace.explain("norm_attention").map > 0).all()


# ---------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("kind", ["videomae", "timesformer"])
def test_gradients_are_autograds(kind: str) -> None:
    leaf = clips().clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(kind).run(leaf)[:, 2].sum(), leaf)
    found = vitreous.explain(model(kind), clips(), "gradient", target=2, reduce="sum").map
    assert found.shape == (2, FRAMES, SIDE, SIDE)
    torch.testing.assert_close(found, grad.sum(2), rtol=1e-4, atol=1e-6 * float(grad.abs().max()))
    product = vitreous.explain(model(kind), clips(), "input_x_gradient", target=2).map
    torch.testing.assert_close(product, (clips() * grad).sum(2), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_integrated_gradients_add_up(kind: str) -> None:
    found = vitreous.explain(model(kind), clips(), "integrated_gradients", target=2, steps=24)
    gained = model(kind).run(clips())[:, 2] - model(kind).run(torch.zeros_like(clips()))[:, 2]
    torch.testing.assert_close(found.map.sum((1, 2, 3)), gained.detach(), rtol=5e-2, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------- ablation


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAIN)
def test_ablation_leaves_a_tubelet_out(kind: str) -> None:
    """Against attention in which no query sees the token: the network with a mask of its own."""
    net, video = build(kind, "eager"), clips()[:1]
    found = vitreous.explain(Model(net), video, "token_ablation", target=1).map[0].flatten()
    layout = Model(net).layout
    whole = Model(net).run(video)[0, 1]
    for number in (0, 7, 13):
        token = layout.patch_tokens[number]
        with Without(token, layout.tokens):
            left = Model(net).run(video)
        torch.testing.assert_close(found[number], (whole - left[0, 1]).detach(), rtol=1e-3, atol=1e-5)


class Without(torch.overrides.TorchFunctionMode):
    """A token that no query attends to, and that no mean counts."""

    def __init__(self, token: int, tokens: int) -> None:
        super().__init__()
        self.token, self.tokens = token, tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.softmax, torch.softmax, Tensor.softmax) and args[0].shape[-1] == self.tokens:
            scores = args[0].clone()
            scores[..., self.token] = -torch.inf
            args = (scores, *args[1:])
        elif func in (Tensor.mean, torch.mean) and args[0].ndim == 3 and args[0].shape[1] == self.tokens:
            kept = [i for i in range(self.tokens) if i != self.token]
            args = (args[0][:, kept], *args[1:])
        return func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------------------------------- the whole battery


REFUSED = {  # what cannot work, and why
    "timesformer": "attends over time and over space in turn|block|module of its own|wrt=image",
    "vjepa2": "does not pass its tokens from block to block",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("kind", ALL)
def test_every_method_explains_videos(kind: str, name: str) -> None:
    """A map for each tubelet or pixel, the same for a video alone; or a refusal with its reason."""
    declared = METHODS[name]
    target = 1 if declared.targeted else None
    said = None
    try:
        both = vitreous.explain(model(kind), clips(), name, target, **declared.cheap).map
    except Unsupported as refusal:
        said = str(refusal)
    if said is not None:
        assert kind in REFUSED and re.search(REFUSED[kind], said), said
        return
    assert both.shape in ((2, *tubelets(kind)), (2, FRAMES, SIDE, SIDE))
    alone = vitreous.explain(model(kind), clips()[1:], name, target, **declared.cheap).map
    torch.testing.assert_close(both[1:], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vivit", "timesformer"])
@pytest.mark.parametrize("metric", ["deletion", "insertion", "road", "sensitivity_n", "max_sensitivity", "gini"])
def test_metrics_hide_tubelets(kind: str, metric: str) -> None:
    options: dict[str, Any] = {"sensitivity_n": {"subsets": 8}, "max_sensitivity": {"samples": 2}}.get(metric, {})
    for method in ("occlusion", "gradient"):
        found = vitreous.evaluate(model(kind), clips(), method, metric, target=1, **options)
        assert found.value.shape == (2,) and found.value.isfinite().all()


@pytest.mark.slow
def test_deletion_is_brute_force() -> None:
    """The curve of deletion, against videos in which the first tubelets of the order have the mean colour."""
    found = vitreous.explain(model("videomae"), clips()[:1], "occlusion", target=1)
    curve = vitreous.evaluate(model("videomae"), clips()[:1], found, "deletion", target=1, of="logit", steps=18).curve
    video, mean = clips()[:1].clone(), clips()[:1].mean((1, 3, 4), keepdim=True).expand_as(clips()[:1])
    heights = []
    for number in (None, *found.map[0].flatten().argsort(descending=True, stable=True).tolist()):
        if number is not None:
            place = model("videomae").layout.where(*map(int, np.unravel_index(number, (2, 3, 3))))
            video[place] = mean[place]
        heights.append(model("videomae").run(video)[0, 1].detach())
    assert curve is not None
    torch.testing.assert_close(curve[0], torch.stack(heights), rtol=1e-3, atol=1e-5)


def test_places_in_an_image_are_refused_for_videos() -> None:
    with pytest.raises(Unsupported, match=r"pointing_game compares a map with places in one image.*takes videos"):
        vitreous.evaluate(model("vivit"), clips(), "gae", "pointing_game", masks=[None, None])
    with pytest.raises(Unsupported, match="takes videos, and inspect works with images"):
        vitreous.inspect.heads(model("vivit"), clips()[:1])


# ------------------------------------------------------------------------------------------------- networks of users


class Joint(nn.Module):
    """A network of a user's, which takes [B C T Y X] and reads the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv3d(3, 12, (2, 8, 8), (2, 8, 8))
        layer = nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x).flatten(2).mT).mean(1))  # type: ignore[no-any-return]


def test_a_users_network_declares_its_axes() -> None:
    torch.manual_seed(0)
    net = Joint().eval()
    own = Model(net, frames=6, axes="BCTHW", preprocess=lambda image: torch.zeros(3, 16, 24))
    video = torch.randn(1, 6, 3, 16, 24)
    found = vitreous.explain(own, video, "occlusion", target=0)
    assert found.map.shape == (1, 3, 2, 3) and found.times == ((0, 2), (2, 4), (4, 6))
    hidden = video.clone()
    hidden[:, 2:4, :, 8:, :8] = video.mean((1, 3, 4), keepdim=True)
    with torch.no_grad():
        fall = net(video.transpose(1, 2)) - net(hidden.transpose(1, 2))
    torch.testing.assert_close(found.map[0, 1, 1, 0], fall[0, 0], rtol=1e-3, atol=1e-6)
    assert own.layout_at((4, 16, 24)).cells == (2, 2, 3)  # of another number of frames
    for wrong, said in (
        ({"axes": "TBCHW"}, "is not known"),
        ({"axes": "BCTHW"}, "frames"),
        ({"frames": 0}, "at least 1"),
    ):
        with pytest.raises(ModelError, match=said):
            Model(net, **wrong)  # type: ignore[arg-type]


def test_tensors_of_other_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"is not a batch of videos.*give \[B, T, 3, H, W\]"):
        vitreous.explain(model("vivit"), clips()[0, 0], "gradient", target=0)
    with pytest.raises(InputError, match=r"if the network takes videos, say so: Model\(net, frames=16\)"):
        Model(nn.Conv2d(3, 2, 4)).prepare(clips())
    with pytest.raises(ModelError, match="takes videos of 4 frames and failed on 6"):
        vitreous.explain(model("videomae"), clips(6), "gradient", target=0)


# -------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def frames() -> list[Image.Image]:
    """A bright square that crosses a dark image, and the number of the frame as its blue."""
    found = []
    for t in range(10):
        array = np.full((30, 40, 3), 30, np.uint8)
        array[8:20, 3 * t : 3 * t + 10, 0] = 250
        array[:, :, 2] = 20 * t
        found.append(Image.fromarray(array))
    return found


def blue(video: videos.Video) -> list[int]:
    return [int(np.asarray(frame)[0, 0, 2]) // 20 for frame in video.frames]


def test_frames_are_sampled_evenly(frames: list[Image.Image], tmp_path: Path) -> None:
    assert (
        videos.spread(10, 4) == (1, 3, 6, 8)
        and videos.spread(2, 4) == (0, 0, 1, 1)
        and videos.spread(3, 3) == (0, 1, 2)
    )
    folder = tmp_path / "clip"
    folder.mkdir()
    for number, frame in enumerate(frames):
        frame.save(folder / f"frame{number + 1}.png")  # frame10 comes last
    film = tmp_path / "clip.gif"
    frames[0].save(film, save_all=True, append_images=frames[1:], duration=50)
    array = np.stack([np.asarray(frame) for frame in frames])
    for source in (folder, frames, array, torch.from_numpy(array)):
        assert blue(videos.read(source, 4)) == [1, 3, 6, 8]
    assert videos.read(film, 4).picked == (1, 3, 6, 8)
    found = [vitreous.explain(model("vivit"), one, "gae", target=1) for one in (str(folder), frames, array[None])]
    assert torch.equal(found[0].map, found[1].map) and torch.equal(found[0].map, found[2].map)
    (told,) = found[0].provenance["sources"]
    assert told["path"] == str(folder) and len(told["sha256"]) == 64
    assert found[0].provenance["input"]["frames"] == FRAMES


def test_what_is_no_video_is_refused(
    frames: list[Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames[0].save(tmp_path / "one.gif")
    (tmp_path / "empty").mkdir()
    (tmp_path / "clip.mp4").write_bytes(b"no film")
    (tmp_path / "notes.txt").write_text("no film")
    monkeypatch.setattr(videos, "find_spec", lambda package: None)
    wrong = {
        "one.gif": "is a single image, and the model takes videos",
        "empty": "no images in this folder",
        "clip.mp4": r"no decoder for .mp4 files is installed: pip install 'vitreous\[video\]'",
        "notes.txt": "is not a video",
        "missing.gif": "no such file",
    }
    for name, said in wrong.items():
        with pytest.raises(InputError, match=said):
            videos.read(tmp_path / name, 4)
    with pytest.raises(InputError, match="different sizes"):
        videos.read([frames[0], frames[1].resize((8, 8))], 2)
    with pytest.raises(InputError, match="is not a video"):
        videos.read(np.zeros((4, 4, 3)), 2)
    with pytest.raises(InputError, match="has no frames"):
        videos.read([], 2)


def test_films_are_decoded(frames: list[Image.Image], tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as held:
        stream = held.add_stream("mpeg4", rate=10)
        stream.width, stream.height = frames[0].size
        for frame in frames:
            held.mux(stream.encode(av.VideoFrame.from_image(frame)))
        held.mux(stream.encode())
    found = videos.read(path, 4)
    assert found.picked == (1, 3, 6, 8)
    for frame, number in zip(found.frames, found.picked):
        assert np.abs(np.asarray(frame, float) - np.asarray(frames[number], float)).mean() < 15


# ------------------------------------------------------------------------------------------------- results and command


def test_maps_of_videos_are_kept_and_drawn(frames: list[Image.Image], tmp_path: Path) -> None:
    found = vitreous.explain(model("vivit"), [frames, frames[::-1]], "gae", target=1)
    assert found.names == ["video 0", "video 1"] and found[1].names == ["video 1"]
    again = Attribution.load(found.save(tmp_path / "maps.npz"))
    assert torch.equal(again.map, found.map) and again.times == found.times == ((0, 2), (2, 4))
    assert again.identity == found.identity
    assert found.resize((48, 64)).map.shape == (2, 2, 48, 64)
    assert found.overlay(index=1).width > 1.8 * found.overlay(index=1).height  # two tubelets side by side
    for one, name in ((found, "maps.png"), (again, "bare.png")):
        with Image.open(one.save(tmp_path / name)) as figure:
            assert figure.width > 300
    with Image.open(found[0].save(tmp_path / "maps.gif")) as film:
        assert getattr(film, "n_frames", 1) == FRAMES
    with pytest.raises(InputError, match="without its video"):
        again.save(tmp_path / "no.gif")


@pytest.mark.slow
def test_the_command_explains_videos(run: Any, frames: list[Image.Image], tmp_path: Path) -> None:
    build("videomae").save_pretrained(tmp_path / "net")
    for number, frame in enumerate(frames):
        (tmp_path / "album" / "walk").mkdir(parents=True, exist_ok=True)
        frame.save(tmp_path / "album" / "walk" / f"{number}.png")
    frames[0].save(tmp_path / "album" / "clip.gif", save_all=True, append_images=frames[1:])
    spec = f"hf/{tmp_path / 'net'}"
    run("explain", tmp_path / "album", "--model", spec, "--method", "gae,gradient", "--format", "png,npz,gif")
    out = Path("vitreous-out")
    for name in ("clip", "walk"):
        assert (out / f"{name}.png").is_file() and (out / f"{name}.gif").is_file()
        assert Attribution.load(out / f"{name}.npz", keys(out / f"{name}.npz")[0]).map.ndim == 4
    assert (out / "index.html").is_file()


def keys(path: Path) -> list[str]:
    with np.load(path) as held:
        return [key for key in held.files if "gae" in key]


def test_the_encoder_of_vjepa2_runs_without_its_predictor() -> None:
    own = model("vjepa2 encoder")
    with torch.no_grad():
        tokens = own.module(pixel_values_videos=clips(), skip_predictor=True).last_hidden_state
    torch.testing.assert_close(own.run(clips()), tokens[:, 0])  # before it is known that there is no CLS
    found = vitreous.explain(own, clips(), "rollout")
    assert found.map.shape == (2, *tubelets("vjepa2"))
    torch.testing.assert_close(own.run(clips()).detach(), tokens.mean(1))
    assert not any("predictor" in name for name in own.layout.blocks)
