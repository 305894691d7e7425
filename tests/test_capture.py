"""Every door of the capture, against attention computed in the plainest way."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import off
from machine import ROUNDING
from torch import nn

from vitreous import Model, Trace
from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture, ModuleNames, cuts_patches, products
from vitreous.errors import CaptureError

FLOW = [name for name, entry in zoo.ZOO.items() if entry.flow]


def test_the_output_stays_and_every_layer_is_seen() -> None:
    for name in FLOW:
        model, images = zoo.model(name), zoo.images(name)
        with torch.no_grad(), model.still():
            plain = model.run(images)
            with Capture(ModuleNames(model.module), len(images)) as seen:
                watched = model.run(images)
        assert off(watched, plain) <= ROUNDING, name
        assert sum(model.layout_at(zoo.ZOO[name].size).is_layer(c, 3) for c in seen.calls) == zoo.ZOO[name].depth


@pytest.mark.parametrize("name", FLOW)
def test_recomputed_attention_reproduces_every_layer(name: str) -> None:
    trace = Trace(zoo.model(name), zoo.images(name))
    trace.verify(1e-5)
    for layer in trace.attention:
        a = layer.weights
        assert torch.allclose(a.sum(-1), torch.ones(()), atol=1e-5)
        assert off(layer.rows([0, 2]), a[:, :, [0, 2]]) <= ROUNDING


def test_verify_notices_a_wrong_capture() -> None:
    layer = Trace(zoo.model("timm ViT"), zoo.images("timm ViT")).attention[0]
    wrong = Attention(layer.name, layer.door, layer.node, layer.v, layer.q, layer.k, layer.scale * 3)
    with pytest.raises(CaptureError, match=r"blocks\.0\.attn"):
        wrong.verify()


def test_timm_attention_is_the_librarys_own() -> None:
    """timm's unfused path, seen by hooks on its dropout."""
    net = zoo.network("timm ViT unfused")
    own: list[torch.Tensor] = []
    hooks = [b.attn.attn_drop.register_forward_hook(lambda m, i, o: own.append(o)) for b in net.blocks]
    images = zoo.images("timm ViT")
    with torch.no_grad():
        net(images)
    for hook in hooks:
        hook.remove()
    fused = zoo.ZOO["timm ViT"].make().eval()
    fused.load_state_dict(net.state_dict())
    from vitreous import Model

    for layer, a in zip(Trace(Model(fused), images).attention, own, strict=True):
        assert layer.door == "sdpa"
        assert (layer.weights - a).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["ViT", "DINOv2", "DINOv2 registers", "DINOv3", "CLIP vision", "SigLIP"])
def test_hf_attention_is_the_librarys_own(kind: str) -> None:
    """Eager `output_attentions`, against what is seen under sdpa with the same weights."""
    eager, images = copy.deepcopy(zoo.network(f"HF {kind} eager")), zoo.images(f"HF {kind} eager")  # it keeps hooks
    with torch.no_grad():
        own = eager(pixel_values=images, output_attentions=True).attentions
    fused = zoo.ZOO[f"HF {kind} sdpa"].make().eval()
    fused.load_state_dict(eager.state_dict())
    from vitreous import Model

    for model in (Model(fused), Model(eager)):
        seen = Trace(model, images).attention
        for layer, a in zip(seen, own, strict=True):
            assert (layer.weights - a).abs().max() <= 1e-5


def test_torchvision_attention_is_the_librarys_own() -> None:
    net, images = zoo.network("torchvision ViT"), zoo.images("torchvision ViT")
    seen = Trace(zoo.model("torchvision ViT"), images).attention
    with torch.no_grad():
        x = net._process_input(images)
        x = torch.cat([net.class_token.expand(len(x), -1, -1), x], 1) + net.encoder.pos_embedding
        for layer, block in zip(seen, net.encoder.layers, strict=True):
            y = block.ln_1(x)
            _, a = block.self_attention(y, y, y, need_weights=True, average_attn_weights=False)
            assert layer.door == "mha"
            assert (layer.weights - a).abs().max() <= 1e-5
            x = block(x)


class Explicit(nn.Module):
    """One attention whose A is a leaf that autograd can be asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, a: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if a is None:
            return F.scaled_dot_product_attention(q, k, v), torch.empty(0)
        return a @ v, v


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-6), (torch.float64, 2e-14)])
def test_gradient_of_attention_without_forming_it(dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    net = Explicit().to(dtype)
    x = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    way = torch.randn(2, 2, 5, 4, dtype=dtype)
    with Capture(ModuleNames(net), 2) as seen:
        out, _ = net(x)
    layer = seen.calls[0]
    y = (out.tanh() * way).sum()
    (dout,) = torch.autograd.grad(y, [layer.node])
    a = layer.weights.detach().requires_grad_()
    out, _ = net(x, a)
    (expected,) = torch.autograd.grad((out.tanh() * way).sum(), [a])
    assert (layer.weights_grad(dout) - expected).abs().max() <= limit


@pytest.mark.parametrize("name", ["timm ViT", "HF ViT eager", "torchvision ViT", "hand-written", "flat heads"])
def test_gradients_reach_every_layer(name: str) -> None:
    """At every door ∂y/∂A belongs to A: O = A·V is linear in A, so that Σ ∂y/∂A ⊙ A is Σ ∂y/∂O ⊙ O."""
    from vitreous.trace.target import Class

    trace = Trace(zoo.model(name), zoo.images(name))
    grads = trace.grads(Class(2))
    for layer, grad in zip(trace.attention, grads, strict=True):
        assert grad.abs().max() > 0
        through_weights = (layer.weights_grad(grad) * layer.weights).sum((1, 2, 3))
        through_output = (layer.fold(grad) * layer.fold(layer.node)).sum((1, 2, 3))
        assert off(through_weights.detach(), through_output.detach()) < 1e-4


CASES = {
    "mask": {"attn_mask": torch.tensor([[True, False, True], [True, True, False], [True, True, True]])},
    "bias of heads": {"attn_mask": torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))},
    "bias": {"attn_mask": torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
}


class Call(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_masks_biases_and_scales(case: str) -> None:
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    net = Call(**CASES[case])
    with Capture(ModuleNames(net), 5) as seen:
        out = net(q, k, v)
    call = seen.calls[0]
    assert (call.weights @ v - out).abs().max() < 1e-6
    call.verify(1e-5)
    for images, part in call.pieces():
        assert torch.equal(part.weights, call.weights[images])


def test_grouped_queries_and_flat_heads() -> None:
    q, kv = torch.randn(2, 4, 3, 4), torch.randn(2, 2, 3, 4)
    net = Call(enable_gqa=True)
    with Capture(ModuleNames(net), 2) as seen:
        net(q, kv, kv)
    assert seen.calls[0].shape == (2, 4, 3, 3)
    seen.calls[0].verify(1e-5)
    flat = torch.randn(6, 3, 4)  # two images of three heads
    net = Call()
    with Capture(ModuleNames(net), 2) as seen:
        net(flat, flat, flat)
    assert seen.calls[0].shape == (2, 3, 3, 3)
    seen.calls[0].verify(1e-5)


def test_weights_that_a_model_asks_for_are_returned() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(3, 5, 8)
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        with torch.no_grad():
            plain, weights = attention(x, x, x, **options)
            with Capture(ModuleNames(attention), 3):
                seen, same = attention(x, x, x, **options)
        assert off(seen, plain) < 1e-5
        assert (weights is None and same is None) or off(same, weights) < 1e-5


def test_a_single_sequence_without_a_batch() -> None:
    attention = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(5, 8)
    with torch.no_grad():
        _, weights = attention(x, x, x)
        with Capture(ModuleNames(attention), 1):
            _, same = attention(x, x, x)
    assert off(same, weights) < 1e-5


def test_names_are_right_in_threads() -> None:
    """Two models at once, each in a thread of its own: calls and names never mix."""
    found: dict[str, list[str]] = {}

    def run(name: str) -> None:
        for _ in range(5):
            found[name] = [layer.name for layer in Trace(zoo.model(name), zoo.images(name)).attention]

    names = ["timm ViT", "HF ViT sdpa", "torchvision ViT", "timm ViT"]
    for name in names:
        zoo.model(name)
    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["timm ViT"] == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert found["torchvision ViT"] == [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(3)]
    assert found["HF ViT sdpa"] == [f"vit.layers.{i}.attention" for i in range(3)]


class Bursts(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.broken:
            raise KeyError("the model's own mistake")
        return out


def test_nothing_is_left_behind_after_an_exception() -> None:
    from vitreous import Model

    net = Bursts(zoo.ZOO["timm ViT"].make())
    net.train()
    model = Model(net, preprocess=lambda image: torch.zeros(3, 64, 64))
    assert model.layout_at((64, 64)).obstacle is None
    net.broken = True
    with pytest.raises(KeyError, match="own mistake"):
        _ = Trace(model, zoo.images("timm ViT")).output
    assert all(module.training for module in net.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["HF ViT", "HF DINOv3", "HF CLIP vision", "HF SigLIP"])
def test_queries_and_keys_of_attention_that_is_written_out(name: str) -> None:
    """The same network, fused and eager: the same Q, K and scale, the latter found from A."""
    fused, eager = zoo.model(f"{name} sdpa"), Model(copy.deepcopy(zoo.network(f"{name} eager")))
    eager.module.load_state_dict(fused.module.state_dict())
    images = zoo.images(f"{name} sdpa")
    for one, other in zip(Trace(fused, images).attention, Trace(eager, images).attention, strict=True):
        seen, expected = other.projected(), one.projected()
        assert seen is not None and expected is not None and other.q is None
        assert off(seen[0] * seen[2], expected[0] * expected[2]) < 1e-4
        assert off(seen[1], expected[1]) < 1e-6


class Elsewhere(zoo.Block):
    """Queries and keys whose first axis is that of the heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 3, 0, 1, 4)  # [H B N d]
        a = torch.einsum("hbid,hbjd->bhij", q, k).div(4).softmax(dim=-1)
        return x + self.out(torch.einsum("bhij,hbjd->bihd", a, v).flatten(2))


def test_queries_and_keys_of_an_einsum() -> None:
    """In the axes of the output they are known; with other axes they are not."""
    net, images = zoo.network("hand-written"), zoo.images("hand-written")
    layer = Trace(zoo.model("hand-written"), images).attention[0]
    found = layer.projected()
    assert found is not None
    assert off((found[0] @ found[1].mT * found[2]).softmax(-1), layer.weights) < 1e-4
    kept: list[torch.Tensor] = []
    hook = net.first.qkv.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad():
        net(images)
    hook.remove()
    queries, keys, _ = kept[0].unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    assert off(found[0], queries) < 1e-6 and off(found[1], keys) < 1e-6
    net = zoo.HandWritten().eval()
    net.first, net.second, net.third = (Elsewhere() for _ in range(3))
    assert Trace(Model(net), images).attention[0].projected() is None


class Card(torch.Tensor):
    """Images that say they are on a GPU."""

    is_cuda = True


def test_patches_by_a_linear_layer() -> None:
    images, weight, bias = torch.randn(2, 3, 12, 8), torch.randn(5, 3, 4, 2), torch.randn(5)
    assert off(products(images, weight, bias, (4, 2)), F.conv2d(images, weight, bias, (4, 2))) < 1e-6
    last = images.to(memory_format=torch.channels_last)
    assert off(products(last, weight, bias, (4, 2)), products(images, weight, bias, (4, 2))) < 1e-6
    there = images.as_subclass(Card)
    usual: tuple[object, ...] = ((4, 2), (0, 0), (1, 1), 1)
    assert cuts_patches(there, weight, bias, *usual)
    assert not cuts_patches(images, weight, bias, *usual), "on a CPU it is no faster"
    assert not cuts_patches(there[..., :7], weight, bias, *usual), "a convolution drops what is left over"
    for other in ((2, 2), (0, 0), (1, 1), 1), ((4, 2), (1, 1), (1, 1), 1), ((4, 2), (0, 0), (2, 2), 1), ():
        assert not cuts_patches(there, weight, bias, *other)
