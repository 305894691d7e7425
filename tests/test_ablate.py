"""Ablation of heads, MLPs and layers: against hooks and weights, predicted and true, saved as a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import windowed
import zoo
from conftest import Run as Command
from PIL import Image
from safetensors.torch import load_file
from test_spread_study import collisions
from torch import Tensor, nn

import vitreous
from vitreous import Model, OptionError, Unsupported
from vitreous.errors import InputError
from vitreous.images.preprocess import IMAGENET
from vitreous.inspect.ablate.blocks import find_places
from vitreous.inspect.ablate.effects import (
    Effects,
    Measure,
    averaged,
    first_order,
    measure_effects,
    repeated,
    shares_prefix,
)
from vitreous.inspect.ablate.prune import save_pruned
from vitreous.inspect.ablate.sources import Source, mean_values, partner, readable, values_of
from vitreous.inspect.ablate.study import Ablate, correlated, map_changes, method_of, without
from vitreous.models import load as sources
from vitreous.models.libraries import cropped
from vitreous.plot.ablate import bars_figure, grid_figure, scatter_figure
from vitreous.trace.target import Class, Top, as_target
from vitreous.trace.trace import Trace

HEADS = 2
WIDTH = 16  # of a head of the zoo's models


def trace_of(name: str, count: int = 3) -> Trace:
    return Trace(zoo.model(name), zoo.images(name, count))


def measured(trace: Trace, what: str, source: Source | None = None, **options: Any) -> Effects:
    asked = {"control": False, "predict": False, **options}
    return measure_effects(find_places(what, trace), trace, Class(1), source or Source(), **asked)


def hooked(
    net: nn.Module, module: nn.Module, hook: Callable[..., Any], images: Tensor, *, before: bool = False
) -> Tensor:
    """The scores of class 1 with a hook."""
    handle = module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
    try:
        with torch.no_grad():
            out = net(images)
        return (out if isinstance(out, Tensor) else out.logits)[:, 1].double()
    finally:
        handle.remove()


def columns(head: int) -> slice:
    return slice(head * WIDTH, (head + 1) * WIDTH)


def source_by(by: str, trace: Trace, what: str) -> Source:
    """A source that is made without the code under test of the batch: of other images, fixed."""
    if by == "zero":
        return Source()
    chance = torch.Generator().manual_seed(5)
    shapes = [one.shape for one in values_of(find_places(what, trace), trace)]
    count = 1 if by == "mean" else len(trace)
    return Source([torch.randn(count, *shape[1:], generator=chance) for shape in shapes])


def side_by_side(values: Tensor, head: int) -> Tensor:
    """[B H W n d] of one head as [B n d]."""
    return values[:, head, 0]


# --------------------------------------------------------------------------------------------------- against other code


@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
@pytest.mark.parametrize("name", ["timm ViT", "timm ViT unfused"])
def test_heads_are_those_of_a_hook_before_the_projection(name: str, by: str) -> None:
    trace = trace_of(name)
    net: Any = zoo.network(name)
    source = source_by(by, trace, "heads")
    found = measured(trace, "heads", source).true[:, :, 0]
    for layer in range(3):
        for head in range(HEADS):

            def hook(module: nn.Module, args: Any, layer: int = layer, head: int = head) -> Any:
                heads = args[0].clone()
                other = 0 if source.layers is None else side_by_side(source.layers[layer], head)
                heads[..., columns(head)] = other
                return (heads, *args[1:])

            expected = hooked(net, net.blocks[layer].attn.proj, hook, trace.images, before=True)
            np.testing.assert_allclose(found[:, layer * HEADS + head], expected.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["zero", "mean"])
def test_heads_of_multi_head_attention_are_those_of_its_weights(by: str) -> None:
    trace = trace_of("torchvision ViT")
    source = source_by(by, trace, "heads")
    found = measured(trace, "heads", source).true[:, :, 0]
    for layer in range(3):
        for head in range(HEADS):
            net: Any = copy.deepcopy(zoo.network("torchvision ViT"))
            attention = net.encoder.layers[layer].self_attention
            weight = attention.out_proj.weight.detach()[:, columns(head)].clone()
            with torch.no_grad():
                attention.out_proj.weight[:, columns(head)] = 0
            more = 0 if source.layers is None else side_by_side(source.layers[layer], head) @ weight.mT

            def hook(module: nn.Module, args: Any, out: Any, more: Any = more) -> Any:
                return out[0] + more, out[1]

            expected = hooked(net, attention, hook, trace.images)
            np.testing.assert_allclose(found[:, layer * HEADS + head], expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
@pytest.mark.parametrize("what", ["mlps", "layers"])
def test_mlps_and_layers_are_those_of_hooks(what: str, by: str) -> None:
    trace = trace_of("timm ViT")
    net: Any = zoo.network("timm ViT")
    source = source_by(by, trace, what)
    found = measured(trace, what, source).true[:, :, 0]
    for layer in range(3):
        other = 0 if source.layers is None else source.layers[layer][:, 0]

        def mlp(module: nn.Module, args: Any, out: Tensor, other: Any = other) -> Tensor:
            return torch.zeros_like(out) + other

        def block(module: nn.Module, args: Any, out: Tensor, other: Any = other) -> Tensor:
            return args[0] + other

        place, hook = (net.blocks[layer].mlp, mlp) if what == "mlps" else (net.blocks[layer], block)
        expected = hooked(net, place, hook, trace.images)
        np.testing.assert_allclose(found[:, layer], expected.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_without_all_heads_attention_gives_its_bias() -> None:
    trace = trace_of("HF ViT eager")
    places = find_places("heads", trace)
    own = without(places, trace, Source(), {(1, head) for head in range(HEADS)})
    net: Any = zoo.network("HF ViT eager")
    attention: Any = dict(net.named_modules())["vit.layers.1.attention"]

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        linear = [one for one in module.modules() if isinstance(one, nn.Linear)][-1]
        return (torch.zeros_like(out[0]) + linear.bias, *out[1:])

    expected = hooked(net, attention, hook, trace.images)
    torch.testing.assert_close(own.output[:, 1].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_mlp_with_layer_scale_or_a_norm_behind_it_adds_nothing() -> None:
    net, size = windowed.swin_v2()
    model = Model(net.eval(), cropped(size, *IMAGENET), name="v2")
    trace = Trace(model, torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)))
    found = measured(trace, "mlps").true[:, :, 0]
    for layer, block in enumerate(one for stage in net.layers for one in stage.blocks):

        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return torch.zeros_like(out)

        expected = hooked(net, block.norm2, hook, trace.images)
        np.testing.assert_allclose(found[:, layer], expected.numpy(), rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- invariants


@pytest.mark.parametrize("what", ["heads", "mlps", "layers"])
@pytest.mark.parametrize(
    "name",
    [
        "timm ViT",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("sequence first", "timm Swin", "torchvision ViT")),
    ],
)
def test_nothing_ablated_changes_nothing(name: str, what: str) -> None:
    trace = trace_of(name)
    found = measured(trace, what)
    assert found.unchanged.max() == 0
    own = without(find_places(what, trace), trace, Source(), set())
    assert torch.equal(own.output, trace.output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm ViT", "timm Swin", "sequence first"])
def test_shared_prefixes_give_what_whole_runs_give(name: str) -> None:
    trace = trace_of(name)
    places = find_places("heads", trace)
    assert shares_prefix(places)

    def edit(layer: int, values: Tensor) -> Tensor:
        values = values.clone()
        values[: len(trace), 0] = 0
        values[len(trace) :, 1] = 0
        return values

    for layer in range(len(places.parts)):
        one, other = (repeated(places, trace, layer, 2, shares, edit).output for shares in (True, False))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["heads", "mlps", "layers"])
def test_an_image_has_the_same_effects_in_every_batch(what: str) -> None:
    trace = trace_of("timm ViT")
    mean = Source(mean_values(find_places(what, trace), [trace]))
    together = measured(trace, what, mean, control=True, predict=True)
    alone = measured(trace.only(1), what, mean, control=True, predict=True)
    np.testing.assert_allclose(alone.true[0], together.true[1], rtol=1e-4, atol=1e-6)
    assert alone.control is not None and together.control is not None
    np.testing.assert_allclose(alone.control[0], together.control[1], rtol=1e-4, atol=1e-6)
    assert alone.predicted is not None and together.predicted is not None
    np.testing.assert_allclose(alone.predicted[:, 0], together.predicted[:, 1], rtol=1e-3, atol=1e-6)


def test_the_mean_is_that_of_all_images_whatever_the_batches() -> None:
    trace = trace_of("timm ViT", 3)
    places = find_places("heads", trace)
    whole = mean_values(places, [trace])
    parts = mean_values(places, [trace.like(trace.images[:1], [0]), trace.like(trace.images[1:], [1, 2])])
    for one, other, values in zip(whole, parts, values_of(places, trace)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(one[0], values.double().mean(0), rtol=1e-5, atol=1e-7)


def test_the_control_is_a_step_of_the_same_length() -> None:
    trace = trace_of("timm ViT", 2)
    found = measured(trace, "heads", control=True)
    assert found.control is not None
    assert not np.allclose(found.control, found.true)
    again = measured(trace, "heads", control=True)
    assert again.control is not None and np.array_equal(found.control, again.control)


def test_the_network_is_left_as_it_was() -> None:
    net = zoo.network("timm ViT").train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    trace = Trace(Model(net), zoo.images("timm ViT", 2))
    for what in ("heads", "mlps", "layers"):
        measured(trace, what, control=True, predict=True)
    assert net.training and all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in net.modules())
    assert all(one.grad is None for one in net.parameters())


def test_partners_are_other_images_each_once() -> None:
    found = [partner(i, 7, 3) for i in range(7)]
    assert sorted(found) == list(range(7)) and all(i != one for i, one in enumerate(found))

    def read(number: int) -> Tensor:
        if number == found[0]:
            raise InputError("broken")
        return torch.tensor([number])

    assert readable(0, 7, 3, read)[0] == found[found[0]]
    with pytest.raises(InputError, match="second image"):
        readable(0, 1, 3, read)


# ---------------------------------------------------------------------------------------------------------- first order


class Tail(nn.Module):
    """Two layers of attention; nothing but linear layers follows the last."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        for qkv, proj in zip(self.qkv, self.proj):
            q, k, v = qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = self.head(x.mean(1))
        return out


def test_the_prediction_is_exact_where_the_rest_is_linear() -> None:
    torch.manual_seed(0)
    trace = Trace(Model(Tail().eval()), torch.randn(3, 3, 64, 64))
    found = measured(trace, "heads", predict=True)
    assert found.predicted is not None
    true = found.true[:, :, 0] - found.whole[:, None, 0]
    np.testing.assert_allclose(found.predicted[0][:, 2:], true[:, 2:], rtol=1e-3, atol=1e-6)
    assert np.abs(found.predicted[0][:, :2] - true[:, :2]).max() > 1e-4  # not so before the second layer


@pytest.mark.slow
@pytest.mark.parametrize("what", ["heads", "mlps", "layers"])
def test_a_small_step_is_predicted(what: str) -> None:
    trace = Trace(Model(copy.deepcopy(zoo.network("timm ViT")).double()), zoo.images("timm ViT", 2).double())
    places = find_places(what, trace)
    near = Source([one + 1e-4 * torch.randn_like(one) for one in values_of(places, trace)])
    found = measured(trace, what, near, predict=True)
    assert found.predicted is not None
    true = found.true[:, :, :2] - found.whole[:, None, :2]
    np.testing.assert_allclose(found.predicted.transpose(1, 2, 0), true, rtol=1e-2, atol=1e-10)


def test_gradients_half_way_are_exact_for_a_parabola() -> None:
    torch.manual_seed(0)
    trace = Trace(Model(Tail().eval()), torch.randn(3, 3, 64, 64))
    places = find_places("heads", trace)

    def squared(output: Tensor, embedding: Tensor) -> Tensor:
        return (output[:, 1] - 3) ** 2

    measure = Measure(as_target(squared), None)
    source = Source([torch.randn_like(one[:1]) for one in values_of(places, trace)])
    found = measure_effects(places, trace, as_target(squared), source, control=False, predict=True, steps=1)
    half = averaged(places, trace, measure, source, 1)
    assert found.averaged is not None and np.array_equal(half, found.averaged, equal_nan=True)
    together = without(places, trace, source, {(1, 0), (1, 1)})
    true = squared(together.output, together.output) - squared(trace.output, trace.output)
    np.testing.assert_allclose(half[0][:, 2:].sum(1), true.numpy(), rtol=1e-3)  # of all heads of the last layer


@pytest.mark.slow
@pytest.mark.parametrize("what", ["mlps", "layers"])
def test_many_gradients_add_up_to_the_true_change(what: str) -> None:
    trace = Trace(Model(copy.deepcopy(zoo.network("timm ViT")).double()), zoo.images("timm ViT", 2).double())
    found = measured(trace, what, predict=True, steps=16)
    assert found.averaged is not None
    true = found.true[:, :, :2] - found.whole[:, None, :2]
    np.testing.assert_allclose(found.averaged.transpose(1, 2, 0), true, rtol=2e-2, atol=1e-4 * np.abs(true).max())


def test_values_of_a_regression_have_no_probability() -> None:
    trace = Trace(Model(zoo.network("timm ViT"), output="value"), zoo.images("timm ViT", 2))
    found = measured(trace, "layers", predict=True)
    assert np.isnan(found.true[..., 1]).all() and (found.true[..., 2] == -1).all()
    assert found.predicted is not None and np.isnan(found.predicted[1]).all()
    places = find_places("layers", trace)
    alone = first_order(places, trace, Measure.of(trace, Class(1)), Source())
    assert np.array_equal(alone[0], found.predicted[0])


# ----------------------------------------------------------------------------------------------------------------- maps


@pytest.mark.slow
@pytest.mark.parametrize("what", ["heads", "mlps", "layers"])
def test_a_map_without_a_part_is_that_of_the_pruned_network(what: str, tmp_path: Path) -> None:
    trace = trace_of("timm ViT", 2)
    places = find_places(what, trace)
    chosen = (1, 0)
    save_pruned(tmp_path / "x.safetensors", trace, what, "zero", [chosen])
    net = copy.deepcopy(zoo.network("timm ViT"))
    net.load_state_dict(load_file(tmp_path / "x.safetensors"))
    pruned = Trace(Model(net.eval()), trace.images)
    pruned.layout = trace.layout  # a layer that gives nothing is not seen as one
    for name in ("centred_lrp", "attn_lrp", "gradcam", "gradient", "gae"):
        declared = vitreous.METHODS[name]
        own = without(places, trace, Source(), {chosen})
        one, other = (attribute_map(some, declared) for some in (own, pruned))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))
        assert not torch.allclose(one, attribute_map(trace, declared), rtol=1e-3)


def attribute_map(trace: Trace, declared: Any) -> Tensor:
    from vitreous.attribute import attribute

    return attribute(trace, declared, Class(1), declared.check({})).map


@pytest.mark.slow
def test_how_maps_change() -> None:
    trace = trace_of("timm ViT", 2)
    alike, away = map_changes(find_places("layers", trace), trace, Class(1), Source())
    assert alike.shape == away.shape == (2, 3) and (away > 0).all() and (np.abs(alike) <= 1).all()
    assert method_of(trace).name == "centred_lrp" and np.isnan(correlated(np.ones(3), np.arange(3)))


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "by"),
    [
        ("timm ViT", "heads", "zero"),
        ("timm ViT", "heads", "mean"),
        ("timm ViT", "mlps", "zero"),
        ("timm DINOv2 registers", "mlps", "mean"),
        ("HF DINOv2 sdpa", "layers", "zero"),
        ("torchvision ViT", "heads", "mean"),
        ("open_clip ViT-B-32", "layers", "zero"),
        ("HF CLIP vision eager", "mlps", "mean"),
        ("timm Swin", "heads", "zero"),
    ],
)
def test_a_checkpoint_gives_the_ablated_outputs_by_itself(name: str, what: str, by: str, tmp_path: Path) -> None:
    trace = trace_of(name, 2)
    places = find_places(what, trace)
    chosen = [places.all[0], places.all[-1]]
    mean = Source(mean_values(places, [trace])) if by == "mean" else None
    saved = save_pruned(tmp_path / "pruned.safetensors", trace, what, by, chosen, mean)
    net = copy.deepcopy(trace.model.module)
    net.load_state_dict(load_file(saved.file), strict=True)
    other = Model(net, classifier=trace.model.classifier)
    other._mean = trace.model._mean
    with torch.no_grad(), other.still():
        alone = other.run(trace.images)
    assert saved.difference < 1e-4 * max(1, saved.size)
    assert float((alone - trace.output).abs().max()) > 10 * saved.difference  # something was removed
    if by == "zero":
        expected = without(places, trace, Source(), set(chosen)).output
        torch.testing.assert_close(alone.float(), expected, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    trace = trace_of("timm ViT", 2)
    file = tmp_path / "x.safetensors"
    with pytest.raises(OptionError, match=r"\.safetensors"):
        save_pruned(tmp_path / "x.pt", trace, "heads", "zero", [(0, 0)])
    with pytest.raises(OptionError, match="other images"):
        save_pruned(file, trace, "heads", "resample", [(0, 0)])
    with pytest.raises(Unsupported, match="has no bias"):
        save_pruned(file, trace, "layers", "mean", [(0, 0)])
    with pytest.raises(OptionError, match="nothing is to be pruned"):
        save_pruned(file, trace, "heads", "zero", [])
    with pytest.raises(OptionError, match="mean values"):
        save_pruned(file, trace, "heads", "mean", [(0, 0)])
    assert not file.exists()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("timm XCiT", "heads", "no heads to ablate"),
        ("timm XCiT", "mlps", "no MLP of two linear layers"),
        ("timm CaiT", "layers", "does not pass on tokens"),
        ("flat heads", "mlps", "does not keep each layer in a module"),
        ("flat heads", "layers", "does not keep each layer in a module"),
    ],
)
def test_what_a_model_does_not_have_is_refused(name: str, what: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        find_places(what, trace_of(name, 1))


def test_options_are_checked() -> None:
    for wrong in ({"what": "neurons"}, {"by": "noise"}, {"layers": 3}, {"points": -1}):
        with pytest.raises(OptionError):
            Ablate.make(wrong)
    with pytest.raises(OptionError, match="choose heads, mlps or layers"):
        find_places("neurons", trace_of("timm ViT", 1))


@pytest.mark.slow
def test_mixed_heads_are_said() -> None:
    assert any("mixes its heads" in note for note in Ablate().check(zoo.model("timm CaiT")))
    assert Ablate().check(zoo.model("timm ViT")) == []
    assert any("centred_lrp" in note for note in Ablate(maps=True).check(zoo.model("timm ViT")))
    assert Top(1)


# --------------------------------------------------------------------------------------------------- data sets, command


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of three photos, and a file that is none."""
    chance = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for i in range(3):
            pixels = chance.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / kind / f"{i}.png")
    (tmp_path / "data" / "cat" / "9.png").write_bytes(b"no image")
    return tmp_path / "data"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), ["cat", "dog", *"abcde"], name="small")
    monkeypatch.setattr(sources, "load", lambda *_, **__: model)
    return model


@pytest.mark.parametrize("by", ["resample", *(pytest.param(by, marks=pytest.mark.slow) for by in ("zero", "mean"))])
def test_a_data_set(photos: Path, small: Model, by: str, tmp_path: Path) -> None:
    found = vitreous.ablate(small, photos, "heads", by=by, out=tmp_path / "out", batch=2, shard=2, workers=0)
    assert found.names == tuple(f"{layer}.{head}" for layer in range(3) for head in range(2))
    assert len(found.failed) == 1 and found.worth.images == 6 and found.worth.labelled
    table = found.table()
    assert len(table) == 6 and (table["log_probability_low"] <= table["log_probability"]).all()
    assert found.findings.numbers["unchanged"] == 0 and found.said.startswith("head ")
    assert collisions(found.figure()) == []
    again = vitreous.ablate(small, photos, "heads", by=by, out=tmp_path / "out", batch=2, shard=2, workers=0)
    assert again.study.folder == found.study.folder


@pytest.mark.slow
def test_by_name_of_the_study(photos: Path, small: Model, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"vitreous\.ablate"):
        vitreous.run_study("ablate", photos, small, tmp_path / "out")
    study = vitreous.ablate(small, photos, "layers", out=tmp_path / "out", workers=0).study
    numbers = next(iter(vitreous.open_study(study.folder).findings().values())).numbers
    assert list(numbers["parts"]) == ["0", "1", "2"] and numbers["images"] == 6


@pytest.mark.slow
def test_least_and_saved(photos: Path, small: Model, tmp_path: Path) -> None:
    found = vitreous.ablate(small, photos, "heads", by="mean", out=tmp_path / "out", workers=0)
    order = found.table()["log_probability"].sort_values(ascending=False)
    assert (
        found.least(2) == list(order.index[:2]) and len(found.least(2, "predicted")) == len(found.least(2, "size")) == 2
    )
    saved = found.save(tmp_path / "pruned.safetensors", prune=2)
    assert saved.removed == tuple(sorted(found.least(2))) and str(saved.file) in saved.said
    with pytest.raises(OptionError, match="either prune"):
        found.save(tmp_path / "pruned.safetensors")
    with pytest.raises(OptionError, match="is no head"):
        found.save(tmp_path / "pruned.safetensors", remove="9.9")
    with pytest.raises(OptionError, match="6 heads"):
        found.least(6)
    with pytest.raises(OptionError, match="rank"):
        found.least(2, "random")
    with pytest.raises(OptionError, match="no chart"):
        found.figure("pie")


@pytest.mark.slow
def test_command(run: Command, photos: Path, small: Model, tmp_path: Path) -> None:
    file = tmp_path / "pruned.safetensors"
    ran = run("ablate", "heads", photos, "--by", "mean", "--no-control", "--save", file, "--remove", "0.1,2.0")
    assert ran.code == 0 and "costs most" in ran.out and "Predicted to first order" in ran.out
    assert "9.png: is not an image" in ran.err and "without 0.1, 2.0" in ran.err and file.is_file()
    assert list(Path("vitreous-out").glob("ablate-*/figures/*.png"))
    assert run("ablate", "layers", photos, "--json", "--target", "top-1").code == 0


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_finished(
    run: Command, photos: Path, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, times = Ablate.work, []

    def stopping(kind: Ablate, scene: Any) -> Any:
        times.append(scene)
        if len(times) == 3:
            raise KeyboardInterrupt
        return work(kind, scene)

    words = ("ablate", "mlps", photos, "--shard", 2, "--batch", 2, "--workers", 0)
    monkeypatch.setattr(Ablate, "work", stopping)
    stopped = run(*words)
    assert stopped.code == 130 and "run the same command again to resume" in stopped.err
    done = int(stopped.err.partition("stopped: ")[2].partition(" of")[0])
    assert done >= 1
    again = run(*words)
    assert again.code == 0 and f"{done} of 4 shards are complete" in again.err


@pytest.mark.slow
def test_an_output_for_each_query_is_refused() -> None:
    import detectors

    trace = Trace(Model(detectors.yolos()), torch.randn(1, 3, 64, 64))
    for what in ("heads", "mlps", "layers"):
        with pytest.raises(Unsupported, match="whole images"):
            find_places(what, trace)


def test_command_refuses(run: Command, photos: Path, small: Model, tmp_path: Path) -> None:
    for words in (
        ("--by", "noise"),
        ("--prune", "2"),
        ("--save", "x.safetensors"),
        ("--save", "x.pt", "--prune", "2"),
        ("--target", "top-1,top-2"),
        ("--model", "a", "--model", "b"),
    ):
        ran = run("ablate", "heads", photos, *words)
        assert ran.code == 2 and ran.err.count("error:") == 1, words


# -------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.slow
def test_figures_do_not_collide() -> None:
    chance = np.random.default_rng(0)
    assert collisions(grid_figure(chance.normal(size=36), [3] * 12, "Change of accuracy", "points")) == []
    assert collisions(grid_figure(chance.normal(size=9), [2, 3, 4], "Change of accuracy", "points")) == []
    mean = chance.normal(size=12)
    names = [str(i) for i in range(12)]
    assert collisions(bars_figure(names, mean, np.stack([mean - 1, mean + 1]), "Title", "points", "layer")) == []
    assert scatter_figure(names, mean, mean, np.stack([mean - 1, mean + 1]), "score", "r = 1").axes
    with pytest.raises(InputError):
        grid_figure(np.zeros(0), [], "", "")
