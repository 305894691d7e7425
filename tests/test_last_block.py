"""The last block for the tokens that are read: the same maps as the whole block gives, on every model, for less."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import off
from machine import ROUNDING
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Model
from vitreous.capture.narrowed_block import Fold
from vitreous.trace.last_block import narrowing
from vitreous.trace.run import Narrow, Run
from vitreous.trace.trace import Trace

FEW = [  # models whose head reads few tokens, of blocks that are modules of their own
    "timm ViT",
    "timm ViT unfused",
    "timm ViT 224×448",
    "timm ViT 13 channels",
    "timm DeiT distilled",
    "timm DINOv2 registers",
    "torchvision ViT",
    "open_clip ViT-B-32",
    "sequence first",
    "torch.compile",
    "HF ViT sdpa",
    "HF ViT eager",
    "HF DINOv2 registers sdpa",
    "HF DINOv2 registers eager",
    "HF DINOv3 sdpa",
    "HF DINOv3 eager",
    "HF CLIP vision sdpa",
    "HF CLIP vision eager",
]
FOLDED = [name for name in FEW if not any(word in name for word in ("eager", "unfused", "DINOv3"))]
USES = ["cdam", "gradcam", "gae", "grad_rollout", "attn_lrp", "transformer_attribution", "token_ablation"]


@pytest.mark.parametrize("name", zoo.ZOO)
def test_it_is_known_where_it_may_be_used(name: str) -> None:
    assert (narrowing(Trace(zoo.model(name), zoo.images(name))) is not None) == (name in FEW)


@pytest.mark.parametrize("name", FEW)
def test_maps_are_those_of_the_whole_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model(name), zoo.images(name)[:2]
    aim = "neuron:1" if model.classifier is False else 1
    wanted = USES if name in ("timm ViT", "HF ViT eager", "timm DeiT distilled", "HF DINOv3 sdpa") else USES[:4]
    ours = {method: vitreous.explain(model, images, method, aim).map for method in wanted}
    for place in ("trace.trace", "trace.ruled", "methods.attention_gradient.transformer_attribution"):
        monkeypatch.setattr(f"vitreous.{place}.narrowing", lambda trace, **asked: None)
    for method, map in ours.items():
        assert off(map, vitreous.explain(model, images, method, aim).map) < 2e-5, method


@pytest.mark.parametrize("name", FEW)
def test_keys_and_values_are_left_out_where_they_are_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where they are rotated (DINOv3), or where a model multiplies them itself."""
    model, images = zoo.model(name), zoo.images(name)
    trace = Trace(model, images)
    assert has_fold(trace) == (name in FOLDED)
    last = Run.from_layer(trace.layout.layers - 1)
    ours, whole = trace.run(images, trace.least(last)), trace.run(images, last)
    assert off(ours.output.detach(), whole.output.detach()) < 1e-5
    along = torch.linspace(-1, 1, ours.output.shape[1]).expand_as(ours.output)
    grads = [torch.autograd.grad([run.output], [run.entry], [along])[0] for run in (ours, whole)]
    assert off(*grads) < 1e-5


def has_fold(trace: Trace) -> bool:
    found = narrowing(trace)
    return found is not None and found.fold is not None


def test_a_block_that_is_rebuilt_is_looked_at_again() -> None:
    """Weights that are exchanged are used; an adapter beside the linear layer is not overlooked."""
    net = zoo.ZOO["timm ViT"].make().eval()
    model, images = Model(net), zoo.images("timm ViT")
    vitreous.explain(model, images, "cdam", 1)

    def right() -> bool:
        trace = Trace(model, images)
        ours = trace.run(images, trace.least(Run.to_output())).output
        return off(ours, net(images).detach()) < 1e-5

    attention = net.blocks[-1].attn
    attention.qkv.weight = nn.Parameter(torch.randn_like(attention.qkv.weight) / 4)
    assert right()
    attention.qkv = Adapted(attention.qkv)
    assert right() and not has_fold(Trace(model, images))


class Adapted(nn.Module):
    """A linear layer and what was learned beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.beside = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.beside(x)
        return out


def test_half_precision_forms_keys_and_values() -> None:
    model = Model(zoo.ZOO["timm ViT"].make().eval().bfloat16())
    assert not has_fold(Trace(model, zoo.images("timm ViT").bfloat16()))
    with torch.autocast("cpu"):
        assert not has_fold(Trace(zoo.model("timm ViT"), zoo.images("timm ViT")))


@pytest.mark.parametrize("split", ["value", "key"])
@pytest.mark.parametrize("name", ["timm ViT", "HF ViT eager", "torchvision ViT"])
def test_parts_of_cdam(name: str, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model(name), zoo.images(name)[:2]
    ours = vitreous.explain(model, images, "cdam", 1, split=split).map
    monkeypatch.setattr("vitreous.trace.trace.narrowing", lambda trace, **asked: None)
    assert off(ours, vitreous.explain(model, images, "cdam", 1, split=split).map) < 2e-5


def test_what_was_computed_of_the_last_attention_is_verified() -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
    last = trace.cut().layers[-1]
    assert last.only == [0] and last.node.shape[2] == 1
    last.verify()
    assert last.weights.shape[2] == trace.layout.tokens, "A itself is whole"


class Mixing(nn.Module):
    """A block that may look only back, or at the second token behind as well."""

    def __init__(self, causal: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.causal, self.beside = causal, beside

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, 16))
        return x + x.roll(-2, 1).tanh() if self.beside else x


class Small(nn.Module):
    """A ViT whose class token comes last."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList([Mixing(), Mixing(), last])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([tokens, self.cls.expand(len(x), -1, -1)], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens[:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("last", "works"),
    [({}, True), ({"beside": True}, False), ({"causal": True}, False)],
    ids=["tokens alone", "tokens mixed", "causal"],
)
def test_a_block_that_mixes_tokens_is_noticed(
    last: dict[str, Any], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, images = Model(Small(Mixing(**last)).eval()), torch.randn(2, 3, 32, 32)
    assert (narrowing(Trace(model, images)) is not None) == works
    ours = vitreous.explain(model, images, "cdam", 1).map
    monkeypatch.setattr("vitreous.trace.trace.narrowing", lambda trace, **asked: None)
    assert off(ours, vitreous.explain(model, images, "cdam", 1).map) < 2e-5


def test_those_who_listen_hear_the_whole_block() -> None:
    """A hook of the user's sees all tokens, as in a plain run."""
    net = zoo.ZOO["timm ViT"].make().eval()
    model, images = Model(net), zoo.images("timm ViT")
    before = vitreous.explain(model, images, "cdam", 1).map
    heard: list[tuple[int, ...]] = []
    hook = net.blocks[-1].register_forward_hook(lambda module, args, out: heard.append(tuple(out.shape)))
    assert off(vitreous.explain(model, images, "cdam", 1).map, before) < 2e-5
    hook.remove()
    assert set(heard) == {(3, 17, 32)}


def test_methods_that_use_it_are_declared() -> None:
    assert set(USES) <= set(METHODS)


def test_another_thread_runs_the_whole_network() -> None:
    """While a method narrows the last block, cuts tokens out or enters others, a plain run beside it stays plain."""
    net, images = zoo.network("timm ViT"), zoo.images("timm ViT")
    expected, seen, done = net.forward_features(images).detach(), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(off(net.forward_features(images).detach(), expected))  # all tokens, also those that none reads

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        while len(seen) < 5 and watcher.is_alive():  # at least once, and until enough was seen meanwhile
            for method in ("cdam", "gae", "legrad", "token_ablation", "occlusion"):
                maps = vitreous.explain(zoo.model("timm ViT"), images, method, 1)
            vitreous.evaluate(zoo.model("timm ViT"), images, maps, "token_deletion", 1, steps=4)
    finally:
        done.set()
        watcher.join()
    assert len(seen) >= 5 and max(seen) <= ROUNDING


class Gated(nn.Module):
    """A block with a linear layer before its attention whose output is used behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), zoo.ZOO["timm ViT"].make().blocks[0].attn
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = self.gate(y).sigmoid()
        return x + gate * torch.as_tensor(self.attn(y))


def test_a_linear_layer_that_makes_no_queries_keys_or_values_is_computed() -> None:
    """What it would find in uninitialised memory may be right by chance where outputs are compared, and wrong later."""
    net = zoo.ZOO["timm ViT"].make().eval()
    net.blocks[-1] = Gated(net.embed_dim).eval()
    trace, images, width = Trace(Model(net), zoo.images("timm ViT")), zoo.images("timm ViT"), net.embed_dim
    how = Run.to_output().unseen().narrowed(Narrow(Fold((1, 1, 1), (0, width, 2 * width))))
    assert off(trace.run(images, how).output, net(images).detach()) < 1e-5
