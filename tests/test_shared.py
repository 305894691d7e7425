"""Many methods on one forward pass: the maps of each alone, fewer passes, and nothing kept for longer than needed."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import DIFFERENCES, ROUNDING, rare

import vitreous
from vitreous import Class, Concept, Contrast, Model, Neuron, Trace
from vitreous.attribute import attribute, attribute_all
from vitreous.errors import InputError
from vitreous.evaluation.study.kind import Scene
from vitreous.evaluation.study.maps import Maps
from vitreous.registry import METHODS, method
from vitreous.trace.shared import in_groups, pays

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
many = importlib.import_module("many")
READS = [name for name, one in METHODS.items() if one.graph_of(one.check({})) == "model"]
POOLED = [name for name in zoo.ZOO if "SigLIP" in name]
ALONE = ["timm SigLIP", "timm Swin", "timm CaiT", "timm XCiT"]  # a pool, windows, attention in parts, no tokens


def maps_of(trace: Trace, name: str, target: Any = None, **options: Any) -> Any:
    return attribute(trace, METHODS[name], target, METHODS[name].check(options)).map


def shared(name: str, count: int = 3) -> Trace:
    trace = Trace(zoo.model(name), zoo.images(name, count))
    trace.share()
    assert trace.shared is not None
    return trace


# -------------------------------------------------------------------------------------------------------- the same maps


@pytest.mark.parametrize("name", ["timm ViT", *rare(*sorted(set(zoo.ZOO) - {"timm ViT", *ALONE, *POOLED}))])
def test_maps_are_those_of_each_method_alone(name: str) -> None:
    trace, target = shared(name), Neuron(1)
    for one in [*READS, "attention", "rollout"]:
        alone = maps_of(Trace(trace.model, trace.images), one, target if METHODS[one].targeted else None)
        assert off(maps_of(trace, one, target if METHODS[one].targeted else None), alone) <= ROUNDING, one


@pytest.mark.parametrize("name", [one for one in METHODS if METHODS[one].family != "text"])
def test_any_method_may_follow(name: str) -> None:
    """Whatever reads the recorded attention, makes its own passes or asks for the output."""
    trace = shared("timm ViT", 2)
    options = dict(METHODS[name].cheap)
    alone = maps_of(Trace(trace.model, trace.images), name, Class(1), **options)
    assert off(maps_of(trace, name, Class(1), **options), alone) <= DIFFERENCES


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gradcam", {"layer": 0}),
        ("gradcam", {"at": "block"}),
        ("cdam", {"split": "key"}),
        ("cdam", {"variant": "integrated", "steps": 2}),
        ("gae", {"rules": "libra"}),
        ("grad_rollout", {"discard": 0.5}),
        ("input_x_gradient", {"wrt": "tokens"}),
        ("rollout", {"heads": "max", "discard": 0.5}),
        ("attention", {"query": (1, 1)}),
        ("norm_attention", {"residual": True}),
    ],
)
def test_options_are_kept(name: str, options: dict[str, Any]) -> None:
    trace = shared("timm ViT")
    alone = maps_of(Trace(trace.model, trace.images), name, Class(1), **options)
    assert off(maps_of(trace, name, Class(1), **options), alone) <= ROUNDING


def test_every_kind_of_target_has_its_own_gradient() -> None:
    trace = shared("timm ViT")
    concept = Concept(torch.linspace(-1, 1, trace.any_finished().embedding.shape[1]), "l2")
    targets = [Class(1), Class((1, 2, 0)), Contrast(Class(1), Class(2)), concept, "top-2", "neuron:1", Class(1)]
    made = attribute_all(trace, METHODS["gae"], targets, METHODS["gae"].check({}))
    for target, one in zip(targets, made):
        assert off(one.map, maps_of(Trace(trace.model, trace.images), "gae", target)) <= ROUNDING
    assert torch.equal(made[0].map, made[-1].map) and not torch.equal(made[0].map, made[1].map)


def test_an_image_does_not_depend_on_its_batch() -> None:
    whole = shared("timm ViT")
    alone = Trace(whole.model, whole.images[1:2])
    alone.share()
    for name in READS:
        assert off(maps_of(alone, name, Class(2))[0], maps_of(whole, name, Class(2))[1]) <= ROUNDING


def test_the_tokens_are_those_of_a_run_from_the_last_layer() -> None:
    """Post-norm blocks add the tokens that enter the attention to its result, which is no part of ∂y/∂T."""
    for name in ("sequence first", "timm ViT", "flat heads"):
        trace = shared(name)
        alone = Trace(trace.model, trace.images)
        for ours, theirs in zip(trace.entry_grad(Neuron(0)), alone.entry_grad(Neuron(0))):
            assert off(ours, theirs) <= ROUNDING


# --------------------------------------------------------------------------------------------------------- fewer passes


def test_passes_of_twelve_methods_and_two_targets() -> None:
    """Beside the sum of single runs, where both targets share a forward pass already."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    many.together(model, many.CHOSEN, images)  # what is found out once for a model is no part of the cost
    forwards, backwards, operations = many.passes_of(lambda: many.together(model, many.CHOSEN, images))
    assert (forwards, backwards) == (4, 8)  # the model's own, two tables of rules, legrad; each with two targets
    for way, passes in ((many.each_target, 21), (many.each_method, 12)):
        single = many.passes_of(lambda way=way: way(model, many.CHOSEN, images))  # type: ignore[misc]
        assert single[0] == passes and operations <= 0.6 * single[2]


def test_one_method_of_a_study_makes_one_forward_pass() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    for name in ("gae", "cdam", "norm_attention"):
        many.together(model, [name], images)
        assert many.passes_of(lambda name=name: many.together(model, [name], images))[0] == 1  # type: ignore[misc]


def test_groups_are_of_one_pass_each() -> None:
    names = ["attn_lrp", "gae", "libra_fullgrad", "attention", "cdam", "hirescam", "random"]
    chosen = {name: (METHODS[name], METHODS[name].check({})) for name in names}
    chosen["gae libra"] = METHODS["gae"], METHODS["gae"].check({"rules": "libra"})
    groups = in_groups(chosen)
    assert groups[0] == ["gae", "attention", "cdam"]
    assert groups[1:] == [["attn_lrp"], ["libra_fullgrad", "hirescam", "gae libra"], ["random"]]
    assert pays(chosen) and not pays({name: chosen[name] for name in ("attn_lrp", "attention")}, alone=True)
    assert pays({"gae": chosen["gae"]}, alone=True) and not pays({name: chosen[name] for name in ("gae", "attn_lrp")})


def test_what_does_not_depend_on_the_target_is_made_once() -> None:
    with METHODS.temporary():
        calls: list[str] = []

        @method(targeted=True)
        def aimed(trace: Any, target: Any) -> Any:
            """Depends on the target."""
            calls.append("aimed")
            return torch.ones(len(trace), 4, 4)

        @method()
        def unaimed(trace: Any, target: Any) -> Any:
            """Does not."""
            calls.append("unaimed")
            return torch.ones(len(trace), 4, 4)

        many.together(zoo.model("timm ViT"), ["unaimed", "aimed"], zoo.images("timm ViT"))
        assert sorted(calls) == ["aimed", "aimed", "unaimed"]


# ---------------------------------------------------------------------------------------------- memory, other models


def test_a_pass_goes_when_its_last_method_is_done() -> None:
    """While later methods run, the graph of the earlier ones is gone; the output stays."""
    alive: list[bool] = []
    with METHODS.temporary():

        @method()
        def last(trace: Any, target: Any) -> Any:
            """Looks whether the graph is still there."""
            gc.collect()
            alive.append(graph() is not None)
            assert trace.shared is None and not trace.fresh and len(trace.output) == len(trace)
            return torch.ones(len(trace), 4, 4)

        kind = Maps.make(["last", "gae", "attn_lrp", "cdam"])
        trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
        kind.begin(trace)
        assert trace.shared is not None
        graph = weakref.ref(trace.shared.run)
        with many.counted_runs() as runs:
            made = kind.work_all([Scene(trace, Class(1), [None] * 3, [False] * 3)])
    assert alive == [False] and len(runs) == 1 and list(made[0]) == ["last", "gae", "attn_lrp", "cdam"]


@pytest.mark.parametrize("name", ["timm Swin", *rare(*sorted({*ALONE, *POOLED} - {"timm Swin"}))])
def test_models_of_other_kinds_run_each_method_alone(name: str) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    trace.share()
    assert trace.shared is None and trace.fresh
    if not trace.classifies:  # there are no classes to ask for
        return
    found = many.together(trace.model, ["gradient", "input_x_gradient"], trace.images)
    alone = maps_of(trace, "gradient", "top-2")
    assert off(found[1]["gradient"], alone) <= ROUNDING
    trace.release()
    assert not trace.fresh  # its passes show more than an output


def test_a_network_without_gradients_still_shows_its_attention() -> None:
    class Frozen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = zoo.network("timm ViT")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return self.net(x)  # type: ignore[no-any-return]

    model, images = Model(Frozen()), zoo.images("timm ViT")
    kind, trace = Maps.make(["attention", "gae"]), Trace(model, images)
    kind.begin(trace)
    made = kind.work(Scene(trace, Class(1), [None] * 3, [False] * 3))
    alone = vitreous.explain(zoo.model("timm ViT"), images, "attention").map
    assert made["attention"].map is not None and off(made["attention"].map, alone) <= ROUNDING
    assert made["gae"].error is not None


def test_what_runs_out_of_memory_is_told() -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))

    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    trace.run = full  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        trace.share()


def test_an_image_that_is_not_finite_is_told() -> None:
    with pytest.raises(InputError):
        Trace(zoo.model("timm ViT"), torch.full((1, 3, 64, 64), torch.nan)).share()
