"""A batch on a CPU is divided among threads: the same maps, and nothing is left changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import vitreous
from vitreous._support.threads import at_once, threads_for
from vitreous.models.twin import has_twin, twin_of
from vitreous.trace import shares

METHODS = ("rollout", "cdam", "gae", "grad_rollout", "attn_lrp")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[vitreous.Model]:
    """The copies of networks that are made."""
    made: list[vitreous.Model] = []

    def noted(model: vitreous.Model) -> vitreous.Model:
        made.append(twin_of(model))
        return made[-1]

    monkeypatch.setattr(shares, "twin_of", noted)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_same_maps(method: str, copies: list[vitreous.Model]) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 9)
    first = vitreous.explain(model, images, method, "top-1")
    assert not copies, "the first time it is found out how to run the network"
    second = vitreous.explain(model, images, method, "top-1")
    assert len(copies) == 1
    assert torch.allclose(second.map, first.map, rtol=1e-4, atol=1e-6 * float(first.map.abs().max()))
    assert second.targets == first.targets
    assert torch.get_num_threads() == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.module.modules())


def test_targets_of_each_image(copies: list[vitreous.Model]) -> None:
    model, images, targets = zoo.model("timm ViT"), zoo.images("timm ViT", 8), [3, 1, 0, 2, 4, 1, 3, 0]
    whole = [vitreous.explain(model, images[i : i + 1], "cdam", targets[i]).map for i in range(8)]
    _, maps = (vitreous.explain(model, images, "cdam", targets).map for _ in range(2))
    assert copies
    assert torch.allclose(maps, torch.cat(whole), rtol=1e-4, atol=1e-6 * float(maps.abs().max()))


class Remembers(nn.Module):
    """A network that keeps something of its run in itself, and reads it later."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.network("timm ViT")
        self.scale = torch.zeros(())

    def forward(self, x: torch.Tensor) -> Any:
        self.scale = x.abs().amax((1, 2, 3))[:, None]
        return self.net(x) * self.scale


def test_what_a_network_keeps_of_its_run(copies: list[vitreous.Model]) -> None:
    model, images = vitreous.Model(Remembers().eval(), classifier=True), zoo.images("timm ViT", 8)
    images *= torch.arange(1, 9)[:, None, None, None] / 8
    maps = [vitreous.explain(model, images, "gradient", 1).map for _ in range(2)]
    assert len(copies) == 1
    assert torch.allclose(*maps, rtol=1e-4, atol=1e-6 * float(maps[0].abs().max()))


def test_a_copy_shares_weights_and_facts() -> None:
    model = zoo.model("timm ViT")
    _ = model.layout
    twin = twin_of(model)
    pairs = list(zip(model.module.modules(), twin.module.modules()))
    assert all(one is not other and type(one) is type(other) for one, other in pairs)
    assert [id(t) for t in twin.module.parameters()] == [id(t) for t in model.module.parameters()]
    model.facts.note("a question", "an answer")
    assert twin.facts.get("a question") == "an answer"
    assert twin.facts.lock is not model.facts.lock


def test_no_copy_of_a_network_with_hooks_or_hidden_modules() -> None:
    model = zoo.model("timm ViT")
    assert has_twin(model)
    hook = model.module.register_forward_hook(lambda *_: None)
    assert not has_twin(model)
    hook.remove()
    assert has_twin(model)
    model.forget()
    model.module.__dict__["kept"] = [nn.Identity()]
    assert not has_twin(model)
    assert not has_twin(vitreous.Model(zoo.network("timm ViT"), forward=lambda x: x))


def test_modes_of_the_caller_are_kept() -> None:
    assert threads_for(8) == 2
    assert threads_for(7) == 1
    with torch.device("cpu"):
        assert threads_for(8) == 1
    with torch.autocast("cpu"):
        assert threads_for(8) == 1


def test_threads_of_torch() -> None:
    meeting = threading.Barrier(2)

    def job() -> tuple[int, int]:
        meeting.wait()
        return torch.get_num_threads(), threading.get_ident()

    found = at_once([job, job])
    assert [count for count, _ in found] == [1, 1]
    assert len({threading.get_ident(), *(own for _, own in found)}) == 3

    def fails() -> tuple[int, int]:
        meeting.wait()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        at_once([job, fails])
    assert torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2], "threads that begin later"
