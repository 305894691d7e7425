"""What once ended in an exception of another library, in a wrong reason or in a map of zeros."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from conftest import Run, off
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.cli import arguments, explained
from vitreous.errors import EmptyMap, ModelError, Unsupported
from vitreous.models.libraries import cropped
from vitreous.plot.sheet import Sheet
from vitreous.registry import METHODS
from vitreous.trace.target import Class

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = zoo.timm("vit_tiny_patch16_224", **options)().eval()
    return net


# ---------------------------------------------------------------------------------------------------------- batch norm


class Normed(nn.Module):
    """Tokens that become channels of an image, a batch norm, and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.mix = nn.Conv2d(3, 6, 8, 8), nn.Linear(6, 6)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 3)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.mix(self.cut(x).flatten(2).mT)
        h, w = x.shape[2] // 8, x.shape[3] // 8
        normed = self.norm(tokens.mT.reshape(len(x), 6, h, w)).flatten(2).mT
        return self.head((normed.tanh() * tokens).mean(1))


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_through_batch_norm(batch: int) -> None:
    """Against finite differences: on a CPU, torch's own gradient is wrong for one image."""
    net = Normed().eval().double()
    images = torch.randn(batch, 3, 24, 40, dtype=torch.float64)
    trace = Trace(Model(net), images)
    record = trace.pixels()
    (grad,) = torch.autograd.grad(trace.score(Class(1), record).sum(), [record.images])
    step = torch.randn_like(images) * 1e-5
    with torch.no_grad():
        expected = (net(images + step) - net(images - step))[:, 1].sum() / 2
    assert float((grad * step).sum()) == pytest.approx(float(expected), rel=1e-6)


# ---------------------------------------------------------------------------------------------- no visible attention


def test_dropping_tokens_where_there_are_none_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    for metric in ("token_deletion", "srg"):
        with pytest.raises(Unsupported, match="shows no attention"):
            vitreous.evaluate(net, IMAGES, "gradient", metric, target=0)
    assert vitreous.evaluate(net, IMAGES, "gradient", "deletion", target=0).value.isfinite().all()


def test_tokens_behind_a_convolutional_stem_can_be_dropped() -> None:
    net = vit()
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 4, 1), nn.GELU(), nn.Conv2d(32, 32, 3, 4, 1))
    net.patch_embed.proj = stem  # type: ignore[union-attr]
    found = vitreous.explain(net, IMAGES, "token_ablation", 0).map

    def score(tokens: Tensor) -> Tensor:
        out: Tensor = net.head(net.norm(net.blocks(tokens))[:, 0])[:, 0]  # type: ignore[operator]
        return out

    with torch.no_grad():
        t = net.norm_pre(net._pos_embed(net.patch_embed(IMAGES)))  # type: ignore[operator]
        each = [score(t) - score(torch.cat([t[:, : i + 1], t[:, i + 2 :]], 1)) for i in range(16)]
    assert off(found, torch.stack(each, 1).view(2, 4, 4)) < 1e-3
    assert vitreous.evaluate(net, IMAGES, "gradient", "token_deletion", target=0).value.isfinite().all()


# ------------------------------------------------------------------------------------------------------- preprocessing


def test_float_tensors_need_no_preprocessing() -> None:
    def never(image: Image.Image) -> Tensor:
        raise AssertionError("nobody asked for it")

    model = Model(vit(), preprocess=never)
    made = vitreous.explain(model, IMAGES, "attention")
    assert made[1].names == ["image 1"]
    assert vitreous.evaluate(model, IMAGES, made, "deletion", target=0).value.isfinite().all()
    with pytest.raises(ModelError, match="failed on a 60×64 image"):
        vitreous.explain(Model(vit(), preprocess=lambda image: None), IMAGES[:, :, :60], "attention")


def test_processors_of_other_kinds() -> None:
    transformers = zoo.library("transformers", "hf")
    config = transformers.CvtConfig(depth=[1, 2, 3], embed_dim=[8, 16, 32], num_heads=[1, 1, 2])
    model = Model(transformers.CvtForImageClassification(config).eval())
    assert vitreous.explain(model, IMAGES, "gradient", 0).map.shape == (2, 64, 64)
    assert model.size == (224, 224)
    args = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=7, model_args=args)
    assert Model(transformers.TimmWrapperForImageClassification(config).eval()).preprocess.size is not None


# ---------------------------------------------------------------------------------------------------------------- int8


def test_int8_weights_have_no_gradients() -> None:
    with pytest.warns():
        quantised = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, dtype=torch.qint8)
    model = Model(quantised)
    assert vitreous.explain(model, IMAGES, "attention").map.abs().max() > 0, "the first thing that is asked of it"
    for method in ("gradient", "legrad", "gae", "cdam", "gradcam", "attn_lrp"):
        with pytest.raises(Unsupported, match="int8"):
            vitreous.explain(model, IMAGES, method, 0)
    for method in ("attention", "rollout", "occlusion"):
        assert vitreous.explain(model, IMAGES, method, 0).map.abs().max() > 0
    with pytest.raises(Unsupported, match="int8"):
        vitreous.explain(model, IMAGES, "token_ablation", 0)


# -------------------------------------------------------------------------------------------------------- right reasons


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = vit()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self.net(x) - self.net(other)
        return out


def test_missing_arguments_are_named() -> None:
    with pytest.raises(ModelError, match=r"needs the argument other; .* net\(x, other=…\)"):
        vitreous.explain(Two(), IMAGES, "gradient", 0)


class OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = vit(), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.net.forward_features(x)[:, 1:])  # type: ignore[operator]
        return found


def test_the_hint_for_outputs_of_tokens_works() -> None:
    net = OfTokens().eval()
    with pytest.raises(ModelError, match="not one vector per image") as told:
        vitreous.explain(net, IMAGES, "gae", 0)
    followed = eval(str(told.value).split("e.g. ")[1], {"Model": Model, "net": net})
    assert vitreous.explain(followed, IMAGES, "gae", 0).map.shape == (2, 4, 4)


def test_other_inputs_beside_the_images() -> None:
    """legrad adds rows behind the blocks, which other inputs do not have: another reason than the image size."""
    net, head, more = vit(num_classes=0), nn.Linear(36, 5), torch.randn(1, 4)
    joined = nn.ModuleDict({"net": net, "head": head})
    model = Model(joined, forward=lambda x: head(torch.cat([net(x), more.expand(len(x), -1)], 1)), classifier=True)
    with pytest.raises(Unsupported, match="as many rows"):
        vitreous.explain(model, IMAGES, "legrad", 0)
    assert vitreous.explain(model, IMAGES, "gae", 0).map.any()


# ------------------------------------------------------------------------------------------------------------- the net


def forgetful(*classes: int) -> Model:
    """A model for which these classes are constants."""
    net = vit()
    with torch.no_grad():
        net.head.weight[list(classes)] = 0  # type: ignore[union-attr,operator,index]
    return Model(net)


@pytest.mark.parametrize("method", ["gae", "gradient", "occlusion", "token_ablation"])
def test_a_map_of_zeros_is_an_error(method: str) -> None:
    model = forgetful(2)
    with pytest.raises(EmptyMap, match=rf"{method}: the map is zero everywhere \(image 1, .*target 2\)"):
        vitreous.explain(model, IMAGES, method, [0, 2])
    assert vitreous.explain(model, IMAGES, method, 0).map.any()


def test_a_map_that_is_not_finite_is_an_error() -> None:
    net = vit()
    with torch.no_grad():
        net.head.weight[3] = torch.inf  # type: ignore[union-attr,operator,index]
    with pytest.raises(EmptyMap, match="the map is not finite"):
        vitreous.explain(net, IMAGES, "gradient", 3)


def test_controls_may_be_zero() -> None:
    from vitreous.trace.apply import faults

    assert faults(METHODS["centre"], torch.zeros(2, 4, 4)) == {}
    assert faults(METHODS["gae"], torch.stack([torch.zeros(4, 4), torch.ones(4, 4)])).keys() == {0}


def test_one_empty_map_does_not_lose_the_others(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Input times gradient of an image that is zero."""
    model = Model(vit(), preprocess=cropped((64, 64), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    monkeypatch.setattr(arguments, "load_model", lambda *_: model)
    monkeypatch.setattr(explained, "explanation_figure", lambda *_, **more: Sheet(1, 1))
    (tmp_path / "in").mkdir()
    for name, level in (("a", 9), ("b", 0), ("c", 200)):
        Image.new("RGB", (64, 64), (level,) * 3).save(tmp_path / "in" / f"{name}.png")
    out = tmp_path / "out"
    got = run("explain", tmp_path / "in", "--method", "input_x_gradient", "--out", out, "--json")
    assert got.code == 0, got.err
    told = json.loads(got.out)
    assert [Path(one["image"]).name for one in told["images"]] == ["a.png", "c.png"]
    assert "b.png" in told["failed"][0]["image"] and "zero everywhere" in told["failed"][0]["reason"]
    methods = "input_x_gradient,attention"
    monkeypatch.setattr("vitreous.registry.METHODS", {name: METHODS[name] for name in methods.split(",")})
    got = run("explain", tmp_path / "in", "--method", "all", "--out", out, "--json")
    told = json.loads(got.out)
    assert got.code == 0 and len(told["images"]) == 3 and any("zero everywhere" in note for note in told["notes"])


def test_a_study_and_a_leaderboard_go_on(tmp_path: Path) -> None:
    """A class whose weights are zero: its rows say why they are empty."""
    from vitreous.evaluation.study.kind import Scene
    from vitreous.evaluation.study.maps import run_method

    trace = Trace(forgetful(2), IMAGES)
    target = trace_target(trace)
    found = run_method(
        Scene(trace, target, [None, None], [False, False], timed=False), "gradient", {"reduce": "abs-mean"}
    )
    assert found.error is None and found.errors == {1: "the map is zero everywhere"}


def trace_target(trace: Trace) -> object:
    from vitreous.trace.apply import choose

    return choose(trace, [0, 2], METHODS["gradient"]).fix(trace.output)
