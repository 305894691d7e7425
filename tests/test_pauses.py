"""Runs are watched only around attention: the same maps, fewer calls, and no run that is silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import vitreous
from vitreous import Model
from vitreous.capture.capture import Capture
from vitreous.capture.entries import CutAt
from vitreous.errors import CaptureError, ModelError
from vitreous.trace.perform import THROUGHOUT
from vitreous.trace.trace import Trace

METHODS = ["attention", "rollout", "gae", "cdam", "gradcam", "gradient", "attn_lrp", "cp_lrp", "norm_attention"]
QUICK = ["timm ViT", "HF ViT eager", "torchvision ViT"]  # the three doors


def target_of(model: Model) -> Any:
    return "neuron:1" if model.classifier is False else 1


def explained(model: Model, name: str, method: str) -> Tensor:
    return vitreous.explain(model, zoo.images(name), method, target_of(model)).map


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=() if name in QUICK else pytest.mark.slow)
        for name, entry in zoo.ZOO.items()
        if entry.flow
        for method in METHODS
    ],
)
def test_maps_are_those_of_runs_that_are_watched_throughout(name: str, method: str) -> None:
    model = zoo.model(name)
    model.forget()
    found = explained(model, name, method)
    model.facts.note(THROUGHOUT, True)
    expected = explained(model, name, method)
    model.forget()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_the_layout_run_shows_where_attention_is(name: str) -> None:
    model = zoo.model(name)
    model.forget()
    layout = model.layout
    if name == "flat heads":  # all of its layers are in the network itself
        assert layout.sights is None
        return
    assert layout.sights is not None
    modules = [span.module for span in layout.sights.spans]
    assert len(set(modules)) == len(modules) >= layout.layers
    assert all(modules)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many torch functions went through the modes of a run."""
    counts: dict[str, int] = {"Capture": 0, "CutAt": 0}
    for mode in (Capture, CutAt):
        plain = mode.__torch_function__

        def count(self: Any, *args: Any, _plain: Any = plain, _name: str = mode.__name__) -> Any:
            counts[_name] += 1
            return _plain(self, *args)

        monkeypatch.setattr(mode, "__torch_function__", count)
    return counts


@pytest.mark.parametrize(("method", "share"), [("rollout", 0.3), ("gae", 0.4), ("cdam", 0.35), ("gradient", 0.5)])
def test_fewer_functions_are_watched(method: str, share: float, counted: dict[str, int]) -> None:
    model = Model(zoo.timm("vit_tiny_patch16_224", depth=12)().eval())
    explained(model, "timm ViT", method)
    counted.update(dict.fromkeys(counted, 0))
    explained(model, "timm ViT", method)
    paused = sum(counted.values())
    model.facts.note(THROUGHOUT, True)
    counted.update(dict.fromkeys(counted, 0))
    explained(model, "timm ViT", method)
    assert 0 < paused <= share * sum(counted.values())


# -------------------------------------------------------------------------------------- networks that run otherwise


class Turning(nn.Module):
    """Runs its blocks in another order when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = zoo.ZOO["timm ViT"].make()
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.net.blocks
        order = reversed(range(len(blocks))) if self.turned else range(len(blocks))
        x = self.net._pos_embed(self.net.patch_embed(x))
        for number in order:
            x = blocks[number](x)
        return self.net.head(self.net.norm(x)[:, 0])


@pytest.fixture
def turning() -> tuple[Turning, Model]:
    net = Turning().eval()
    return net, Model(net, labels=[str(i) for i in range(zoo.CLASSES)])


def test_a_run_in_another_order_is_made_again(turning: tuple[Turning, Model]) -> None:
    net, model = turning
    images = zoo.images("timm ViT")
    vitreous.explain(model, images, "gradient", 1)
    net.turned = True
    found = vitreous.explain(model, images, "attention", 1).map
    assert model.facts.knows(THROUGHOUT)
    fresh = Turning().eval()
    fresh.turned = True
    expected = vitreous.explain(Model(fresh, labels=["a"] * zoo.CLASSES), images, "attention", 1).map
    torch.testing.assert_close(found, expected)


def test_what_was_already_computed_in_such_a_run_is_not_used(turning: tuple[Turning, Model]) -> None:
    net, model = turning
    images = zoo.images("timm ViT")
    vitreous.explain(model, images, "gae", 1)
    net.turned = True
    with pytest.raises(CaptureError, match=r"in another order than in its layout run.*once more"):
        vitreous.explain(model, images, "gae", 1)
    assert vitreous.explain(model, images, "gae", 1).map.isfinite().all()


class InAContext(nn.Module):
    """Computes its last blocks inside a function mode of its own, as `with torch.device(…)` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.ZOO["timm ViT"].make()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net._pos_embed(self.net.patch_embed(x))
        x = self.net.blocks[0](x)
        with torch.device("cpu"):
            x = self.net.blocks[2](self.net.blocks[1](x))
        return self.net.head(self.net.norm(x)[:, 0])


def test_a_network_with_a_mode_of_its_own_is_watched_throughout() -> None:
    torch.manual_seed(0)
    net = InAContext().eval()
    images = zoo.images("timm ViT")
    names = ["a"] * zoo.CLASSES
    for method in ("attention", "cdam", "gradient"):
        found = vitreous.explain(Model(net, labels=names), images, method, 1).map
        plain = zoo.ZOO["timm ViT"].make().eval()
        plain.load_state_dict(net.net.state_dict())
        torch.testing.assert_close(found, vitreous.explain(Model(plain, labels=names), images, method, 1).map)
    assert torch._C._len_torch_function_stack() == 0


class Failing(nn.Module):
    """Fails inside an attention when it is told to."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.fails = attention, False

    def forward(self, x: Tensor, **rest: Any) -> Tensor:
        out: Tensor = self.attention(x, **rest)
        if self.fails:
            raise RuntimeError("out of order")
        return out


def test_nothing_is_left_behind_by_a_run_that_fails() -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    failing = net.blocks[1].attn = Failing(net.blocks[1].attn)
    model, images = Model(net), zoo.images("timm ViT")
    expected = vitreous.explain(model, images, "gae", 1).map
    failing.fails = True
    with pytest.raises(ModelError, match="out of order"):
        vitreous.explain(model, images, "gae", 1)
    assert torch._C._len_torch_function_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    failing.fails = False
    torch.testing.assert_close(vitreous.explain(model, images, "gae", 1).map, expected)


def test_a_replaced_module_is_noticed() -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    model, images = Model(net), zoo.images("timm ViT")
    vitreous.explain(model, images, "attention", 1, across="mean")
    net.blocks[1].attn = type(net.blocks[1].attn)(32, num_heads=2, qkv_bias=True).eval()
    found = vitreous.explain(model, images, "attention", 1, across="mean").map
    assert model.facts.knows(THROUGHOUT)
    torch.testing.assert_close(found, vitreous.explain(Model(net), images, "attention", 1, across="mean").map)


def test_a_module_that_is_no_longer_there() -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    model, images = Model(net), zoo.images("timm ViT")
    vitreous.explain(model, images, "attention", 1)
    model.facts.find("modules around attention", dict).clear()  # as if they had not been looked up yet
    net.blocks[1].attn = Failing(net.blocks[1].attn)  # whose parts have other names now
    found = vitreous.explain(model, images, "attention", 1, across="mean").map
    assert model.facts.knows(THROUGHOUT)
    torch.testing.assert_close(found, vitreous.explain(Model(net), images, "attention", 1, across="mean").map)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


class PartlyFrozen(nn.Module):
    """Computes a block under `torch.no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.ZOO["timm ViT"].make()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net._pos_embed(self.net.patch_embed(x))
        with torch.no_grad():
            x = self.net.blocks[0](x)
        x = self.net.blocks[2](self.net.blocks[1](x))
        return self.net.head(self.net.norm(x)[:, 0])


@pytest.mark.parametrize("method", ["gradient", "gae", "cdam"])
def test_frozen_parts_are_differentiated(method: str) -> None:
    torch.manual_seed(0)
    net = PartlyFrozen().eval()
    model, images, names = Model(net, labels=["a"] * zoo.CLASSES), zoo.images("timm ViT"), ["a"] * zoo.CLASSES
    found = vitreous.explain(model, images, method, 1).map
    sights = model.layout_at((64, 64)).sights
    assert sights is not None
    assert not sights.steady
    plain = zoo.ZOO["timm ViT"].make().eval()
    plain.load_state_dict(net.net.state_dict())
    torch.testing.assert_close(found, vitreous.explain(Model(plain, labels=names), images, method, 1).map)


# --------------------------------------------------------------------------------------------- a trace for one map


@pytest.mark.parametrize("method", ["gae", "gradient", "attn_lrp"])
def test_a_trace_for_one_map_can_make_another(method: str) -> None:
    """The graph is freed; the next map makes a new forward pass."""
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = Trace(model, images)
    trace.once = True
    maps = [vitreous.explain(model, trace, method, target).map for target in (1, 2, 1)]
    expected = [vitreous.explain(model, images, method, target).map for target in (1, 2)]
    torch.testing.assert_close(maps[0], expected[0])
    torch.testing.assert_close(maps[1], expected[1])
    torch.testing.assert_close(maps[2], maps[0])
    assert not torch.equal(maps[0], maps[1])
