"""Activation maximisation: units read as plain hooks read them, the ascent rises, borders vanish, nothing is left."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Run, off
from machine import ROUNDING
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous._support.marks import marked
from vitreous._support.progress import listening
from vitreous.cli.commands import maximize as command
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.inspect.maximize.canvas import AXES, SPREAD, START, Canvas, fourier_paint
from vitreous.inspect.maximize.maximize import maximize
from vitreous.inspect.maximize.penalty import border_ratio, discontinuity, distance_from_grey, total_variation
from vitreous.inspect.maximize.transform import drawn, moved, noisy, recoloured
from vitreous.inspect.maximize.unit import look, parse_units, split_units

QUICK: dict[str, Any] = {"copies": 1, "jitter": 4, "scale": 0.1, "rotate": 5.0, "noise": 0.05, "colour": 0.1}
PLAIN: dict[str, Any] = {
    "copies": 1, "jitter": 0, "scale": 0.0, "rotate": 0.0, "noise": 0.0, "colour": 0.0, "tv": 0.0, "continuity": 0.0
}  # fmt: skip
UNITS = [
    "class:3",
    "neuron:2",
    "block:1/channel:4",
    "token:1/cls",
    "token:2/1,2",
    "token:0/5/channel:3",
    "head:0/1/q:2",
    "head:2/0/k:15",
]


# --------------------------------------------------------------------------------------------------------------- units


def hooked(net: nn.Module, images: Tensor, *places: str) -> tuple[Tensor, list[Tensor]]:
    """The output, and what leaves the named modules, by the user's own hooks."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, out: seen.__setitem__(name, out[0] if isinstance(out, tuple) else out)

    hooks = [net.get_submodule(name).register_forward_hook(keep(name)) for name in places]
    out = net(images)
    for hook in hooks:
        hook.remove()
    return getattr(out, "logits", out), [seen[name] for name in places]


def timm_units(images: Tensor) -> dict[str, Tensor]:
    net = zoo.network("timm ViT")
    names = [f"blocks.{i}" for i in range(3)] + ["blocks.0.attn.qkv", "blocks.2.attn.qkv"]
    logits, (zero, one, two, first, last) = hooked(net, images, *names)
    q = first[:, :, :32].unflatten(2, (2, 16))  # [B N H d]
    k = last[:, :, 32:64].unflatten(2, (2, 16))
    return {
        "class:3": logits[:, 3],
        "neuron:2": logits[:, 2],
        "block:1/channel:4": one[:, 1:, 4].mean(1),
        "token:1/cls": one[:, 0].square().sum(1).sqrt(),
        "token:2/1,2": two[:, 1 + 1 * 4 + 2].square().sum(1).sqrt(),
        "token:0/5/channel:3": zero[:, 5, 3],
        "head:0/1/q:2": q[:, 1:, 1, 2].mean(1),
        "head:2/0/k:15": k[:, 1:, 0, 15].mean(1),
    }


def hf_units(images: Tensor) -> dict[str, Tensor]:
    net = zoo.network("HF ViT sdpa")
    stem = next(n for n, _ in net.named_modules() if n.endswith(("layer.1", "layers.1")))
    query = next(n for n, _ in net.get_submodule(stem).named_modules() if n.endswith(("query", "q_proj")))
    logits, (block, q) = hooked(net, images, stem, f"{stem}.{query}")
    return {
        "class:3": logits[:, 3],
        "block:1/channel:4": block[:, 1:, 4].mean(1),
        "token:1/cls": block[:, 0].norm(dim=1),
        "head:1/1/q:2": q[:, 1:, 16 + 2].mean(1),
    }


def torchvision_units(images: Tensor) -> dict[str, Tensor]:
    net: Any = zoo.network("torchvision ViT")
    stem = "encoder.layers.encoder_layer_2"
    logits, (block, normed) = hooked(net, images, stem, f"{stem}.ln_1")
    mha = net.get_submodule(f"{stem}.self_attention")
    k = F.linear(normed, mha.in_proj_weight[32:64], mha.in_proj_bias[32:64])
    return {
        "class:3": logits[:, 3],
        "token:2/3,3/channel:1": block[:, 16, 1],
        "head:2/1/k:7": k[:, 1:, 16 + 7].mean(1),
    }


def sequence_units(images: Tensor) -> dict[str, Tensor]:
    logits, (block,) = hooked(zoo.network("sequence first"), images, "body.layers.1")  # [N B D]
    return {"class:0": logits[:, 0], "block:1/channel:9": block[1:, :, 9].mean(0), "token:1/cls": block[0].norm(dim=1)}


def hand_units(images: Tensor) -> dict[str, Tensor]:
    logits, (block,) = hooked(zoo.network("hand-written"), images, "second")  # CLS is the last token
    return {
        "class:6": logits[:, 6],
        "block:1/channel:9": block[:, :16, 9].mean(1),
        "token:1/cls": block[:, 16].norm(dim=1),
    }


READ = {
    "timm ViT": timm_units,
    "HF ViT sdpa": hf_units,
    "torchvision ViT": torchvision_units,
    "sequence first": sequence_units,
    "hand-written": hand_units,
}


@pytest.mark.parametrize("name", READ)
def test_units_and_their_gradients_are_those_of_plain_hooks(name: str) -> None:
    images = zoo.images(name, 2)
    trace = Trace(zoo.model(name), images)
    theirs = images.clone().requires_grad_()
    for text, value in READ[name](theirs).items():
        (expected,) = torch.autograd.grad(value.sum(), theirs, retain_graph=True)
        leaf = images.clone().requires_grad_()
        (unit,) = parse_units(text, trace)
        ours = look(trace, leaf, [unit], grad=True)
        (grad,) = torch.autograd.grad(ours.sum(), leaf)
        torch.testing.assert_close(ours, value.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_each_unit_reads_its_own_images() -> None:
    images = zoo.images("timm ViT", 4)
    trace = Trace(zoo.model("timm ViT"), images)
    units = parse_units(["block:1/channel:4", "class:3"], trace)
    expected = timm_units(images)
    wanted = torch.cat([expected["block:1/channel:4"][:2], expected["class:3"][2:]]).detach()
    torch.testing.assert_close(look(trace, images, units, grad=False), wanted, rtol=1e-5, atol=1e-6)


def test_a_shallow_unit_stops_the_run_unless_someone_listens() -> None:
    net = zoo.HandWritten()
    calls: list[int] = []
    inner = net.third.forward
    net.third.forward = lambda x: calls.append(1) or inner(x)  # type: ignore[method-assign,func-returns-value]
    trace = Trace(Model(net, name="counted"), zoo.images("hand-written", 1))
    (unit,) = parse_units("block:1/channel:0", trace)
    calls.clear()
    value = look(trace, trace.images, [unit], grad=False)
    assert not calls
    handle = net.third.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(look(trace, trace.images, [unit], grad=False), value)
    handle.remove()
    assert calls == [1]


def test_units_print_as_they_are_written() -> None:
    trace = Trace(vitreous.load(), torch.zeros(1, 3, 224, 224))
    for text in [*UNITS, "class:tench", "class:tiger cat", "class:tench-goldfish", "token:11/13,13/channel:191"]:
        (unit,) = parse_units(text, trace)
        assert str(unit) == text and str(*parse_units(str(unit), trace)) == text
    assert [str(u) for u in parse_units([5, vitreous.Class(6), vitreous.Neuron(2)], trace)] == [
        "class:5", "class:6", "neuron:2"
    ]  # fmt: skip
    several = "class:tench, token:3/2,5,block:0/channel:1"
    assert split_units(several) == ["class:tench", "token:3/2,5", "block:0/channel:1"]
    assert len(parse_units([several, "class:1"], trace)) == 4


WRONG = {
    "block:3/channel:0": "block 3 is out of range: timm-vit has blocks 0 to 2",
    "head:7/0/q:1": "layer 7 is out of range: timm-vit has layers 0 to 2",
    "block:1/channel:32": "channel 32 is out of range: there are channels 0 to 31",
    "head:1/2/q:1": "head 2 is out of range: there are heads 0 to 1",
    "head:1/1/k:16": "channel 16 is out of range: there are channels 0 to 15",
    "token:1/17": "token 17 is out of range: there are tokens 0 to 16",
    "token:1/4,0": "row 4 is out of range: there are rows 0 to 3",
    "token:1/cls/channel:40": "channel 40 is out of range",
    "class:7": "class 7 is out of range",
    "class:": "unknown class ''",
    "class:top-1": "another class for every image",
    "class:1;2": "several targets",
    "neuron:x": "is not a number",
    "tench": "'tench' is not a unit; write class:NAME",
    "block:1": "'block:1' is not a unit",
    "head:1/0/v:1": "is not a unit",
    "block:-1/channel:0": "is not a unit",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_units_are_named(text: str) -> None:
    with pytest.raises(TargetError, match=WRONG[text].replace("(", r"\(")):
        maximize(zoo.model("timm ViT"), text, steps=1, **QUICK)


def test_what_a_model_does_not_have_is_said() -> None:
    def fails(name: str, unit: Any, kind: type[Exception], said: str) -> None:
        with pytest.raises(kind, match=said):
            maximize(zoo.model(name), unit, steps=1, **QUICK)

    fails("HF CLIP vision sdpa", "class:1", TargetError, "has no classifier")
    fails("timm SigLIP", "token:0/cls", TargetError, "has no CLS token")
    fails("timm Swin", "head:0/0/q:1", Unsupported, "windows, so its heads have no query")
    fails("flat heads", "block:0/channel:1", Unsupported, "does not keep each layer in a module")
    fails("timm ViT", [], TargetError, "no unit to maximise")
    fails("timm ViT", 3.5, TargetError, "'3.5' is not a unit")


def test_a_unit_that_sees_nothing_is_refused() -> None:
    class Blind(zoo.HandWritten):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x)[:, :-1], 0 * x.mean((1, 2, 3))[:, None]], 1)

    with pytest.raises(Unsupported, match="class:6 does not depend on the image"):
        maximize(Model(Blind(), classifier=True, name="blind"), "class:6", steps=1, **QUICK)


# --------------------------------------------------------------------------------------------- canvas, views, penalties


def test_the_fourier_canvas_is_a_scaled_spectrum() -> None:
    size, decay = (12, 10), 0.8
    z = torch.randn(2, 3, 12, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = np.hypot(np.fft.fftfreq(12)[:, None], np.fft.rfftfreq(10)[None])
    weights = np.maximum(f, 1 / 12) ** -decay
    weights /= np.sqrt(2 * (weights**2).mean())
    spectrum = (z[..., 0].numpy() + 1j * z[..., 1].numpy()) * weights
    planes = np.fft.irfft2(spectrum, s=size, norm="ortho")
    axes = np.array(AXES, float) / np.linalg.norm(AXES, axis=1, keepdims=True) * np.array(SPREAD)[:, None]
    axes /= np.sqrt((axes**2).sum(0).mean())
    logits = sum(planes[:, i, None] * axes[i][None, :, None, None] for i in range(3))
    ours = fourier_paint(size, decay, torch.zeros((), dtype=torch.float64))(z)
    np.testing.assert_allclose(ours.numpy(), 1 / (1 + np.exp(-logits)), atol=1e-6)


@pytest.mark.parametrize("fourier", [True, False])
def test_canvases_begin_near_grey_and_depend_on_their_key(fourier: bool) -> None:
    keys = torch.tensor([3, 4, 3])
    images = Canvas(keys, (64, 48), fourier, 1.0, torch.zeros(())).image().detach()
    assert images.shape == (3, 3, 64, 48) and bool(((images > 0) & (images < 1)).all())
    assert off(images[0], images[2]) <= ROUNDING and off(images[0], images[1]) > 1e-3
    assert 0.5 * START < torch.logit(images).std() < 2 * START
    alone = Canvas(keys[1:2], (64, 48), fourier, 1.0, torch.zeros(())).image().detach()
    assert off(alone[0], images[1]) <= ROUNDING


def test_jitter_is_a_shift_of_the_mirrored_picture() -> None:
    images = torch.rand(2, 3, 20, 24)
    draws = torch.zeros(2, 10)
    draws[:, :2] = torch.tensor([[0.5, -1.0], [1.0, 0.25]])
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), mode="symmetric")
    for i, (right, down) in enumerate([(2, -4), (4, 1)]):
        expected = padded[i, :, 4 + down : 24 + down, 4 + right : 28 + right]
        np.testing.assert_allclose(moved(images, draws, 4, 0.0, 0.0)[i].numpy(), expected, atol=1e-5)
    assert moved(images, draws, 0, 0.0, 0.0) is images


def test_turns_and_sizes_are_the_ones_asked_for() -> None:
    square = torch.rand(1, 3, 20, 20)
    quarter = torch.zeros(1, 10)
    quarter[0, 3] = 1.0
    torch.testing.assert_close(moved(square, quarter, 0, 0.0, 90.0), square.rot90(1, (2, 3)), atol=1e-4, rtol=0)
    larger = torch.zeros(1, 10)
    larger[0, 2] = -1.0  # sees half as much
    blown = F.interpolate(square[..., 5:15, 5:15], scale_factor=2, mode="bilinear")
    torch.testing.assert_close(moved(square, larger, 0, 1.0, 0.0)[..., 2:-2, 2:-2], blown[..., 2:-2, 2:-2])


def test_draws_depend_on_key_and_step_alone_and_are_even() -> None:
    one, both = drawn(torch.tensor([7]), 2, 5), drawn(torch.tensor([3, 7]), 2, 5)
    assert off(one, both[2:]) <= ROUNDING and off(one[0], one[1]) > 1e-3
    assert off(one, drawn(torch.tensor([7]), 2, 6)) > 1e-3
    many = drawn(torch.arange(400), 4, 0)
    assert many.abs().max() <= 1 and many.mean().abs() < 0.02 and abs(many.std() - 3**-0.5) < 0.02
    images = torch.full((4, 3, 8, 8), 0.25)
    keys = torch.tensor([3, 7])
    spread = noisy(images, keys, 2, 1, 0.5) - images
    assert 0.4 < spread.std() < 0.6
    assert off(noisy(images[2:], keys[1:], 2, 1, 0.5), images[2:] + spread[2:]) <= ROUNDING
    draws = drawn(keys, 2, 0)
    expected = 0.5 - 0.25 * (0.3 * draws[1, 5]).exp() + 0.15 * draws[1, 8]
    torch.testing.assert_close(recoloured(images, draws, 0.3)[1, 1], expected.expand(8, 8))


def slow_energies(image: np.ndarray, patch: tuple[int, int]) -> tuple[list[float], list[float]]:
    """Squared steps across borders and inside, one by one."""
    border, inside = [], []
    for c, y, x in np.ndindex(*image.shape):
        for at, side, there in ((y, patch[0], (c, y + 1, x)), (x, patch[1], (c, y, x + 1))):
            if there[1] < image.shape[1] and there[2] < image.shape[2]:
                (border if (at + 1) % side == 0 else inside).append((image[there] - image[c, y, x]) ** 2)
    return border, inside


def test_border_ratio_is_the_ratio_of_squared_steps() -> None:
    images = torch.rand(2, 3, 12, 24, dtype=torch.float64)
    images[1, :, :, :8] += 1.0
    ours = border_ratio(images, (4, 8))
    for image, ratio in zip(images.numpy(), ours.tolist(), strict=True):
        border, inside = slow_energies(image, (4, 8))
        assert ratio == pytest.approx(np.mean(border) / np.mean(inside))
    assert ours[1] > ours[0]


def test_a_checkerboard_shows_in_the_border_ratio() -> None:
    inside, border = 0.01, 0.07
    steps = torch.tensor([border if i % 8 == 0 else inside for i in range(1, 32)], dtype=torch.float64)
    line = torch.cat([torch.zeros(1), steps]).cumsum(0)
    picture = (line[:, None] + line[None]).expand(1, 3, 32, 32)
    assert border_ratio(picture, (8, 8)).item() == pytest.approx((border / inside) ** 2)
    smooth = torch.linspace(0, 1, 32).expand(1, 3, 32, 32)
    assert border_ratio(smooth, (8, 8)).item() == pytest.approx(1, rel=1e-4)
    assert border_ratio(picture, (32, 32)).isnan().all()


def test_penalties_are_their_formulas() -> None:
    images = torch.rand(1, 3, 8, 12, dtype=torch.float64)
    image = images[0].numpy()
    assert distance_from_grey(images).item() == pytest.approx(((image - 0.5) ** 2).sum() / 2)
    down, across = np.diff(image, axis=1)[:, :, :-1], np.diff(image, axis=2)[:, :-1]
    assert total_variation(images).item() == pytest.approx(np.sqrt(down**2 + across**2 + 1e-8).sum())
    total = 0.0
    for plane, side in ((image, 4), (image.transpose(0, 2, 1), 4)):
        steps = np.diff(plane, axis=2) ** 2  # [3 Y X−1]
        for line in range(side, plane.shape[2], side):
            near = [steps[:, :, x].mean() for x in range(line - side, line + side - 1) if x != line - 1]
            total += 3 * plane.shape[1] / 2 * max(0.0, steps[:, :, line - 1].mean() - np.mean(near))
    assert discontinuity(images, (4, 4)).item() == pytest.approx(total)
    assert discontinuity(torch.linspace(0, 1, 8).expand(1, 3, 8, 8), (4, 4)).item() == pytest.approx(0, abs=1e-9)


# --------------------------------------------------------------------------------------------------------------- ascent


RISES = {
    "timm ViT": UNITS,
    "timm DINOv3": ["block:2/channel:5", "head:1/0/q:3", "token:2/cls"],
    "timm Swin": ["class:2", "block:1/channel:5", "token:3/1,1"],
    "torchvision ViT": ["class:2", "head:1/1/k:3"],
    "open_clip ViT-B-32": ["neuron:4", "block:0/channel:3"],
    "HF DINOv2 registers eager": ["block:1/channel:3", "token:1/cls", "head:1/1/q:3"],
    "sequence first": ["class:1", "token:1/2,2", "head:0/0/q:1"],
    "flat heads": ["class:5"],
}


@pytest.mark.parametrize("name", RISES)
def test_the_activation_rises(name: str) -> None:
    views = {**PLAIN, "jitter": 2, "noise": 0.02, "tv": 0.01, "continuity": 1.0}
    found = maximize(zoo.model(name), RISES[name], steps=8, rate=0.2, **views)
    assert found.units == tuple(RISES[name]) and len(found) == len(RISES[name])
    assert bool((found.final > found.start).all()), (found.start, found.final)
    assert found.activation.shape == (len(found), 8) and found.images.shape[2:] == zoo.model(name).size


def test_the_last_activation_is_that_of_the_picture_in_the_file(tmp_path: Path) -> None:
    model = zoo.model("timm ViT")
    found = maximize(model, ["class:3", "block:1/channel:4"], steps=4, **QUICK)
    for i, unit in enumerate(found.units):
        pixels = np.asarray(Image.open(found.save_image(tmp_path / f"{i}.png", i)), np.float32) / 255
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        mean, std = (torch.tensor(c).reshape(1, 3, 1, 1) for c in (model.preprocess.mean, model.preprocess.std))
        expected = timm_units((image - mean) / std)[unit]
        assert found.final[i].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)


def test_a_picture_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(copy.deepcopy(zoo.network("timm ViT")).double(), name="double")
    units, options = ["class:3", "head:0/1/q:2", "token:1/cls"], {**QUICK, "copies": 2, "steps": 6}
    together = maximize(model, units, **options)
    for i, unit in enumerate(units):
        alone = maximize(model, unit, **options)
        torch.testing.assert_close(together.activation[i], alone.activation[0], rtol=1e-5, atol=1e-7)
        assert (together.images[i] - alone.images[0]).abs().max() < 1.5 / 255
    with vitreous.limit_memory(1000):  # one at a time
        apart = maximize(model, units, **options)
    assert apart.units == together.units and apart.film.shape == together.film.shape
    torch.testing.assert_close(apart.activation, together.activation, rtol=1e-5, atol=1e-7)


def test_a_seed_gives_the_same_pictures_again() -> None:
    model = zoo.model("timm ViT")
    torch.manual_seed(0)
    one = maximize(model, "class:1", steps=3, seed=5, **QUICK)
    torch.manual_seed(1)
    again = maximize(model, ["class:1", "class:2"], steps=3, seed=[5, 6], **QUICK)
    assert again.units == ("class:1", "class:1", "class:2", "class:2") and again.seeds == (5, 6, 5, 6)
    assert levels(one.film[0, 0], again.film[0, 0]) <= 1
    assert (one.images[0] - again.images[0]).abs().max() < 1.5 / 255
    assert off(again.images[0], again.images[1]) > 1e-3
    assert levels(again.film[0, 0], again.film[2, 0]) <= 1 < levels(again.film[0, 0], again.film[1, 0])
    # units begin alike, seeds do not


def levels(one: Tensor, other: Tensor) -> int:
    """How far two frames of a film are apart at most; a level of brightness is a matter of rounding."""
    return int((one.int() - other.int()).abs().max())


def test_continuity_takes_the_checkerboard_away() -> None:
    model = zoo.model("timm ViT")
    options = {**PLAIN, "canvas": "pixel", "steps": 30, "rate": 0.1}
    without = maximize(model, ["class:1", "block:1/channel:3"], **options)
    smooth = maximize(model, ["class:1", "block:1/channel:3"], **{**options, "continuity": 2.0})
    assert bool((smooth.border_ratio < without.border_ratio).all())
    assert bool((smooth.final > without.final - 0.1 * (without.final - without.start).abs()).all())


def test_penalties_do_what_they_say() -> None:
    model, options = zoo.model("timm ViT"), {**PLAIN, "steps": 15, "rate": 0.2}
    plain = maximize(model, "class:1", **options)
    grey = maximize(model, "class:1", **{**options, "l2": 20.0})
    smooth = maximize(model, "class:1", **{**options, "tv": 2.0})
    assert distance_from_grey(grey.images) < 0.7 * distance_from_grey(plain.images)
    assert total_variation(smooth.images) < 0.7 * total_variation(plain.images)


def test_nothing_is_left_on_the_model() -> None:
    net = copy.deepcopy(zoo.network("timm ViT")).train()
    net.head.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in net.named_parameters()}
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    model = Model(net, name="train")
    with torch.inference_mode():
        maximize(model, UNITS[:4], steps=2, **QUICK)
    with pytest.raises(TargetError):
        maximize(model, "block:0/channel:99", steps=2, **QUICK)
    assert net.training and all(module.training for module in net.modules())
    assert {name: p.requires_grad for name, p in net.named_parameters()} == flags
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_other_precisions() -> None:
    net = copy.deepcopy(zoo.network("timm ViT")).bfloat16()
    found = maximize(Model(net, name="half"), ["class:1", "block:1/channel:3"], steps=8, rate=0.2, **QUICK)
    assert found.images.dtype == torch.float32 and bool((found.final > found.start).all())
    with torch.autocast("cpu", torch.bfloat16):
        mixed = maximize(zoo.model("timm ViT"), "class:1", steps=8, rate=0.2, **QUICK)
    assert mixed.images.dtype == torch.float32 and bool((mixed.final > mixed.start).all())


class Impatient:
    """Presses Ctrl-C after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def begin(self, what: str, total: int) -> Any:
        self.what = what
        return None

    def move(self, task: Any, done: int) -> None:
        if done == self.steps:
            raise KeyboardInterrupt

    def end(self, task: Any) -> None:
        pass


def test_ctrl_c_keeps_what_there_is() -> None:
    listener = Impatient(3)
    with listening(listener), vitreous.limit_memory(1000):
        found = maximize(zoo.model("timm ViT"), ["class:1", "class:2"], steps=9, **QUICK)
    assert listener.what == "maximizing class:1, steps"
    assert found.stopped and found.units == ("class:1",) and found.activation.shape == (1, 3)
    whole = maximize(zoo.model("timm ViT"), "class:1", steps=9, **QUICK)
    torch.testing.assert_close(found.activation[0, 0], whole.activation[0, 0])
    assert not whole.stopped


@pytest.mark.slow
def test_results_are_kept_and_drawn(tmp_path: Path) -> None:
    found = maximize(zoo.model("timm ViT"), ["class:1", "token:1/cls"], steps=40, **PLAIN)
    assert found.film.shape[:2] == (2, 32)
    np.testing.assert_array_equal(np.asarray(found.picture(1)), found.film[1, -1].permute(1, 2, 0).numpy())
    with np.load(found.save(tmp_path / "x.npz")) as stored:
        np.testing.assert_array_equal(stored["images"], found.images.numpy())
        told = json.loads(str(stored["provenance"]))
    assert told == marked(found.mark) and told["options"]["steps"] == 40 and told["units"] == ["class:1", "token:1/cls"]
    with Image.open(found.save_gif(tmp_path / "x.gif", 1)) as film:
        assert film.n_frames > 20 and film.size == (256, 256)
    for name, part in (("one.png", found[1]), ("all.png", found)):
        with Image.open(part.save(tmp_path / name)) as drawn_figure:
            assert min(drawn_figure.size) > 500
    assert found[1].units == ("token:1/cls",) and found[-1].final == found.final[1:]
    assert found._repr_png_().startswith(b"\x89PNG")
    for wrong in (lambda: found.save(tmp_path / "x.doc"), lambda: found.save_gif(tmp_path / "x.png")):
        with pytest.raises(OptionError):
            wrong()


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"rate": 0.0}, {"copies": 0}, {"jitter": -1}, {"tv": -1.0}, {"seed": -1}, {"decay": 9.0}]
)
def test_options_have_bounds(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"maximize\.{next(iter(options))} takes "):
        maximize(zoo.model("timm ViT"), "class:1", **options)


# -------------------------------------------------------------------------------------------------------------- command


def test_the_command_has_the_same_defaults() -> None:
    options = inspect.signature(maximize).parameters
    given = inspect.signature(command).parameters
    own = [name for name, p in options.items() if p.kind is p.KEYWORD_ONLY and name != "seed"]
    assert {name: given[name].default for name in own} == {name: options[name].default for name in own}


@pytest.mark.slow
def test_the_command_writes_pictures(run: Run) -> None:
    result = run("maximize", "-u", "class:tench,token:3/2,5", "-u", "class:7", "--steps", 2, "--copies", 1, "-o", "out")
    assert result.code == 0
    for name in ("class-tench", "token-3-2-5", "class-7"):
        for ending in (".png", ".image.png", ".gif", ".npz"):
            assert Path(f"out/{name}{ending}").is_file()
        assert f"out/{name}.png" in result.out
    assert Path("out/maximized.png").is_file()
    assert "class:7 cock: activation" in result.out and "patch borders" in result.out
    with Image.open("out/class-7.image.png") as picture:
        assert picture.size == (224, 224)


def test_the_command_in_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitreous.cli import arguments

    monkeypatch.setattr(arguments, "load_model", lambda *args: zoo.model("timm ViT"))
    result = run("maximize", "-u", "class:1", "--seed", 3, "--seed", 4, "--steps", 2, "--json")
    told = json.loads(result.out)
    assert [entry["seed"] for entry in told["pictures"]] == [3, 4] and told["steps_done"] == 2 and not told["stopped"]
    for entry in told["pictures"]:
        assert entry["unit"] == "class:1" and Path(entry["figure"]).name == f"class-1-seed-{entry['seed']}.png"
        assert all(Path(entry[kind]).is_file() for kind in ("figure", "image", "film", "numbers"))
    with listening(Impatient(1)):
        stopped = run("maximize", "-u", "class:1", "--steps", 5)
    assert stopped.code == 130 and "stopped after 1 of 5 steps" in stopped.out and "interrupted" in stopped.err
    assert "block 9 is out of range" in run("maximize", "-u", "block:9/channel:1").error
    assert "maximize.steps takes a whole number ≥ 1" in run("maximize", "-u", "class:1", "--steps", 0).error
