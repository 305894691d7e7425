"""Replayed graphs: what they depend on, and that nothing changes where there is no CUDA."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo

import vitreous
from vitreous import Model
from vitreous.graphs import QUIET, key_of, replays
from vitreous.registry import METHODS
from vitreous.target import Class, Contrast, Numbered, Top


def test_without_cuda_nothing_is_replayed() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    plain = vitreous.explain(model, images, "gae", 1).map
    with vitreous.replay():
        for _ in range(3):
            assert torch.equal(vitreous.explain(model, images, "gae", 1).map, plain)
        assert replays("gae", {}, images, Class(1)) is None


class Card(torch.Tensor):
    """Images that say they are on a GPU."""

    is_cuda = True


def test_what_may_be_replayed() -> None:
    images = torch.zeros(2, 3, 8, 8).as_subclass(Card)
    usual = METHODS["rollout"].check({})
    assert replays("rollout", usual, images, Top(1)) is None, "only within the context"
    with vitreous.replay():
        assert replays("rollout", usual, images, Top(1)) is not None
        assert replays("cdam", METHODS["cdam"].check({}), images, Class((1, 2))) is not None
        assert replays("rollout", METHODS["rollout"].check({"discard": 0.5}), images, Top(1)) is None
        assert replays("cdam", METHODS["cdam"].check({"variant": "smooth"}), images, Class(1)) is None
        assert replays("gae", {}, images, Contrast(Class(1), Class(2))) is None
        assert replays("token_ablation", METHODS["token_ablation"].check({}), images, Class(1)) is not None
        assert replays("occlusion", {}, images, Class(1)) is None
    assert set(QUIET) <= set(METHODS)


def test_numbers_on_the_device_mean_the_same_classes() -> None:
    output = torch.randn(3, 7)
    asked = Numbered(torch.tensor([4, 0, 6]))
    assert torch.equal(asked(output, output), Class((4, 0, 6))(output, output))
    assert torch.equal(Numbered(torch.tensor([4]))(output, output), Class(4)(output, output))


def test_a_graph_belongs_to_the_tensors_of_a_network() -> None:
    net = copy.deepcopy(zoo.network("timm ViT"))
    model, images = Model(net), zoo.images("timm ViT")

    def key(target: object = Class(1)) -> object:
        return key_of("gae", {}, model, images, target)  # type: ignore[arg-type]

    first = key()
    assert key(Class((2, 3, 4))) == first, "numbers of classes are put in"
    assert key(Top(1)) != first and key(Top(2)) != key(Top(1))
    with torch.no_grad():
        net.head.weight.mul_(2)
    assert key() == first, "weights may change in place"
    net.head.weight = torch.nn.Parameter(net.head.weight.detach().clone())
    assert key() != first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", QUIET)
def test_replayed_maps_are_those_of_plain_runs(method: str) -> None:
    model = Model(copy.deepcopy(zoo.network("timm ViT")).cuda())
    images, others = (torch.randn(3, 3, 64, 64, device="cuda") for _ in range(2))
    plain = [vitreous.explain(model, x, method, target) for x, target in ((others, [1, 2, 3]), (others, None))]
    with vitreous.replay():
        for target in (1, None):
            for _ in range(3):
                vitreous.explain(model, images, method, target)
        again = [vitreous.explain(model, others, method, target) for target in ([1, 2, 3], None)]
    for one, other in zip(again, plain):
        assert torch.allclose(one.map, other.map, rtol=1e-4, atol=1e-6)
        assert one.target == other.target
