"""Several targets at once: the maps of each alone, from one run and one way back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import DIFFERENCES
from test_methods import IN_MODULES

import vitreous
from vitreous import Class, Concept, Contrast, Model, Neuron, Trace
from vitreous.capture.attention_backward import Followed
from vitreous.errors import OptionError, TargetError
from vitreous.registry import METHODS
from vitreous.trace import apply, batched_targets
from vitreous.trace.cuda_graphs import Numbered

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
counting = importlib.import_module("counting")

TOGETHER = [name for name, declared in METHODS.items() if declared.several]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("cdam", {"split": "value"}),
    ("cdam", {"split": "key"}),
    ("gradcam", {"layer": 0}),
    ("grad_rollout", {"discard": 0.3}),
    ("attn_lrp", {"wrt": "image"}),
    ("cp_lrp", {"gamma_linear": 0.25}),
]
MODELS = [
    "timm ViT",
    "timm ViT unfused",  # attention written out
    "timm SigLIP",  # a pool
    "torchvision ViT",  # nn.MultiheadAttention
    "HF ViT sdpa",
    "flat heads",  # written out by bmm, patches averaged
]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (name, method, {}) for name in MODELS for method in TOGETHER if zoo.ZOO[name].blocks or method not in IN_MODULES
]
CASES += [(name, *one) for name in MODELS[:2] for one in OPTIONS]


def targets(trace: Trace) -> list[Any]:
    """Of every kind: some read the output, some the embedding."""
    embedding = trace.any_finished().embedding
    assert embedding is not None
    concept = Concept(torch.linspace(-1, 1, embedding.shape[1]), "l2")
    return ["top-2", [3, Contrast(Class(0), Class(5))], concept, Contrast(Neuron(2), concept)]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No target may be explained by itself."""

    def fail(run: Any, targets: Any) -> list[Any]:
        if len(targets) > 1:
            pytest.fail("target after target")
        return [run(targets[0])]

    monkeypatch.setattr(batched_targets, "one_by_one", fail)
    monkeypatch.setitem(batched_targets.ROWS, "cpu", 100)


def check(many: list[vitreous.Attribution], alone: list[vitreous.Attribution]) -> None:
    assert len(many) == len(alone)
    for one, other in zip(many, alone):
        assert off(one.map, other.map) < (DIFFERENCES if one.method == "attcat" else 1e-5), "attcat nearly cancels"
        assert one.targets == other.targets
        assert (one.method, one.signed, one.options) == (other.method, other.signed, other.options)


def test_which_methods_go_back_once() -> None:
    assert {"cdam", "gradcam", "gae", "grad_rollout", "gradient", "input_x_gradient", "attn_lrp", "cp_lrp"} <= {
        *TOGETHER
    }
    cdam = METHODS["cdam"]
    assert cdam.takes_several(cdam.check({})) and not cdam.takes_several(cdam.check({"variant": "smooth"}))
    assert not METHODS["rise"].takes_several({})


@pytest.mark.parametrize(("name", "method", "options"), CASES, ids=str)
def test_each_map_is_that_of_its_target_alone(name: str, method: str, options: dict[str, Any], together: None) -> None:
    model, images = zoo.model(name), zoo.images(name)[:2]
    trace = Trace(model, images)
    asked = targets(trace)
    alone = [vitreous.explain(model, trace, method, target, **options) for target in asked]
    with counting.counted_runs() as runs:
        many = vitreous.explain_targets(model, images, method, asked, **options)
    check(many, alone)
    assert runs == [2]


def test_gradients_are_those_of_the_network(together: None) -> None:
    net, images = zoo.network("torchvision ViT"), zoo.images("torchvision ViT")
    leaf = images.clone().requires_grad_()
    output = net(leaf)
    many = vitreous.explain_targets(zoo.model("torchvision ViT"), images, "gradient", range(7), reduce="sum")
    for k, one in enumerate(many):
        (grad,) = torch.autograd.grad(output[:, k].sum(), leaf, retain_graph=True)
        assert off(one.map, grad.sum(1)) < 1e-5


def test_one_way_back_for_all(together: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, shown = Followed.backward, []
    monkeypatch.setattr(Followed, "backward", lambda ctx, *grads: shown.append(ctx) or backward(ctx, *grads))
    vitreous.explain_targets(zoo.model("timm ViT"), zoo.images("timm ViT"), "gae", [0, 1, 2, 3])
    assert len(shown) == 2, "once for each layer but the last, which shows itself"


@pytest.mark.parametrize(
    ("method", "options"),
    [("token_ablation", {}), ("occlusion", {"of": "probability"}), ("rise", {"masks": 5}), ("vit_cx", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variants_run_once_for_all(method: str, options: dict[str, Any]) -> None:
    """Other options of the same trace are other variants."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 2)
    asked = [0, [1, 2], "top-1"]
    alone = [vitreous.explain(model, images, method, target, **options) for target in asked]
    with counting.counted_runs() as once:
        vitreous.explain(model, images, method, 0, **options)
    with counting.counted_runs() as runs:
        check(vitreous.explain_targets(model, images, method, asked, **options), alone)
    assert runs == once
    trace = Trace(model, images)
    others = {"rise": {"masks": 5, "seed": 1}, "occlusion": {"window": 2}, "vit_cx": {"noise": 0.3}}.get(method, {})
    vitreous.explain(model, trace, method, 0, **options)
    again = vitreous.explain(model, trace, method, 0, **others)
    assert off(again.map, vitreous.explain(model, images, method, 0, **others).map) < 1e-5


@pytest.mark.parametrize("method", ["cdam", "gae", "attn_lrp"])
def test_a_trace_that_was_used_before(method: str, together: None) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = Trace(model, images)
    first = vitreous.explain(model, trace, method, 4)
    with counting.counted_runs() as runs:
        check(vitreous.explain_targets(model, trace, method, [4, 2])[:1], [first])
    assert runs == []


@pytest.mark.parametrize("method", ["cdam", "gae", "gradient"])
def test_parts_of_targets_and_of_images(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 3)
    asked = [0, [1, 2, 3], "top-1", 4, 5, [6, 0, "top-2"], 2]
    alone = [vitreous.explain(model, images, method, target) for target in asked]
    for rows in (3, 6, 12):  # 1, 2 or 4 targets at a time
        monkeypatch.setitem(batched_targets.ROWS, "cpu", rows)
        check(vitreous.explain_targets(model, images, method, asked), alone)
    with vitreous.limit_memory("1k"), counting.counted_runs() as runs:  # one image, one target at a time
        check(vitreous.explain_targets(model, images, method, asked), alone)
    assert runs == [1, 1, 1]


def test_about_as_many_targets_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        batched_targets, "in_batches", lambda run, count, size: sizes.append(size) or [run(slice(0, count))]
    )
    output = torch.randn(2, 7, requires_grad=True)
    leaf = torch.randn(2, 3, 3)
    maps = batched_targets.maps_of(lambda target: leaf + 0 * target(output, output)[:, None, None], [Class(1)] * 5, 4)
    assert sizes == [3] and len(maps) == 5


@pytest.mark.parametrize(
    ("method", "options", "runs"),
    [
        ("legrad", {}, 1),
        ("transformer_attribution", {}, 1),
        ("cdam", {"variant": "smooth", "samples": 2}, None),
        ("integrated_gradients", {"steps": 2}, None),
        ("token_ablation", {}, None),
        ("vit_cx", {}, None),
    ],
)
def test_methods_that_take_one_target_after_the_other(method: str, options: dict[str, Any], runs: int | None) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 1)
    alone = [vitreous.explain(model, images, method, target, **options) for target in (1, "top-1")]
    with counting.counted_runs() as seen:
        many = vitreous.explain_targets(model, images, method, [1, "top-1"], **options)
    check(many, alone)
    assert [{*one.notes} for one in many] == [{*one.notes} for one in alone]
    assert runs is None or len(seen) == runs


def test_a_method_that_knows_no_target_runs_once() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    with counting.counted_runs() as runs:
        many = vitreous.explain_targets(model, images, "rollout", [1, 2])
    assert runs == [3]
    check(many, [vitreous.explain(model, images, "rollout")] * 2)


class Doubtful(torch.autograd.Function):
    """Its backward looks at a number, which `torch.vmap` cannot."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * (2.0 if grads[0].abs().max().item() >= 0 else 1.0)


class Strange(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.network("timm ViT")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(Doubtful.apply(x))
        return out


def test_a_network_that_cannot_be_taken_back_for_many() -> None:
    images = zoo.images("timm ViT")
    plain = vitreous.explain_targets(zoo.model("timm ViT"), images, "gradient", [1, 2])
    many = vitreous.explain_targets(Model(Strange()), images, "gradient", [1, 2])
    for one, other in zip(many, plain, strict=True):
        assert off(one.map, 2 * other.map) < 1e-5


def test_an_error_of_the_method_is_told(together: None) -> None:
    with pytest.raises(OptionError, match="layer 9 is out of range"):
        vitreous.explain_targets(zoo.model("timm ViT"), zoo.images("timm ViT"), "gradcam", [1, 2], layer=9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("top-1", "takes a list of targets, not 'top-1'"),
        (3, "for one target use explain"),
        (Class(3), "takes a list"),
        ([], "list of targets is empty"),
        ([1, [1, 2]], "2 targets for 3 images"),
        ([1, 99], "class 99 is out of range"),
    ],
)
def test_wrong_targets(given: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        vitreous.explain_targets(zoo.model("timm ViT"), zoo.images("timm ViT"), "cdam", given)


def test_numbers_of_classes_may_come_as_tensors() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    many = vitreous.explain_targets(model, images, "cdam", torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert [one.target for one in many] == ["1;2;3", "4;5;6"]


def test_one_replay_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph would: the numbers of classes lie in tensors, the run is the graph's own."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    asked = [[1, 2, 3], "top-2"]
    alone = [vitreous.explain(model, images, "gae", target) for target in asked]
    calls = []

    def graphs(key: Any, run: Any, images: torch.Tensor, targets: Any) -> Any:
        calls.append(key)
        return run(images.clone(), (Numbered(torch.tensor(targets[0].index)), targets[1]))

    monkeypatch.setattr(apply, "on_gpu", lambda images: True)
    monkeypatch.setattr(apply, "replays", lambda *given: (graphs, "key"))
    with counting.counted_runs() as runs:
        check(vitreous.explain_targets(model, images, "gae", asked), alone)
    assert len(calls) == 1 and runs == [3]
