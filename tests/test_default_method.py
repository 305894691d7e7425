"""centred_lrp, the ensemble, and what is made where no method is named."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING
from oracles import lrp as plain_lrp
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Model
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.registry import MethodWarning

VIT = "timm ViT"


def entering_each(net: nn.Module, blocks: list[nn.Module], images: Tensor) -> list[Tensor]:
    """The tokens that enter each block, batch first."""
    taken: list[Tensor] = []
    hooks = [one.register_forward_pre_hook(lambda _, args: taken.append(args[0].detach())) for one in blocks]
    with torch.no_grad():
        net(images)
    for hook in hooks:
        hook.remove()
    return taken


@pytest.mark.parametrize("table", ["attn", "cp"])
def test_centred_lrp_in_plain_matrices(table: str) -> None:
    net = copy.deepcopy(zoo.network(VIT)).double()
    images = zoo.images(VIT, 2).double()
    plain = plain_lrp.read(VIT, net)
    streams = entering_each(net, list(net.blocks), images)
    expected = []
    for i in range(len(images)):
        total = torch.zeros(streams[0].shape[1] - 1, dtype=torch.float64)
        for number, stream in enumerate(streams):
            rest = plain_lrp.Plain(plain.blocks[number:], plain.norm, plain.head, plain.token)
            slope = plain_lrp.relevance(rest, stream[i], 2, constant=table == "cp") / stream[i]
            total += ((stream[i] - stream[i, 1:].mean(0)) * slope)[1:].sum(-1)
        expected.append(total)
    ours = vitreous.explain(Model(net), images, "centred_lrp", 2, table=table).map.flatten(1)
    assert off(ours, torch.stack(expected)) < 1e-5  # the stabiliser of y/x


def test_centred_lrp_by_the_rules_of_cp_lrp_is_the_centred_libra_map() -> None:
    explain = partial(vitreous.explain, zoo.model(VIT), zoo.images(VIT), target=1)
    assert off(explain("centred_lrp", table="cp").map, explain("libra_fullgrad", baseline="mean").map) < 1e-3


def test_a_model_gets_the_first_default_that_it_supports() -> None:
    ranked = sorted((one for one in METHODS.values() if one.default), key=lambda one: one.default)
    assert [one.default for one in ranked] == list(range(1, len(ranked) + 1)), "a place is given once"
    assert ranked[0].targeted and METHODS[ranked[0].name].family == "lrp"
    model, images = zoo.model(VIT), zoo.images(VIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = vitreous.explain(model, images)
    assert made.method == ranked[0].name
    assert off(made.map, vitreous.explain(model, images, ranked[0].name).map) <= ROUNDING
    assert vitreous.Trace(model, images).explain().method == ranked[0].name
    assert {one.method for one in vitreous.explain_targets(model, images, None, [0, 1])} == {ranked[0].name}


@pytest.mark.parametrize(("name", "used"), [("timm Swin", "attn_lrp"), ("no attention", "gradient")])
def test_another_default_is_used_and_said(name: str, used: str) -> None:
    nets = {"timm Swin": partial(zoo.network, "timm Swin"), "no attention": convolutional}
    images = zoo.images(name) if name in zoo.ZOO else torch.randn(2, 3, 32, 32)
    with pytest.warns(MethodWarning, match=f"{used} is used, because "):
        made = vitreous.explain(Model(nets[name]()), images, target=1)
    assert made.method == used


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def test_a_model_without_classes_gets_its_attention() -> None:
    model = Model(zoo.network("open_clip ViT-B-32"), name="clip")
    images = zoo.images("open_clip ViT-B-32")
    assert vitreous.explain(model, images).method == "attention"
    assert vitreous.explain(model, images, target="neuron:3").method == "centred_lrp"
    with pytest.raises(TargetError, match="clip has no classifier"):
        vitreous.explain(model, images, target=3)


def test_options_belong_to_a_named_method() -> None:
    with pytest.raises(OptionError, match="name the method that takes discard"):
        vitreous.explain(zoo.model(VIT), zoo.images(VIT), discard=0.5)


# ----------------------------------------------------------------------------------------------------------- ensemble


def share(values: Tensor) -> Tensor:
    return values / values.abs().sum((1, 2), keepdim=True)


def test_an_ensemble_is_the_weighted_mean_of_its_members() -> None:
    explain = partial(vitreous.explain, zoo.model(VIT), zoo.images(VIT), target=1)
    expected = 0.75 * share(explain("gae").map) + 0.25 * share(explain("attn_lrp").map)
    assert off(explain("ensemble", members="gae:3, attn_lrp").map, expected) < 1e-5
    usual = 0.8 * share(explain("centred_lrp").map) + 0.2 * share(explain("token_ablation").map)
    assert off(explain("ensemble").map, usual) < 1e-5


@pytest.mark.parametrize(
    ("members", "error", "said"),
    [
        ("gae", OptionError, "ensemble.members='gae': name two or more other methods"),
        ("gae:1,attn_lrp:0", OptionError, "with weights above 0"),
        ("gae:1,attn_lrp:nan", OptionError, "with weights above 0"),
        ("gae:inf,attn_lrp", OptionError, "with weights above 0"),
        ("gae:1,ensemble:1", OptionError, "name two or more other methods"),
        ("gae:x,attn_lrp", OptionError, "'gae:x' is not a method and its weight, as gae:2"),
        ("gea,attn_lrp", OptionError, "unknown method 'gea'; did you mean gae"),
        ("gae,gradient", Unsupported, "the map of gradient has another size"),
    ],
)
def test_members_that_cannot_be_joined(members: str, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        vitreous.explain(zoo.model(VIT), zoo.images(VIT), "ensemble", 1, members=members)
