"""The battery: every method on every model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import DIFFERENCES
from torch import nn

import vitreous
from vitreous import METHODS
from vitreous.errors import Unsupported

CHEAP: dict[str, dict[str, Any]] = {  # what the battery runs in place of costly defaults
    "beyond_intuition": {"steps": 3},
    "cass_attention": {"samples": 2},
    "integrated_gradients": {"steps": 3},
    "ensemble": {"members": "attn_lrp:1,gae:1"},
    "rise": {"masks": 8},
    "optimus": {"single_heads": False, "methods": False, "controls": 3},
    "smoothgrad": {"samples": 2},
    "tis": {"masks": 8},
}
OF_SOFTMAX = ("grad_eclip",)  # methods that need queries and keys, of which A is the softmax
IN_MODULES = (  # methods that need layers in modules of their own
    "attcat",
    "beyond_intuition",
    "centred_lrp",
    "clip_surgery",
    "hirescam",
    "legrad",
    "libra_fullgrad",
    "maskclip",
    "tis",
    "value_zeroing",
    "xgradcam",
)
ONE_GRID = ("centred_lrp", "libra_fullgrad")  # methods that sum layers patch by patch
ROUGH = ("transformer_attribution",)  # methods whose maps bfloat16 changes much: see test_lrp


def is_quick(method: str, name: str) -> bool:
    """`optimus` costs as much as a third of the other methods together."""
    return name in zoo.REPRESENTATIVE[::2] if method == "optimus" else zoo.is_quick(method, name)


PAIRS = [
    pytest.param(method, name, marks=[] if is_quick(method, name) else [pytest.mark.slow])
    for method in METHODS
    for name in zoo.ZOO
]


def aim(method: str, name: str = "timm ViT") -> Any:
    """A target that every model has."""
    backbone = zoo.model(name).classifier is False
    return ("neuron:1" if backbone else 1) if METHODS[method].targeted else None


def state(net: nn.Module) -> dict[str, Any]:
    """Everything a method could leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "hooks": [len(getattr(m, h)) for m in net.modules() for h in hooks],
        "training": [m.training for m in net.modules()],
        "attributes": [sorted(vars(m)) for m in net.modules()],
        "requires_grad": [p.requires_grad for p in net.parameters()],
        "grad": [p.grad for p in net.parameters()],
        "versions": [t._version for t in (*net.parameters(), *net.buffers())],
        "grad mode": torch.is_grad_enabled(),
        "modes": torch.overrides._len_torch_function_stack(),
        "seed": torch.random.get_rng_state().tolist(),
    }


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_battery(method: str, name: str) -> None:
    count = 2 if METHODS[method].alone else 3  # one at a time costs more
    entry, model, images = zoo.ZOO[name], zoo.model(name), zoo.images(name, count)
    target = aim(method, name)
    model.layout_at(entry.size)
    before = state(model.net)
    unable = (method in IN_MODULES and not entry.blocks) or (method in ONE_GRID and entry.merges)
    layout = model.layout_at(entry.size)
    followed = entry.flow or (METHODS[method].stages and layout.stages)
    if (METHODS[method].attention and not followed) or unable or (method in OF_SOFTMAX and layout.mixed):
        with pytest.raises(Unsupported):
            vitreous.explain(model, images, method, target)
        assert state(model.net) == before
        return

    def run(x: torch.Tensor) -> torch.Tensor:
        return vitreous.explain(model, x, method, target, **CHEAP.get(method, {})).map

    try:
        maps = run(images)
    except Unsupported as said:
        remedy = "declare it with attention=True" if not entry.flow else "name it in IN_MODULES of this file"
        pytest.fail(f"{said}\nIf {method} cannot work on {name}, {remedy}")
    assert state(model.net) == before, "no side effects"
    assert maps.dtype == torch.float32
    assert maps.shape[0] == count
    merged = (1,) if entry.flow else (1, 2, 4)  # windowed models merge patches in later stages
    grids = [(-(-entry.grid[0] // scale), -(-entry.grid[1] // scale)) for scale in merged]
    assert tuple(maps.shape[1:]) in (*grids, entry.size), "the right grid"
    assert maps.isfinite().all()
    assert maps.flatten(1).std(1).min() > 0, "it says something"
    assert off(run(images), maps) <= DIFFERENCES, "deterministic"
    alone = run(images[1:2])
    assert off(alone[0], maps[1]) <= DIFFERENCES, "batch-invariant"


HALF_OF_THEM = [  # in the default suite; `make test-all` tries all
    pytest.param(name, marks=[pytest.mark.slow] if number % 2 else []) for number, name in enumerate(METHODS)
]


@pytest.mark.parametrize("method", HALF_OF_THEM)
def test_training_mode_is_restored_and_not_used(method: str) -> None:
    """A model left in training mode is explained as in eval mode (no dropout), and stays in training mode."""
    net = zoo.ZOO["sequence first"].make()
    net.load_state_dict(zoo.network("sequence first").state_dict())
    net.train()
    target = aim(method)
    images, options = zoo.images("sequence first"), CHEAP.get(method, {})
    ours = vitreous.explain(vitreous.Model(net), images, method, target, **options).map
    expected = vitreous.explain(zoo.model("sequence first"), images, method, target, **options).map
    assert off(ours, expected) <= DIFFERENCES, "dropout would change it much more"
    assert net.training and net.body.layers[0].training


@pytest.mark.parametrize("method", METHODS)
def test_grad_modes_of_the_caller_do_not_matter(method: str) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    target, options = aim(method), CHEAP.get(method, {})
    expected = vitreous.explain(model, images, method, target, **options).map
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = vitreous.explain(model, images, method, target, **options).map
        assert off(found, expected) <= DIFFERENCES, "torch may choose other kernels"
    assert not expected.requires_grad


@pytest.mark.parametrize("method", HALF_OF_THEM)
def test_half_precision_models_give_float32_maps(method: str) -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    net.load_state_dict(zoo.network("timm ViT").state_dict())
    images, target, options = zoo.images("timm ViT"), aim(method), CHEAP.get(method, {})
    exact = vitreous.explain(vitreous.Model(net), images, method, target, **options).map
    half = vitreous.explain(vitreous.Model(net.bfloat16()), images, method, target, **options).map
    assert half.dtype == torch.float32
    assert half.isfinite().all()
    assert half.flatten(1).std(1).min() > 0, "it says something"
    if METHODS[method].family != "arbitration" and method not in ROUGH:  # where another map may be the best
        r = torch.corrcoef(torch.stack([exact.flatten(), half.flatten()]))[0, 1]
        assert r > 0.9, f"if the formula of {method} makes rounding this large, name it in ROUGH"
