"""Relevance of pixels, averaged over shifted images."""

from __future__ import annotations

import pytest
import torch
import zoo
from conftest import Oracle, off
from machine import ROUNDING, rare
from torch import Tensor

import vitreous
from vitreous import METHODS, Model
from vitreous.errors import OptionError

SHIFTED = [name for name, declared in METHODS.items() if "shifts" in declared.options.model_fields]


def test_every_relevance_of_pixels_can_be_shifted() -> None:
    assert set(SHIFTED) == {name for name, declared in METHODS.items() if "wrt" in declared.options.model_fields}


@pytest.mark.parametrize("method", SHIFTED)
def test_one_shift_is_none(method: str) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    for wrt in ("tokens", "image"):
        ours = vitreous.explain(model, images, method, 1, wrt=wrt, shifts=1).map
        assert torch.equal(ours, vitreous.explain(model, images, method, 1, wrt=wrt).map)


@pytest.mark.parametrize("method", SHIFTED)
@pytest.mark.parametrize(
    ("name", "shifts", "ways"),
    [("timm ViT", 4, [-8, -4, 0, 4]), ("timm ViT", 3, [-5, 0, 5]), ("timm Swin", 2, [-2, 0])],
)
def test_shifted_back_and_averaged(method: str, name: str, shifts: int, ways: list[int]) -> None:
    model, images = zoo.model(name), zoo.images(name, 2)
    ours = vitreous.explain(model, images, method, [1, 2], wrt="image", shifts=shifts)
    maps = [
        vitreous.explain(model, images.roll((way, way), (2, 3)), method, [1, 2], wrt="image").map.roll(
            (-way, -way), (1, 2)
        )
        for way in ways
    ]
    assert off(ours.map, torch.stack(maps).mean(0)) < ROUNDING
    if method == "res_lrp":
        plain = vitreous.explain(model, images, method, [1, 2], wrt="image")
        assert off(ours.notes["amplification"], plain.notes["amplification"]) < ROUNDING, "of the image as it is"


@pytest.mark.parametrize("method", SHIFTED)
def test_the_class_is_that_of_the_image_as_it_is(method: str) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    best = vitreous.explain(model, images, method, "top-1", wrt="image", shifts=2)
    named = vitreous.explain(model, images, method, [int(t) for t in best.targets], wrt="image", shifts=2)
    assert off(best.map, named.map) < ROUNDING
    many = vitreous.explain_targets(model, images, method, [1, 2], wrt="image", shifts=2)
    assert off(many[1].map, vitreous.explain(model, images, method, 2, wrt="image", shifts=2).map) < ROUNDING


def test_autocast_is_kept() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    seen: list[torch.dtype] = []
    hook = zoo.network("timm ViT").blocks[0].mlp.fc1.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        vitreous.explain(model, images, "attn_lrp", 1, wrt="image", shifts=2)
    hook.remove()
    assert seen[-2:] == [torch.bfloat16] * 2


@pytest.mark.parametrize("method", SHIFTED)
def test_what_cannot_be_shifted_is_refused(method: str) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    with pytest.raises(OptionError, match="shifts=4 needs wrt=image"):
        vitreous.explain(model, images, method, 1, wrt="tokens", shifts=4)
    with pytest.raises(OptionError, match="shifts=17 is too many: a patch of timm-vit is 16 pixels wide"):
        vitreous.explain(model, images, method, 1, wrt="image", shifts=17)


def grid_share(maps: Tensor, patch: int) -> list[float]:
    """The share of the frequencies of the patch grid in the mean of |R| by rows and by columns."""
    shares = []
    for axis in (0, 1):
        line = maps.abs().double().mean(1 - axis)
        power = torch.fft.rfft(line - line.mean()).abs().square()
        step = len(line) // patch
        shares.append(float(power[step::step].sum() / power.sum()))
    return shares


@pytest.mark.parametrize("method", ["attn_lrp", *rare("cp_lrp", "res_lrp")])
def test_the_grid_of_patches_fades(deit: Model, oracle: Oracle, method: str) -> None:
    """The row profile of DeiT-Tiny's maps holds 25 to 44 % of its variance at these frequencies, then 1 to 4 %."""
    images, target = oracle.input("both"), oracle.targets("both")[0]
    plain, shifted = (
        grid_share(vitreous.explain(deit, images, method, target, wrt="image", shifts=shifts).map[0], 16)
        for shifts in (1, 4)
    )
    assert plain[0] > 0.2 and plain[1] > 0.05
    assert all(after < before / 5 for before, after in zip(plain, shifted))
