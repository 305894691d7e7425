"""Big models: blocks keep only the tokens that enter them, and are run again when they are needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile

import vitreous
from vitreous import Model
from vitreous._support import memory
from vitreous._support.memory import LARGE, budget, keeps_too_much, limit_memory
from vitreous.capture import attention_backward
from vitreous.capture import shown as shown_layers
from vitreous.capture.attention import Attention
from vitreous.capture.shown import Shown
from vitreous.errors import CaptureError

METHODS = ["rollout", "gae", "grad_rollout", "attn_lrp", "libra_fullgrad", "centred_lrp", "cp_lrp", "gradient"]
LITTLE, MUCH = "1B", "1GB"
SAME = 1e-6
CPU = torch.device("cpu")


def net_of(**options: Any) -> Any:
    torch.manual_seed(0)
    return zoo.timm("vit_tiny_patch16_224", init_values=0.5, **options)().eval()


def trace_of(net: nn.Module, count: int = 2) -> vitreous.Trace:
    size = (count, 3, 64, 64)
    return vitreous.Trace(Model(net), torch.randn(size, generator=torch.Generator().manual_seed(1)))


def explained(net: nn.Module, method: str, limit: str, **options: Any) -> Any:
    """The maps of two images in one batch, whatever the limit."""
    trace = trace_of(net)
    with limit_memory(limit):
        return trace.explain(method, 2, **options).map


def difference(net: nn.Module, method: str, **options: Any) -> float:
    return off(explained(net, method, LITTLE, **options), explained(net, method, MUCH, **options))


@contextmanager
def counted(modules: Any) -> Iterator[list[int]]:
    """How often the forward of each is called, with its hooks or without."""
    counts = [0] * len(modules)

    def counting(i: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[i] += 1
            return forward(*args, **kwargs)

        return call

    for i, module in enumerate(modules):
        module.forward = counting(i, module.forward)
    try:
        yield counts
    finally:
        for module in modules:
            del module.forward


@pytest.mark.parametrize("method", METHODS)
def test_the_maps_are_the_same(method: str) -> None:
    assert difference(net_of(), method) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name, entry in zoo.ZOO.items() if entry.flow and entry.blocks])
def test_the_maps_of_every_family_are_the_same(name: str, method: str) -> None:
    maps, model = [], zoo.model(name)
    for limit in (LITTLE, MUCH):
        trace = vitreous.Trace(model, zoo.images(name))
        with limit_memory(limit):
            maps.append(trace.explain(method, 2 if trace.classifies else "neuron:2").map)
    assert off(*maps) <= 1e-5


def test_blocks_run_again_one_by_one_except_the_last() -> None:
    net = net_of()
    trace = trace_of(net)
    with counted(net.blocks) as counts, limit_memory(LITTLE):
        trace.explain("attn_lrp", 2)
        assert counts[:-1] == [2, 2], "in the forward pass, and in the backward pass"
        again = counts[:-1]
        trace.explain("attn_lrp", 3)
        assert [b - a for a, b in zip(again, counts)] == [1, 1], "another target: only in its backward pass"
    trace = trace_of(net)
    with counted(net.blocks) as counts, limit_memory(MUCH):
        trace.explain("attn_lrp", 2)
        assert counts[:-1] == [1, 1]


def test_rollout_runs_blocks_again_up_to_their_attention() -> None:
    net = net_of()
    trace = trace_of(net)
    with counted([block.mlp for block in net.blocks]) as mlps, counted(net.blocks) as blocks, limit_memory(LITTLE):
        trace.explain("rollout")
    assert blocks[:-1] == [2, 2] and mlps[:-1] == [1, 1]


def kept_bytes(net: nn.Module, method: str, limit: str) -> int:
    """What autograd keeps for the backward pass of a method, without weights."""
    found: dict[int, int] = {}
    weights = {t.untyped_storage().data_ptr() for t in net.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    trace = trace_of(net)
    with limit_memory(limit), saved_tensors_hooks(keep, lambda tensor: tensor):
        trace.explain(method, 2)
    return sum(size for place, size in found.items() if place not in weights)


@pytest.mark.parametrize("method", ["gae", "attn_lrp", "libra_fullgrad", "gradient"])
def test_autograd_keeps_nothing_of_the_blocks_but_the_last(method: str) -> None:
    deep = net_of(depth=12)
    much, little = kept_bytes(deep, method, MUCH), kept_bytes(deep, method, LITTLE)
    assert little < much / 4
    assert little < 1.5 * kept_bytes(net_of(depth=3), method, LITTLE), "it does not grow with the number of blocks"


def held_by(net: nn.Module, method: str) -> int:
    """The bytes in all tensors that a trace holds after a method."""
    trace = trace_of(net)
    gc.collect()  # what earlier runs have left would be counted when it goes
    with limit_memory(LITTLE), profile(profile_memory=True) as profiler:
        trace.explain(method, 2)
    assert profiler.kineto_results is not None
    return sum(event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("method", ["gae", "attn_lrp"])
def test_a_trace_holds_the_tokens_of_each_block_and_no_more(method: str) -> None:
    """Tensors that a function keeps as attributes of its ctx count here: it must pass them to `save_for_backward`."""
    tokens = 4 * 2 * 17 * 32  # of two images, in bytes
    each = (held_by(net_of(depth=12), method) - held_by(net_of(depth=4), method)) / 8
    assert tokens <= each < 1.3 * tokens


def hooks_of(net: nn.Module) -> list[Any]:
    return [hook for module in net.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


def test_nothing_is_left_behind() -> None:
    net = net_of().train()
    trace = trace_of(net)
    with limit_memory(LITTLE):
        trace.explain("gae", 2)
        trace.explain("attn_lrp", 2)
    record = trace.followed(seen=False)[0]
    tokens = [weakref.ref(call.args[0]) for call in record.again]
    assert (
        len(tokens) == 2 and net.training and not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    )
    del record, trace
    gc.collect()
    assert not any(one() is not None for one in tokens), "the graph and its blocks hold one another"


def test_a_network_in_training_mode_is_run_again_in_eval_mode() -> None:
    net = net_of(proj_drop_rate=0.5)
    expected = explained(net, "gae", MUCH)
    assert off(explained(net.train(), "gae", LITTLE), expected) <= SAME and net.training


def test_under_autocast() -> None:
    net = net_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert difference(net, "gae") <= SAME and difference(net, "attn_lrp") <= SAME


def test_several_targets() -> None:
    trace = trace_of(net_of())
    for method in ("gae", "libra_fullgrad"):
        each = [trace.explain(method, target).map for target in (1, 4)]
        with limit_memory(LITTLE):
            together = vitreous.explain_targets(trace.model, trace.fork(), method, targets=[1, 4])
        for one, other in zip(together, each):
            assert off(one.map, other) <= 1e-5


class InPlace(nn.Module):
    """A block that adds to its tokens in place."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        x += self.block.ls1(self.block.attn(self.block.norm1(x)))
        return x.add_(self.block.ls2(self.block.mlp(self.block.norm2(x))))


class Overwrites(InPlace):
    """One that overwrites what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        with torch.no_grad():
            x.zero_()
        return made


@pytest.mark.parametrize("kind", [InPlace, Overwrites])
def test_blocks_that_work_in_place(kind: type[InPlace]) -> None:
    net = net_of()
    expected = {method: explained(net, method, MUCH) for method in ("rollout", "attn_lrp")}
    net.blocks = nn.Sequential(*map(kind, net.blocks))
    for method, one in expected.items():
        assert off(explained(net, method, LITTLE), one) <= 1e-5


def test_what_a_gradient_needs_must_not_be_overwritten() -> None:
    net = net_of()
    net.blocks[0] = InPlace(net.blocks[0])
    trace = trace_of(net)
    with limit_memory(LITTLE), pytest.raises(CaptureError, match="overwrites what its gradient needs"):
        trace.explain("gradient", 2)
    with limit_memory(MUCH), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trace_of(net).explain("gradient", 2)


class Repeating(nn.Module):
    """The same block for every layer."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.block = net, net.blocks[0]
        net.blocks = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.norm_pre(self.net._pos_embed(self.net.patch_embed(x)))
        for _ in range(3):
            x = self.block(x)
        made: Tensor = self.net.forward_head(self.net.norm(x))
        return made


@pytest.mark.parametrize("method", ["gae", "rollout", "attn_lrp"])
def test_blocks_that_share_their_weights(method: str) -> None:
    shared = net_of()
    for block in shared.blocks[1:]:
        block.attn, block.mlp = shared.blocks[0].attn, shared.blocks[0].mlp
    assert difference(shared, method) <= SAME
    assert difference(Repeating(net_of()), method) <= SAME


def test_a_network_with_hooks_runs_its_blocks_once() -> None:
    net, seen = net_of(), list[int]()
    expected = explained(net, "gae", MUCH)
    trace = trace_of(net)
    for number, block in enumerate(net.blocks):
        block.attn.register_forward_hook(lambda *_, number=number: seen.append(number))
    with limit_memory(LITTLE):
        assert off(trace.explain("gae", 2).map, expected) <= 1e-5
    assert seen == [0, 1, 2]


def test_an_error_in_a_block_that_is_run_again() -> None:
    net = net_of()
    expected = explained(net, "gae", MUCH)
    trace, usual = trace_of(net.train()), net.blocks[1].mlp.forward

    def fails(x: Tensor) -> Tensor:
        if calls.pop():
            raise ValueError("no more")
        made: Tensor = usual(x)
        return made

    calls, net.blocks[1].mlp.forward = [True, False], fails
    with limit_memory(LITTLE), pytest.raises(ValueError, match="no more"):
        trace.explain("gae", 2)
    calls = [True]
    with limit_memory(LITTLE), pytest.raises(vitreous.VitreousError, match="no more"):
        trace_of(net).explain("gae", 2)
    del net.blocks[1].mlp.forward
    assert net.training and not hooks_of(net)
    with limit_memory(LITTLE):
        assert off(trace.explain("gae", 2).map, expected) <= SAME, "the same trace, once the network works again"


class Changing(nn.Module):
    """A block that multiplies its tokens, but not if it has done so once."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.armed = block, False

    def forward(self, x: Tensor) -> Tensor:
        armed, self.armed = self.armed, False
        made: Tensor = self.block(x * x.sigmoid() if armed else x)
        return made


def test_a_block_that_does_not_repeat_is_an_error() -> None:
    net = net_of()
    net.blocks = nn.Sequential(*map(Changing, net.blocks))
    trace = trace_of(net)
    net.blocks[1].armed = True
    with limit_memory(LITTLE), pytest.raises(CaptureError, match="does something else"):
        trace.explain("attn_lrp", 2)
    net.blocks[1].armed = True
    with limit_memory(MUCH):
        trace_of(net).explain("attn_lrp", 2)


def test_tokens_that_are_overwritten_behind_their_block_are_an_error() -> None:
    net = net_of()
    trace = trace_of(net)
    with limit_memory(LITTLE):
        record = trace.followed(seen=False)[0]
        record.again[1].args[0].detach().zero_()
        with pytest.raises(CaptureError, match="overwritten"):
            trace.explain("gae", 2)


def test_layers_with_fused_kernels_are_visited_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where A is not formed; here it is."""
    net = net_of()
    expected = {method: explained(net, method, MUCH) for method in ("gae", "grad_rollout")}
    monkeypatch.setattr(Attention, "fusible", True)
    monkeypatch.setattr(attention_backward, "fusible", lambda q: True)
    monkeypatch.setattr(shown_layers, "Summed", lambda chunks, layer, grad: Shown(chunks))
    for method, one in expected.items():
        assert off(explained(net, method, LITTLE), one) <= 1e-5


def test_how_much_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeps_too_much(LARGE + 1, 1, CPU) and not keeps_too_much(LARGE, 1, CPU)
    assert not keeps_too_much(LARGE, budget(CPU) // LARGE, CPU) and keeps_too_much(LARGE, 1 + budget(CPU) // LARGE, CPU)
    with limit_memory("1kB"):
        assert keeps_too_much(501, 2, CPU) and not keeps_too_much(500, 2, CPU)
    with limit_memory("64GB"):
        assert not keeps_too_much(2 * LARGE, 1, CPU)


@pytest.mark.parametrize(("share", "free"), [(1.0, 700), (0.5, 300)])
def test_a_process_may_have_a_share_of_the_gpu(share: float, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"memory_allocated": 200, "memory_reserved": 300}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share, raising=False)
    assert memory.free_cuda.__wrapped__(torch.device("cuda"), 0) == free
