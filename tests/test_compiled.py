"""A network that its user compiled: it runs compiled where only its output counts, and gives the same maps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import ROUNDING
from torch import Tensor, nn

import vitreous
from vitreous import Concept, Model

Calls = list[int]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def compiled(wrong: float = 0.0) -> tuple[nn.Module, nn.Module, Calls]:
    """A network, the same compiled, and the number of images of each compiled run."""
    calls: Calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            calls.append(next(len(one) for one in given if isinstance(one, Tensor) and one.ndim == 4))
            return tuple(one * (1 + wrong) for one in graph(*given))

        return run

    net = copy.deepcopy(zoo.network("timm ViT")).eval()
    return net, torch.compile(copy.deepcopy(net), backend=backend), calls


@pytest.mark.parametrize("method", ["occlusion", pytest.param("rise", marks=pytest.mark.slow)])
def test_methods_that_hide_pixels_stay_compiled(method: str) -> None:
    plain, net, calls = compiled()
    images, options = zoo.images("timm ViT"), {"masks": 20} if method == "rise" else {}
    expected = vitreous.explain(Model(plain), images, method, 1, **options).map
    found = vitreous.explain(Model(net), images, method, 1, **options)
    assert off(found.map, expected) <= 10 * ROUNDING
    assert sum(calls) >= 20 * len(images) if method == "rise" else sum(calls) > len(images), "every variant"


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["deletion", "insertion"])
def test_curves_stay_compiled(metric: str) -> None:
    plain, net, calls = compiled()
    images = zoo.images("timm ViT")[:1]
    expected, found = (vitreous.evaluate(Model(one), images, "gae", metric, 1).value for one in (plain, net))
    assert calls
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gae", "rollout", "gradient", "token_ablation"])
def test_what_looks_inside_or_needs_gradients_runs_the_plain_network(method: str) -> None:
    plain, net, calls = compiled()
    images = zoo.images("timm ViT")[:1]
    expected = vitreous.explain(Model(plain), images, method, 1).map
    assert off(vitreous.explain(Model(net), images, method, 1).map, expected) <= 10 * ROUNDING
    assert not calls


@pytest.mark.slow
def test_a_concept_reads_the_embedding_which_a_compiled_run_hides() -> None:
    plain, net, calls = compiled()
    images = zoo.images("timm ViT")[:1]
    concept = Concept(torch.randn(plain.num_features, generator=torch.Generator().manual_seed(0)))
    expected = vitreous.explain(Model(plain), images, "occlusion", concept).map
    model = Model(net)
    trace = vitreous.Trace(model, images)
    trace.explain("occlusion", 1)
    assert calls
    calls.clear()
    assert off(trace.explain("occlusion", concept).map, expected) <= 10 * ROUNDING
    assert not calls


def test_a_compiled_network_that_gives_something_else_is_not_believed() -> None:
    plain, net, calls = compiled(wrong=0.01)
    images = zoo.images("timm ViT")[:1]
    expected = vitreous.explain(Model(plain), images, "occlusion", 1).map
    assert off(vitreous.explain(Model(net), images, "occlusion", 1).map, expected) <= 10 * ROUNDING
    assert len(calls) == 1


def test_a_network_that_does_not_compile_here_runs_as_it_is() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler on this machine")

    plain = copy.deepcopy(zoo.network("timm ViT")).eval()
    images = zoo.images("timm ViT")[:1]
    expected = vitreous.explain(Model(plain), images, "occlusion", 1).map
    net = torch.compile(copy.deepcopy(plain), backend=backend)
    assert off(vitreous.explain(Model(net), images, "occlusion", 1).map, expected) <= 10 * ROUNDING


@pytest.mark.slow
def test_modules_compiled_in_place_stay_compiled() -> None:
    plain, _, calls = compiled()
    net = copy.deepcopy(plain)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        calls.append(len(inputs))
        return graph.forward

    net.head.compile(backend=backend)
    images = zoo.images("timm ViT")[:1]
    expected = vitreous.explain(Model(plain), images, "occlusion", 1).map
    assert off(vitreous.explain(Model(net), images, "occlusion", 1).map, expected) <= 10 * ROUNDING
    assert calls


@pytest.mark.slow
def test_training_mode_and_stance_are_as_before() -> None:
    _, net, calls = compiled()
    net.train()
    vitreous.explain(Model(net), zoo.images("timm ViT")[:1], "occlusion", 1)
    assert calls and net.training and all(module.training for module in net.modules())
