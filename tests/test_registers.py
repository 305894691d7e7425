"""Outlier tokens: planted ones are found with their unit, test-time registers take them, and nothing else changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run, off
from test_plot import collisions, words
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace, inspect, with_registers
from vitreous.errors import OptionError, Unsupported
from vitreous.inspect.outliers.measure import Images, norms_of, ratios_of, shares_of
from vitreous.models.fingerprint import fingerprint
from vitreous.trace.tokens import token_names

LAYER, UNIT = 1, 11  # the planted unit
PLACES = ((0, 2), (3, 1), (2, 2))  # the marked patch of each image
NEURONS = ((0, 3), (0, 5), (1, 7))
QUICK = ("timm ViT", "torchvision ViT", "hand-written", "HF DINOv2 eager")
REPAIRABLE = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name, entry in zoo.ZOO.items()
    if entry.flow and entry.blocks and name != "timm BEiT"  # its relative positions are those of its tokens
]


@cache
def planted() -> Model:
    """A ViT with a unit in layer 1 that fires at a bright patch, lengthens its token, and so draws all attention."""
    torch.manual_seed(3)
    net = zoo.timm("vit_tiny_patch16_224", depth=4)().eval()
    width = net.embed_dim
    direction = torch.randn(width)
    direction -= direction.mean()
    direction /= direction.norm()
    with torch.no_grad():
        cut = net.patch_embed.proj.weight
        cut -= cut.mean((1, 2, 3), keepdim=True)
        cut[0] = 1 / 768  # only channel 0 sees the brightness of a patch
        net.patch_embed.proj.bias.zero_()
        net.pos_embed.normal_()[..., 0] = 0
        mlp = net.blocks[LAYER].mlp
        mlp.fc1.weight[UNIT] = 0
        mlp.fc1.weight[UNIT, 0], mlp.fc1.bias[UNIT] = 3.0, -5.0
        mlp.fc2.weight[:, UNIT] = 8 * direction
        for block in net.blocks[LAYER + 1 :]:
            query, key, _ = block.attn.qkv.weight.chunk(3)
            for first in range(0, width, width // 2):  # the first channel of each head
                query[first] = 0
                block.attn.qkv.bias[first] = 4.0
                key[first] = direction
    return Model(net, name="planted")


def bright() -> Tensor:
    """Noise with one bright patch each."""
    images = 0.3 * torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    for image, (row, column) in zip(images, PLACES):
        image[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 4
    return images


def shares_at(model: Model, images: Tensor, outliers: np.ndarray) -> np.ndarray:
    """The read-out's share of attention at these places, by layer."""
    with torch.no_grad():
        return shares_of(Images(model, images), outliers)[0].mean(0)


# ------------------------------------------------------------------------------------------------------ what is found


def test_the_planted_unit_and_its_outliers_are_found() -> None:
    seen = inspect.registers(planted(), bright(), ratio=3)
    assert [tuple(place) for place in np.argwhere(seen.outliers)] == [(i, *at) for i, at in enumerate(PLACES)]
    assert seen.onset == LAYER <= seen.layer
    first, second = seen.units[:2]
    assert (first.layer, first.unit) == (LAYER, UNIT)
    assert first.rise > 10 * second.rise and first.outliers > 20 * first.others
    read = seen.share(seen.read_share)
    assert (read[LAYER + 1 :] > 0.5).all() and (read[: LAYER + 1] < 0.2).all()
    assert seen.even_share == pytest.approx(1 / 17)
    assert "3 outliers in 3 of 3 images" in seen.said


def test_registers_take_the_planted_outliers() -> None:
    images, model = bright(), planted()
    seen = inspect.registers(model, images, ratio=3)
    repaired = with_registers(model, images=images, most=1, ratio=3)
    assert repaired.neurons == ((LAYER, UNIT),)
    after = inspect.registers(repaired, images, ratio=3)
    assert after.onset is None and after.largest.max() < 2 and "no outliers" in after.said
    assert shares_at(model, images, seen.outliers)[-1] > 0.5
    assert shares_at(repaired, images, seen.outliers)[-1] < 0.1
    (added,) = repaired.layout_at((64, 64)).added
    last = Trace(repaired, images).attention[-1]
    assert (last.rows([0])[:, :, 0, added] > 0.5).all()  # the register is attended to instead


def plain_norms(net: nn.Module, images: Tensor) -> Tensor:
    """‖token‖ of the patches behind each block of a timm ViT, [L B h w]."""
    taken: list[Tensor] = []
    with ExitStack() as stack, torch.no_grad():
        for block in net.blocks:
            stack.callback(block.register_forward_hook(lambda m, a, out: taken.append(out)).remove)
        net(images)
    return torch.stack(taken)[:, :, 1:].norm(dim=-1).unflatten(2, (4, 4))


def test_the_numbers_follow_their_formulas() -> None:
    images, model = bright(), planted()
    seen = inspect.registers(model, images, ratio=1.2, layer=-2, most=5)
    norms = plain_norms(model.net, images)
    assert off(seen.norms.swapaxes(0, 1), norms) < 1e-5
    outliers = norms[2] > 1.2 * torch.quantile(norms[2].flatten(1), 0.5, dim=1)[:, None, None]
    assert seen.layer == 2 and np.array_equal(seen.outliers, outliers)
    marked = torch.cat([torch.zeros(3, 1), outliers.flatten(1).float()], 1)
    for layer, attention in enumerate(Trace(model, images).attention):
        a = attention.weights.mean(1)  # [B N N]
        assert off(seen.read_share[:, layer], (a[:, 0] * marked).sum(1)) < 1e-5
        assert off(seen.mean_share[:, layer], (a.mean(1) * marked).sum(1)) < 1e-5
    hidden: dict[int, Tensor] = {}
    with ExitStack() as stack, torch.no_grad():
        for i, block in enumerate(model.net.blocks):
            note = block.mlp.fc2.register_forward_pre_hook(lambda m, args, i=i: hidden.update({i: args[0]}))
            stack.callback(note.remove)
        model.net(images)
    assert seen.onset is not None
    for unit in seen.units:
        size = hidden[unit.layer][:, 1:, unit.unit].abs()
        where = outliers.flatten(1)
        assert unit.layer <= seen.onset
        assert unit.outliers == pytest.approx(float(size[where].mean()), rel=1e-4)
        assert unit.others == pytest.approx(float(size[~where].mean()), rel=1e-4)
        weight = model.net.blocks[unit.layer].mlp.fc2.weight[:, unit.unit].detach().norm()
        assert unit.adds == pytest.approx(float(unit.rise * weight), rel=1e-4)
    assert [unit.rise for unit in seen.units] == sorted((unit.rise for unit in seen.units), reverse=True)


def test_a_view_does_not_depend_on_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = inspect.registers(planted(), bright(), ratio=3)
    monkeypatch.setattr("vitreous.inspect.outliers.measure.images_at_once", lambda model, images: 1)
    single = inspect.registers(planted(), Trace(planted(), bright()), ratio=3)
    assert off(single.norms, whole.norms) < 1e-5 and off(single.read_share, whole.read_share) < 1e-5
    assert [(u.layer, u.unit) for u in single.units[:3]] == [(u.layer, u.unit) for u in whole.units[:3]]


def test_the_figure_has_room_for_everything(cat: Path, tiny: Model) -> None:
    several = inspect.registers(planted(), bright(), ratio=3)
    none = inspect.registers(tiny, cat, ratio=9)
    assert none.onset is None and not none.units and not none.read_share.any()
    for view in (several, none):
        figure = view.figure(cells=True)
        figure.draw_without_rendering()  # numbers of an axis get their places
        numbers = [t.get_text() for axes in figure.axes[1:] for t in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        assert not [pair for pair in collisions(figure) if not {*numbers} & {*pair}]
    assert f"{LAYER} / {UNIT}" in words(several.figure())
    assert "no outliers" in words(none.figure())


def test_a_view_is_saved_with_its_numbers(tmp_path: Path) -> None:
    seen = inspect.registers(planted(), bright(), ratio=3)
    with np.load(seen.save(tmp_path / "all.npz")) as stored:
        told = json.loads(str(stored["provenance"]))
        assert np.array_equal(stored["norms"], seen.norms)
    assert told["view"] == "registers" and told["units"][0]["unit"] == UNIT
    json.dumps(seen.details, allow_nan=False)


# -------------------------------------------------------------------------------------------------- the repaired model


def moved_by_hand(hidden: Tensor, units: Sequence[int], count: int) -> Tensor:
    """The registers are the tokens after CLS; the k-th gets the k-th largest of the patches, which get zero."""
    hidden = hidden.clone()
    for row in hidden:
        for unit in units:
            patches = row[1 + count :, unit]
            order = sorted(range(len(patches)), key=lambda i: -abs(float(patches[i])))
            row[1 : 1 + count, unit] = patches[order[:count]].clone()
            row[1 + count :, unit] = 0
    return hidden


def by_hand(
    net: nn.Module, images: Tensor, neurons: Sequence[tuple[int, int]], count: int, without: int = -1
) -> Tensor:
    """The output of a timm ViT with registers, and without one of its patches."""
    x = net._pos_embed(net.patch_embed(images))
    x = torch.cat([x[:, :1], torch.zeros(len(x), count, x.shape[2]).to(x), x[:, 1:]], 1)
    if without >= 0:
        x = torch.cat([x[:, : 1 + count + without], x[:, 2 + count + without :]], 1)
    for layer, block in enumerate(net.blocks):
        x = x + block.attn(block.norm1(x))
        hidden = block.mlp.act(block.mlp.fc1(block.norm2(x)))
        x = x + block.mlp.fc2(moved_by_hand(hidden, [unit for at, unit in neurons if at == layer], count))
    return net.head(net.norm(x)[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3])
def test_the_repaired_network_follows_its_formula(count: int, dtype: torch.dtype) -> None:
    net = copy.deepcopy(planted().net).to(dtype)
    images, neurons = bright().to(dtype), [*NEURONS, (LAYER, UNIT)]
    repaired = with_registers(Model(net), count, neurons=neurons)
    with torch.no_grad():
        expected = by_hand(net, images, neurons, count)
        assert off(repaired.net(images), expected) < (1e-5 if dtype == torch.float32 else 1e-12)
        assert off(net(images), expected) > 1e-3  # it is another network
    assert off(Trace(repaired, images).output, expected) < 1e-5


def test_dropped_patches_give_nothing_to_the_registers() -> None:
    images, model = bright()[:1], planted()
    repaired = with_registers(model, neurons=[*NEURONS, (LAYER, UNIT)])
    map = vitreous.explain(repaired, images, "token_ablation", 3).map[0].flatten()
    with torch.no_grad():
        whole = by_hand(model.net, images, repaired.neurons, 1)[0, 3]
        left = [by_hand(model.net, images, repaired.neurons, 1, i)[0, 3] for i in range(16)]
    assert off(map, whole - torch.stack(left)) < 1e-3


def test_the_original_is_untouched() -> None:
    model, images = Model(copy.deepcopy(planted().net)), bright()
    net = model.net
    kept = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modules = {name: (module, type(module)) for name, module in net.named_modules()}
    with torch.no_grad():
        before = net(images)
    repaired = with_registers(model, 2, images=images, ratio=3)
    vitreous.explain(repaired, images, "gae")
    repaired.to(torch.float64)
    with torch.no_grad():
        assert net(images).equal(before)
    assert all(net.state_dict()[name].equal(tensor) for name, tensor in kept.items())
    assert {name: (module, type(module)) for name, module in net.named_modules()} == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in repaired.net.modules())


def methods_of(model: Model) -> list[str]:
    pooled = model.layout.pooled  # tokens cannot be dropped from a pool that does not see the registers
    return ["gae", "attention", "rollout", "attn_lrp", *([] if pooled else ["token_ablation"])]


@pytest.mark.parametrize("name", REPAIRABLE)
def test_methods_run_on_repaired_models(name: str) -> None:
    model, images, entry = zoo.model(name), zoo.images(name, 2), zoo.ZOO[name]
    repaired = with_registers(zoo.model(name), 2, neurons=NEURONS)
    layout = repaired.layout_at(entry.size)
    plain = model.layout_at(entry.size)
    assert layout.grid == plain.grid and layout.prefix == plain.prefix + 2 and layout.suffix == plain.suffix
    assert layout.rows == plain.rows and layout.columns == plain.columns
    assert layout.readout == tuple(token + 2 * (token >= plain.prefix) for token in plain.readout)
    assert [token_names(layout)[token] for token in layout.added] == [f"register {i}" for i in layout.added]
    with torch.no_grad(), repaired.still():
        alone = torch.cat([repaired.run(images[i : i + 1]) for i in range(2)])
        assert off(repaired.run(images), alone) < 1e-4
        assert off(alone, model.run(images)) > 1e-6
    assert off(Trace(repaired, images).whole().output.detach(), alone) < 1e-4
    for method in methods_of(repaired):
        target = 1 if repaired.classifies(layout) else "neuron:1"
        both = vitreous.explain(repaired, images, method, target).map
        assert both.shape[1:] == vitreous.explain(model, images[:1], method, target).map.shape[1:]
        assert off(both[1:], vitreous.explain(repaired, images[1:], method, target).map) < 1e-4


@pytest.mark.slow
def test_every_method_runs_on_a_repaired_model() -> None:
    checked = vitreous.check(with_registers(planted(), neurons=[(LAYER, UNIT)]))
    assert checked.right, str(checked)


def test_half_precision() -> None:
    net = copy.deepcopy(planted().net).to(torch.bfloat16)
    repaired = with_registers(Model(net), neurons=[(LAYER, UNIT)])
    map = vitreous.explain(repaired, bright(), "rollout").map
    exact = vitreous.explain(with_registers(planted(), neurons=[(LAYER, UNIT)]), bright(), "rollout").map
    assert off(map, exact) < 0.05


def test_a_repaired_model_keeps_labels_preprocessing_and_name() -> None:
    labels = [f"class {i}" for i in range(zoo.CLASSES)]
    model = Model(planted().net, labels=labels, name="plain")
    repaired = with_registers(model, 2, neurons=[(0, 0)])
    assert repaired.name == "plain with 2 registers" and repaired.known_as == "plain"
    assert repaired.labels == model.labels and repaired.preprocess is model.preprocess
    assert with_registers(model, neurons=[(0, 0), (0, 0)]).neurons == ((0, 0),)
    others = [with_registers(model, neurons=[(1, unit)]) for unit in (100, 101)]
    assert len({fingerprint(one) for one in (model, *others)}) == 3  # studies keep them apart


# -------------------------------------------------------------------------------------------------------------- errors


class NoMlp(nn.Module):
    """Blocks of attention only."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 16, 16)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))
        for block in self.blocks:
            block.mlp = nn.Sequential(nn.LayerNorm(32), nn.GELU())
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: with_registers(m), "either neurons"),
        (lambda m: with_registers(m, neurons=[(0, 1)], images=bright()), "either neurons"),
        (lambda m: with_registers(m, 0, neurons=[(0, 1)]), "count=0: give at least one register"),
        (lambda m: with_registers(m, neurons=[]), "name at least one pair"),
        (lambda m: with_registers(m, neurons=[3]), "3 is not a pair"),
        (lambda m: with_registers(m, neurons=[(9, 1)]), r"layer 9 of planted has no MLP; the layers \[0, 1, 2, 3\]"),
        (lambda m: with_registers(m, neurons=[(0, 128)]), "has units 0 to 127, not 128"),
        (lambda m: with_registers(m, images=bright(), ratio=99), "no register neurons on these images.*lower ratio"),
        (lambda m: inspect.registers(m, bright(), ratio=1), "give a number above 1"),
        (lambda m: inspect.registers(m, bright(), most=0), "most=0: give at least 1"),
        (lambda m: inspect.registers(m, bright(), layer=7), "layer 7 is out of range"),
    ],
)
def test_wrong_options_are_named(call: Callable[[Model], Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        call(planted())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm Swin", "needs attention between all tokens; timm-swin attends in 7×7 windows"),
        ("timm BEiT", "uses its tokens in other ways than attention between them, so no register can be added"),
        ("flat heads", "does not keep each layer in a module of its own"),
    ],
)
def test_models_that_take_no_registers_are_refused(name: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        with_registers(zoo.model(name), neurons=[(0, 1)])


def test_a_forward_of_the_users_and_blocks_without_mlps_are_refused() -> None:
    net = planted().net
    with pytest.raises(Unsupported, match="run by a forward of its own"):
        with_registers(Model(net, forward=lambda x: net(x)), neurons=[(0, 1)])
    bare = Model(NoMlp().eval(), name="bare")
    with pytest.raises(Unsupported, match="bare shows no MLP of two linear layers"):
        with_registers(bare, neurons=[(0, 1)])
    assert inspect.registers(bare, zoo.images("flat heads"), ratio=1.1).units == ()


# ------------------------------------------------------------------------------------------------ command line, DeiT


@pytest.mark.slow
def test_the_command_line(run: Run, cat: Path) -> None:
    done = run("inspect", "registers", cat, cat.with_name("coffee.jpg"), "--ratio", "1.3", "--units", "3", "--json")
    assert done.code == 0, done.err
    (told,) = json.loads(done.out)["images"]
    assert Path(told["figure"]).is_file() and Path(told["numbers"]).is_file()
    assert len(told["units"]) == 3 and [one["image"] for one in told["outliers"]] == ["cat.jpg", "coffee.jpg"]
    text = run("inspect", "registers", cat, "--ratio", "1.3", "--units", "3", "--layer", "0")
    assert text.code == 0 and "at outliers" in text.out
    assert "not a whole number" in run("inspect", "registers", cat, "--layer", "some").error


@pytest.mark.slow
def test_registers_take_attention_from_the_outliers_of_deit(deit: Model, shared: Path) -> None:
    files = sorted((shared / "data" / "imagenet-samples").glob("*.jpg"))
    finding, others = files[::10], files[5::10]
    repaired = with_registers(deit, images=finding)
    seen = inspect.registers(deit, others)
    outliers = seen.outliers
    with torch.no_grad():
        after = shares_of(Images(repaired, others), outliers)
        left = ratios_of(norms_of(Images(repaired, others)))[:, seen.layer]
        same = [
            torch.cat([model.run(model.prepare(others[i : i + 10])).argmax(1) for i in range(0, len(others), 10)])
            for model in (deit, repaired)
        ]
    for before, behind in zip((seen.read_share, seen.mean_share), after):
        assert seen.share(behind)[-1] < 0.5 * seen.share(before)[-1]
    assert (left > 2).sum() < 0.5 * outliers.sum()
    assert (same[0] == same[1]).float().mean() >= 0.9
