"""Transformer Input Sampling: the authors' masks, scores and maps, tokens taken out, and clusters without gaps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import test_batched_targets
import test_measured_layout
import test_perturbation as perturbation
import torch
import zoo
from conftest import Oracle, off
from machine import DIFFERENCES, rare
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.errors import EmptyMap, Unsupported
from vitreous.methods.perturbation.tis import (
    centroids,
    channels,
    distinct,
    largest,
    mask_scores,
    masks_of,
    mean_kept,
    nearest,
)
from vitreous.trace.target import Class, Target

PUBLISHED = ("both", "dogbird")
UNIT = 2


@pytest.fixture(scope="module")
def double(deit: Model) -> Model:
    return Model(copy.deepcopy(deit.net).double())


class Stored:
    """What the authors' code made for an image."""

    def __init__(self, oracle: Oracle, image: str) -> None:
        self.image, self.number = oracle.input(image), oracle.targets(image)[0]
        self.masks, self.scores, self.map = (
            torch.from_numpy(oracle("tis", f"{image}/{self.number}/{key}")) for key in ("masks", "scores", "map")
        )
        self.masks = self.masks.bool()
        self.centroids = torch.from_numpy(oracle("tis", f"{image}/any/centroids_first32"))

    @property
    def target(self) -> Target:
        return Class(self.number).graded()


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------ the authors' numbers


@pytest.mark.parametrize("image", PUBLISHED)
def test_masks_and_maps_oracle(oracle: Oracle, image: str) -> None:
    stored = Stored(oracle, image)
    assert torch.equal(largest(stored.centroids, 0.5), stored.masks[:32])
    assert off(mean_kept(stored.masks, stored.scores.double()).reshape(14, 14), stored.map) < 1e-6


def test_scores_oracle(deit: Model, oracle: Oracle) -> None:
    stored = Stored(oracle, "both")
    ours = mask_scores(Trace(deit, stored.image), 0, stored.target, stored.masks[:16])
    assert np.abs(ours.numpy() - stored.scores[:16].numpy()).max() < 1e-4 * stored.scores.max()


@pytest.mark.slow
@pytest.mark.parametrize("image", PUBLISHED)
def test_all_scores_oracle(deit: Model, oracle: Oracle, image: str) -> None:
    stored = Stored(oracle, image)
    ours = mask_scores(Trace(deit, stored.image), 0, stored.target, stored.masks)
    assert off(ours, stored.scores) < 1e-4
    assert off(mean_kept(stored.masks, ours).reshape(14, 14), stored.map) < 3e-5


@pytest.mark.slow
def test_scores_oracle_in_double_precision(double: Model, oracle: Oracle) -> None:
    stored = Stored(oracle, "both")
    ours = mask_scores(Trace(double, stored.image), 0, stored.target, stored.masks[:128])
    assert np.abs(ours.numpy() - stored.scores[:128].numpy()).max() < 2e-7 * stored.scores.max()


@pytest.mark.slow
def test_other_clusters_give_nearly_the_same_map(deit: Model, oracle: Oracle) -> None:
    stored = Stored(oracle, "both")
    ours = vitreous.explain(deit, stored.image, "tis", stored.number, masks=256)
    assert ours.notes["masks"].tolist() == [256]
    assert np.corrcoef(ours.map.flatten(), stored.map.flatten())[0, 1] > 0.9


# ------------------------------------------------------------------------------------------------------------ clusters


def test_clusters_of_a_real_image(deit: Model, oracle: Oracle) -> None:
    """None is empty, none is there twice, each is the mean of its channels, and they are nearer than those drawn."""
    trace = Trace(deit, oracle.input("both"))
    points = channels(trace, 0)
    assert points.shape == (12 * 192, 196)
    found = centroids(points, 1024, stream())
    assert len(found) == len(distinct(found)) == 1024
    assert found.abs().amax(1).min() > 0
    labels, away = nearest(points, found)
    assert labels.bincount(minlength=1024).min() > 0
    for number in (0, 17, 1023):
        assert off(found[number], points[labels == number].mean(0)) < 1e-12
    drawn = points[torch.randperm(len(points), generator=stream())[:1024]]
    assert away.square().sum() < 0.9 * nearest(points, drawn)[1].square().sum()
    again = centroids(points, 1024, stream())
    assert torch.equal(again, found) and off(centroids(points, 1024, stream(1)), found) > 0.1


def test_empty_clusters_begin_again_at_the_farthest_point() -> None:
    """Many equal points, all of them drawn first, and a few others: each of the others gets its own centroid."""
    points = torch.cat([torch.ones(50, 4), 10 * torch.eye(4)]).double()
    for seed in range(5):
        found = centroids(points, 5, stream(seed))
        assert len(found) == 5
        assert nearest(points, found)[1].max() < 1e-6


def test_no_more_clusters_than_different_channels() -> None:
    points = torch.randn(6, 9, generator=stream()).double().repeat(4, 1)
    assert len(centroids(points, 20, stream())) == 6
    assert len(centroids(points[:6], 1024, stream())) == 6


def test_channels_are_the_outputs_of_all_blocks() -> None:
    """By layer, then by channel, the patches only; those that say nothing are left out."""
    net = copy.deepcopy(zoo.network("timm DINOv2 registers"))
    with torch.no_grad():
        net.blocks[1].ls1.gamma[3] = net.blocks[1].ls2.gamma[3] = net.blocks[0].ls1.gamma[3] = 0
        net.blocks[0].ls2.gamma[3] = net.patch_embed.proj.weight[3] = net.pos_embed[..., 3] = 0
    outs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, args, out: outs.append(out[1, 5:])) for block in net.blocks]
    images = zoo.images("timm DINOv2 registers")
    net(images)
    for hook in hooks:
        hook.remove()
    expected = torch.cat([out.mT for out in outs]).detach()
    silent = [3, 32 + 3]
    assert expected[silent].std(1).max() == 0
    ours = channels(Trace(Model(net), images), 1)
    assert off(ours, expected[[i for i in range(96) if i not in silent]]) <= DIFFERENCES


# --------------------------------------------------------------------------------------------------------- the formula


def without(net: nn.Module, image: Tensor, kept: list[int]) -> Tensor:
    """The probability of an image of whose tokens only these enter the first block."""
    hook = net.blocks[0].register_forward_pre_hook(lambda _, args: (args[0][:, kept], *args[1:]))
    with torch.no_grad():
        p = net(image[None]).softmax(-1)[0, UNIT]
    hook.remove()
    return p


@pytest.mark.parametrize("name", ["timm ViT no CLS", "timm DINOv2 registers", *rare("timm ViT")])
def test_tokens_are_taken_out(name: str) -> None:
    model, images = perturbation.exact(name), perturbation.pictures(name, 2)
    trace = Trace(model, images)
    ours = vitreous.explain(model, trace, "tis", UNIT, masks=12, keep=0.3, seed=1)
    prefix, net = zoo.ZOO[name].prefix, copy.deepcopy(model.net)
    for i, image in enumerate(images):
        masks = masks_of(trace, i, 12, 0.3, 1)
        assert len(masks) == ours.notes["masks"][i] == 12 and masks.sum(1).tolist() == [4] * 12, "int(0.3 · 16)"
        kept = [[*range(prefix), *(prefix + patch for patch in mask.nonzero().flatten().tolist())] for mask in masks]
        p = [without(net, image, some).item() for some in kept]
        for patch in range(16):
            shown = [one for one, mask in zip(p, masks) if mask[patch]]
            expected = sum(shown) / len(shown) if shown else sum(p) / len(p)
            assert ours.map[i].flatten()[patch].item() == pytest.approx(expected, rel=1e-6)


def test_a_patch_in_no_mask_gets_the_mean() -> None:
    masks = torch.tensor([[True, True, False, False], [True, False, True, False]])
    found = mean_kept(masks, torch.tensor([0.2, 0.6]))
    assert found.tolist() == pytest.approx([0.4, 0.2, 0.6, 0.4])


def test_a_mask_keeps_a_share_and_at_least_one() -> None:
    values = torch.tensor([[0.0, 3.0, 2.0, 1.0, 2.0]])
    assert largest(values, 0.5).tolist() == [[False, True, True, False, False]], "of equals, the first"
    assert largest(values, 0.9).sum() == 4
    assert largest(values, 0.01).tolist() == [[False, True, False, False, False]]


def test_what_has_no_probability_is_scored_as_it_is() -> None:
    model, images = perturbation.exact("timm ViT"), perturbation.pictures("timm ViT", 1)
    score, chance = (vitreous.explain(model, images, "tis", target).map for target in (f"neuron:{UNIT}", UNIT))
    assert off(score, chance) > 0.1


# ------------------------------------------------------------------------------------------- targets, memory, precision


def test_seeds_give_other_masks() -> None:
    model, images = perturbation.exact("timm ViT"), perturbation.pictures("timm ViT")
    maps = [vitreous.explain(model, images, "tis", UNIT, masks=12, seed=seed).map for seed in (0, 1)]
    assert off(maps[1], maps[0]) > 1e-4


@pytest.mark.parametrize(
    "check",
    [
        perturbation.test_targets_and_maps_are_each_images_own,
        perturbation.test_where_memory_runs_out_batches_are_halved,
        perturbation.test_memory_for_not_even_one_is_an_error,
    ],
)
def test_like_other_methods_that_run_variants(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(perturbation.SMALL, "tis", {"masks": 20})
    check("tis")


def test_maps_do_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(perturbation.SMALL, "tis", {"masks": 20})
    perturbation.test_maps_do_not_depend_on_memory("tis", "timm ViT", monkeypatch)


@pytest.mark.parametrize("name", ["timm ViT", *rare("torchvision ViT")])
def test_mixed_precision_of_the_caller(name: str) -> None:
    perturbation.test_mixed_precision_of_the_caller("tis", name)


def test_masks_run_once_for_all_targets() -> None:
    test_batched_targets.test_variants_run_once_for_all("tis", {"masks": 5})


# ------------------------------------------------------------------------------------------------------------ refusals


def test_layers_that_are_no_modules() -> None:
    with pytest.raises(Unsupported, match=r"tis needs each layer in a separate module.* Try token_ablation or rise"):
        vitreous.explain(zoo.model("flat heads"), zoo.images("flat heads"), "tis", 1)


class Apart(test_measured_layout.Tokens):
    """Blocks that return what is added to the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return self.head(self.read(x))


def test_blocks_that_return_something_else_than_the_tokens() -> None:
    model, images = Model(Apart(test_measured_layout.ROWS).eval(), classifier=True), torch.randn(1, 3, 64, 96)
    with pytest.raises(Unsupported, match=r"does not pass its tokens from block to block .* which tis needs"):
        vitreous.explain(model, images, "tis", 1)


def test_an_image_without_any_mask_has_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "to_patches", lambda self, tokens: torch.ones(len(tokens), 4, 4, 8))
    with pytest.raises(EmptyMap, match=r"tis: the map is zero everywhere \(image 0"):
        vitreous.explain(perturbation.exact("timm ViT"), perturbation.pictures("timm ViT"), "tis", UNIT)
