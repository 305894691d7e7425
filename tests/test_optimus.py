"""Arbitration: every map that attention gives, the most faithful one returned with the scoreboard."""

from __future__ import annotations

import pytest
import torch
import zoo
from conftest import Oracle, off
from machine import ROUNDING
from torch import Tensor

import vitreous
from vitreous.errors import EmptyMap, OptionError, Unsupported
from vitreous.methods.arbitration.optimus import candidates, quick_maps
from vitreous.trace.target import Class

FAST = {"single_heads": False, "methods": False, "controls": 4}


def slow_candidates(name: str, index: int) -> dict[str, Tensor]:
    """Each map by its formula, from whole matrices of one image, with autograd's own ∂y/∂A."""
    model, image = zoo.model(name), zoo.images(name)[index : index + 1]
    trace = vitreous.Trace(model, image)
    grads = trace.grads(Class(1))
    layers = trace.differentiable().layers
    a = [layer.weights[0].detach() for layer in layers]  # [H N N] each
    weighted = [
        (layer.weights_grad(grad)[0].detach() * x).clamp_min(0).mean(0) for layer, grad, x in zip(layers, grads, a)
    ]
    rho, (h, w), first = trace.readout[0], trace.layout.grid, trace.layout.prefix
    fused = {"gradient": weighted, "mean": [x.mean(0) for x in a]}
    fused |= {f"head {i}": [x[i] for x in a] for i in range(a[0].shape[0])}
    rows = {
        "read-out row": lambda m: rho @ m,
        "column mean": lambda m: m.mean(0),
        "column max": lambda m: m.max(0).values,
    }
    made = {}
    for heads, each in fused.items():
        product = torch.eye(len(rho))
        for m in each:
            step = torch.eye(len(m)) + m
            product = (step / step.sum(1, keepdim=True)) @ product
        for row, read in rows.items():
            maps = {f"layer {i}": read(m) for i, m in enumerate(each)}
            maps["mean of layers"] = torch.stack([read(m) for m in each]).mean(0)
            maps["product of layers"] = read(product)
            made |= {f"{heads}, {layer}, {row}": v[first : first + h * w].reshape(h, w) for layer, v in maps.items()}
    return made


@pytest.mark.parametrize(
    "name", ["timm ViT", "timm DINOv3", "timm SigLIP", "torchvision ViT", "HF ViT eager", "sequence first"]
)
def test_candidates_are_their_formulas(name: str) -> None:
    trace = vitreous.Trace(zoo.model(name), zoo.images(name))
    target = Class(1)
    with torch.no_grad():
        names, maps = candidates(trace, target, single_heads=True)
    expected = slow_candidates(name, 1)
    assert sorted(names) == sorted(expected)
    assert len(names) == 4 * 5 * 3
    for i, one in enumerate(names):
        assert off(maps[1, i], expected[one]) < 2e-4, one


def test_the_best_by_the_metric_is_returned_with_its_scoreboard() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 2)
    found = vitreous.explain(model, images, "optimus", 1)
    trace = vitreous.Trace(model, images)
    with torch.no_grad():
        names, maps = candidates(trace, Class(1), single_heads=True)
        others = quick_maps(trace, Class(1))
    assert {"centred_lrp", "centred_lrp table=cp", "libra_fullgrad", "attn_lrp", "gae"} <= set(others)
    assert not {"token_ablation", "gradient", "optimus", "random"} & set(others), (
        "quick, for a class, one value a patch"
    )
    names, maps = [*names, *others], torch.cat([maps, *(one[:, None].to(maps) for one in others.values())], 1)
    for i in range(2):
        board = found.notes["scoreboard"][i]
        assert {entry["map"] for entry in board} == set(names)
        scores = [entry["token_deletion"] for entry in board]
        assert scores == sorted(scores), "the lowest curve first"
        assert board[0]["map"] == found.notes["chosen"][i] and scores[0] == found.notes["score"][i]
        assert off(found.map[i], maps[i, names.index(found.notes["chosen"][i])]) <= ROUNDING
        alone = vitreous.evaluate(model, images[i : i + 1], found.map[i : i + 1], "token_deletion", target=1)
        assert abs(alone.value.item() - scores[0]) < 1e-5


def test_it_says_so_when_nothing_beats_random() -> None:
    """A model that never reads its patches: all maps are worth the same."""
    net = zoo.ZOO["timm ViT"].make().eval()
    for block in net.blocks:
        block.attn.proj.weight.data.zero_()
    with pytest.raises(EmptyMap, match="optimus: the map is zero everywhere"):
        vitreous.explain(vitreous.Model(net), zoo.images("timm ViT", 1), "optimus", 1, **FAST)
    trace = vitreous.Trace(vitreous.Model(net), zoo.images("timm ViT", 1))
    found = vitreous.METHODS["optimus"].run(trace, Class(1), **vitreous.METHODS["optimus"].check(FAST))
    assert found.notes["beats_random"] == [False]


@pytest.mark.slow
def test_a_map_of_the_truth_beats_random(deit: vitreous.Model, oracle: Oracle) -> None:
    images = oracle.input("both")
    found = vitreous.explain(deit, images, "optimus", 243, **FAST)
    assert found.notes["beats_random"] == [True]
    assert found.notes["score"][0] < found.notes["needed"][0] < found.notes["random"][0]


def test_other_judges() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    with pytest.raises(OptionError, match="does not measure faithfulness"):
        vitreous.explain(model, images, "optimus", 1, metric="sparsity")
    with pytest.raises(OptionError, match="unknown metric"):
        vitreous.explain(model, images, "optimus", 1, metric="token_delection")
    with pytest.raises(Unsupported, match="attention between all tokens"):
        vitreous.explain(zoo.model("timm Swin"), zoo.images("timm Swin", 1), "optimus", 1)
