"""Replayed graphs: what they depend on, and that nothing changes where there is no CUDA."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING

import vitreous
from vitreous import Model
from vitreous.registry import METHODS
from vitreous.trace.cuda_graphs import Limited, Replays, key_of, replays, state_of
from vitreous.trace.target import Class, Contrast, Numbered, Target, Top

QUIET = [one.name for one in METHODS.values() if one.replays]


def test_without_cuda_nothing_is_replayed() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    plain = vitreous.explain(model, images, "gae", 1).map
    with vitreous.replay():
        for _ in range(3):
            assert off(vitreous.explain(model, images, "gae", 1).map, plain) <= ROUNDING
        assert replays(model, METHODS["gae"], {}, images, Class(1)) is None


class Card(torch.Tensor):
    """Images that say they are on a GPU."""

    is_cuda = True


@pytest.mark.skipif(os.environ.get("VITREOUS_TYPES") == "all", reason="the check of types refuses it first")
def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(vitreous.OptionError, match="'all' or 'limited'"), vitreous.replay("some"):  # type: ignore[arg-type]
        pass


def test_what_may_be_replayed() -> None:
    model, images = zoo.model("timm ViT"), torch.zeros(2, 3, 8, 8).as_subclass(Card)
    usual = METHODS["rollout"].check({})
    assert replays(model, METHODS["rollout"], usual, images, Top(1)) is None, "only within the context"
    with vitreous.replay():
        assert replays(model, METHODS["rollout"], usual, images, Top(1)) is not None
        assert replays(model, METHODS["cdam"], METHODS["cdam"].check({}), images, Class((1, 2))) is not None
        assert replays(model, METHODS["rollout"], METHODS["rollout"].check({"discard": 0.5}), images, Top(1)) is None
        assert replays(model, METHODS["cdam"], METHODS["cdam"].check({"variant": "smooth"}), images, Class(1)) is None
        assert replays(model, METHODS["gae"], {}, images, Contrast(Class(1), Class(2))) is None
        assert (
            replays(model, METHODS["token_ablation"], METHODS["token_ablation"].check({}), images, Class(1)) is not None
        )
        assert replays(model, METHODS["occlusion"], {}, images, Class(1)) is None
        assert replays(model, METHODS["gae"], {}, images, Class(1), Top(2)) is not None
        assert replays(model, METHODS["gae"], {}, images, Class(1), Contrast(Class(1), Class(2))) is None


@pytest.mark.parametrize(
    ("method", "usual", "other"),
    [
        ("attention", {}, None),
        ("rollout", {}, {"discard": 0.5}),
        ("cdam", {}, {"variant": "smooth"}),
        ("cdam", {}, {"split": "key"}),
        ("gradcam", {}, None),
        ("gae", {}, None),
        ("grad_rollout", {}, {"discard": 0.5}),
        ("gradient", {}, None),
        ("input_x_gradient", {}, None),
        ("attn_lrp", {}, {"shifts": 2, "wrt": "image"}),
        ("cp_lrp", {"gamma_linear": 0.25}, None),
        ("legrad", {}, None),
        ("libra_fullgrad", {}, {"bias": True}),
        ("attn_lrp", {}, {"wrt": "image", "shifts": 2}),
        ("attcat", {"rules": "libra"}, None),
        ("xgradcam", {}, None),
        ("hirescam", {}, {"rules": "plain"}),
        ("token_ablation", {}, {"of": "probability"}),
        ("transformer_attribution", {"precision": "single"}, {}),
    ],
)
def test_options_with_which_a_method_is_replayed(
    method: str, usual: dict[str, Any], other: dict[str, Any] | None
) -> None:
    declared = METHODS[method]
    assert declared.can_replay(declared.check(usual))
    assert other is None or not declared.can_replay(declared.check(other))


def test_no_other_method_is_replayed() -> None:
    """One that asks the GPU for a number cannot be recorded."""
    assert set(QUIET) == {
        *("attention", "rollout", "cdam", "gradcam", "gae", "grad_rollout", "gradient", "input_x_gradient"),
        *("attn_lrp", "cp_lrp", "legrad", "token_ablation", "transformer_attribution"),
        *("attcat", "centred_lrp", "hirescam", "libra_fullgrad", "xgradcam"),
    }


def test_numbers_on_the_device_mean_the_same_classes() -> None:
    output = torch.randn(3, 7)
    asked = Numbered(torch.tensor([4, 0, 6]))
    assert torch.equal(asked(output, output), Class((4, 0, 6))(output, output))
    assert torch.equal(Numbered(torch.tensor([4]))(output, output), Class(4)(output, output))
    assert [one.class_numbers(3) for one in (Class(5), Class((4, 0, 6)), Class((2,)), Top(1))] == [
        [5, 5, 5],
        [4, 0, 6],
        [2, 2, 2],
        None,
    ]


def test_a_graph_belongs_to_the_tensors_of_a_network() -> None:
    net = copy.deepcopy(zoo.network("timm ViT"))
    model, images = Model(net), zoo.images("timm ViT")

    def key(*targets: Target) -> object:
        return key_of("gae", {}, model, images, *(targets or (Class(1),)))

    first = key()
    assert key(Class((2, 3, 4))) == first, "numbers of classes are put in"
    assert key(Top(1)) != first and key(Top(2)) != key(Top(1))
    assert key(Class(1), Class(2)) != first and key(Class(1), Top(2)) == key(Class(3), Top(2))
    with torch.no_grad():
        net.head.weight.mul_(2)
    assert key() == first, "weights may change in place"
    net.head.weight = torch.nn.Parameter(net.head.weight.detach().clone())
    assert key() != first


def test_what_cannot_be_recorded_runs_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refused(*args: Any) -> None:
        tries.append(args)
        raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")

    monkeypatch.setattr("vitreous.trace.cuda_graphs.Graph", refused)
    found = Replays()
    images = torch.zeros(1, 3, 8, 8)
    for value in (1.0, 2.0, 3.0, 4.0):
        (made,) = found("key", lambda x, _, value=value: (x + value,), images, (Class(1),))
        assert torch.equal(made, images + value)
    assert len(tries) == 1, "it is tried once"


class Taped:
    """Stands for a graph on a machine without a GPU."""

    bytes = 100
    wrong = 0.0

    def __init__(self, run: Any, images: torch.Tensor, targets: Any, errors: str) -> None:
        self.run = run

    def __call__(self, images: torch.Tensor, targets: Any) -> tuple[torch.Tensor, ...]:
        return tuple(one + self.wrong for one in self.run(images, targets))


def test_the_third_batch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.trace.cuda_graphs.Graph", Taped)
    found, images = Limited(zoo.model("timm ViT")), torch.ones(1, 3, 8, 8)
    for count in range(4):
        (made,) = found("key", lambda x, _: (x + 1,), images, (Class(1),))
        assert torch.equal(made, images + 1)
        assert bool(found.graphs) == (count >= 2)


def test_a_graph_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.trace.cuda_graphs.Graph", Taped)
    monkeypatch.setattr(Taped, "wrong", 0.1)
    found, images = Limited(zoo.model("timm ViT")), torch.ones(1, 3, 8, 8)
    for _ in range(4):
        assert torch.equal(found("key", lambda x, _: (x + 1,), images, (Class(1),))[0], images + 1)
    assert not found.graphs and found.unrecordable == {"key"}


def test_graphs_are_limited_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not used for longest goes, and is not recorded again."""
    monkeypatch.setattr("vitreous.trace.cuda_graphs.Graph", Taped)
    found, images = Limited(zoo.model("timm ViT")), torch.ones(1, 3, 8, 8)
    with vitreous.limit_memory(4 * 250):
        for key in "aaabbbacccc":
            found(key, lambda x, _: (x + 1,), images, (Class(1),))
    assert list(found.graphs) == ["a", "c"] and found.unrecordable == {"b"}


def test_a_graph_belongs_to_what_python_reads_of_a_network() -> None:
    net = copy.deepcopy(zoo.network("timm ViT"))
    model = Model(net)
    first = state_of(model)
    assert first is not None and state_of(model) == first
    net.blocks[0].attn.scale *= 2
    assert state_of(model) != first
    net.blocks[0].attn.scale /= 2
    assert state_of(model) == first
    net.blocks[0].norm1 = torch.nn.Identity()
    assert state_of(model) != first
    hook = net.head.register_forward_hook(lambda *_: None)
    assert state_of(model) is None, "a replay would not call it"
    hook.remove()
    assert state_of(model) is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", QUIET)
def test_limited_graphs_give_the_same_maps(method: str) -> None:
    model = Model(copy.deepcopy(zoo.network("timm ViT")).cuda())
    images = [torch.randn(3, 3, 64, 64, device="cuda") for _ in range(5)]
    plain = [vitreous.explain(model, x, method, 1).map for x in images]
    with vitreous.replay("limited"):
        found = [vitreous.explain(model, x, method, 1).map for x in images]
        for one, other in zip(found, plain, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max()
        if METHODS[method].can_replay(METHODS[method].check({})):
            kept, _ = replays(model, METHODS[method], METHODS[method].check({}), images[0], Class(1)) or (None, None)
            assert kept is not None and len(kept.graphs) == 1 and not kept.unrecordable
        for block in model.module.blocks:
            block.attn.scale *= 0.5
        changed = vitreous.explain(model, images[0], method, 1).map
    again = vitreous.explain(model, images[0], method, 1).map
    assert (changed - again).abs().max() <= 1e-4 * again.abs().max(), "not a replay of what it was"


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
        found = replays(model, METHODS[method], values := METHODS[method].check({}), images, Class(1))
        assert (found is not None) == METHODS[method].can_replay(values)
        assert found is None or (not found[0].unrecordable and found[0].graphs)
    for one, other in zip(again, plain):
        assert torch.allclose(one.map, other.map, rtol=1e-4, atol=1e-6)
        assert one.target == other.target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", [name for name in QUIET if METHODS[name].several])
def test_several_targets_are_one_replay(method: str, dtype: torch.dtype) -> None:
    model = Model(copy.deepcopy(zoo.network("timm ViT")).to("cuda", dtype))
    images, others = (torch.randn(3, 3, 64, 64, device="cuda", dtype=dtype) for _ in range(2))
    asked = [[1, 2, 3], "top-2", 5]
    plain = [vitreous.explain(model, others, method, target) for target in asked]
    near = 1e-4 if dtype == torch.float32 else 5e-2
    for together in (vitreous.explain_targets(model, others, method, asked), replayed(model, images, others, method)):
        for one, other in zip(together, plain, strict=True):
            assert (one.map - other.map).abs().max() <= near * other.map.abs().max()
            assert one.target == other.target


def replayed(model: Model, images: torch.Tensor, others: torch.Tensor, method: str) -> list[vitreous.Attribution]:
    with vitreous.replay():
        for _ in range(3):
            vitreous.explain_targets(model, images, method, [0, "top-2", [4, 5, 6]])
        found = replays(model, METHODS[method], METHODS[method].check({}), images, Class(0))
        assert found is not None and len(found[0].graphs) == 1
        return vitreous.explain_targets(model, others, method, [[1, 2, 3], "top-2", 5])
