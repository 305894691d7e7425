"""One network, its attention written in many ways: each is seen, with the same weights and the same maps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import off
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace

Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B H N d] -> O [B H N d]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def sunk(q: Tensor, k: Tensor) -> Tensor:
    """A softmax with a sink: one more score, the same for every query."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.cat([scores, scores.new_ones(*scores.shape[:-1], 1)], -1).softmax(-1)


def out_of_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    joined = torch.cat([scores.new_ones(*scores.shape[:-1], 1), scores], -1)
    return joined.softmax(-1)[..., 1:] @ v


FORMS: dict[str, Form] = {
    "a @ v": lambda q, k, v: weights(q, k) @ v,
    "v @ a.mT": lambda q, k, v: (v.mT @ weights(q, k).mT).mT,
    "v @ a.transpose": lambda q, k, v: (v.transpose(-2, -1) @ weights(q, k).transpose(-2, -1)).transpose(-2, -1),
    "v @ softmax over -2": lambda q, k, v: (v.mT @ (k @ q.mT * q.shape[-1] ** -0.5).softmax(-2)).mT,
    "softmax over -2, turned": lambda q, k, v: (k @ q.mT * q.shape[-1] ** -0.5).softmax(2).mT @ v,
    "matmul by name": lambda q, k, v: torch.matmul(input=weights(q, k), other=v),
    "bmm of merged heads": lambda q, k, v: torch.bmm(
        weights(q, k).view(-1, q.shape[2], k.shape[2]), v.flatten(0, 1)
    ).unflatten(0, q.shape[:2]),
    "baddbmm for the scores": lambda q, k, v: (
        torch.baddbmm(
            q.new_zeros(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=q.shape[-1] ** -0.5
        ).softmax(-1)
        @ v.flatten(0, 1)
    ).unflatten(0, q.shape[:2]),
    "einsum of a list": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", [weights(q, k), v]),
    "einsum, values first": lambda q, k, v: torch.einsum("bhjd,bhij->bhid", v, weights(q, k)),
    "einsum with dots": lambda q, k, v: torch.einsum("...ij,...jd->...id", weights(q, k), v),
    "einsum without an arrow": lambda q, k, v: torch.einsum("...ij,...jy", weights(q, k), v),
    "einsum, turned": lambda q, k, v: torch.einsum("bhji,bhjd->bhid", weights(q, k).mT, v),
}
SUNK: dict[str, Form] = {
    "the last column": lambda q, k, v: sunk(q, k)[..., :-1] @ v,
    "the last column, narrowed": lambda q, k, v: sunk(q, k).narrow(-1, 0, k.shape[2]) @ v,
    "the first column": out_of_softmax,
    "values first": lambda q, k, v: (v.mT @ sunk(q, k)[..., :-1].mT).mT,
}


class Block(nn.Module):
    def __init__(self, form: Form, width: int, heads: int) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.form(q * 2, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Patches of 8 pixels, a CLS token, two blocks."""

    def __init__(self, form: Form, width: int = 16, heads: int = 2, side: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = nn.Conv2d(3, width, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 1 + (side // 8) ** 2, width))
        self.blocks = nn.ModuleList([Block(form, width, heads) for _ in range(2)])
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.cut(x).flatten(2).mT
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.place
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens[:, 0])


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
METHODS = ("gae", "legrad", "attn_lrp", "cp_lrp", "token_ablation")


def test_forms_of_attention_are_seen() -> None:
    plain = Trace(Model(Net(F.scaled_dot_product_attention).eval()), IMAGES).attention
    for name, form in FORMS.items():
        model = Model(Net(form).eval())
        layout = model.layout_at((32, 32))
        assert (layout.obstacle, layout.layers, layout.prefix, layout.readout) == (None, 2, 1, (0,)), name
        for one, other in zip(plain, Trace(model, IMAGES).attention, strict=True):
            assert off(other.weights, one.weights) < 1e-5, name
            other.verify(1e-5)


@pytest.mark.parametrize("form", ["v @ a.mT", "matmul by name", "einsum of a list", "einsum, turned"])
def test_a_form_of_attention_gives_the_same_maps(form: str) -> None:
    plain, other = Model(Net(FORMS["a @ v"]).eval()), Model(Net(FORMS[form]).eval())
    for name in METHODS:
        expected, found = (vitreous.explain(model, IMAGES, name, 1).map for model in (plain, other))
        assert off(found, expected) < 1e-4, name


@pytest.mark.parametrize("form", SUNK)
def test_a_softmax_with_a_sink(form: str) -> None:
    """A is the softmax without the column of the sink: its rows sum to less than one, and A·V is the output."""
    own: list[Tensor] = []

    def noted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own.append(sunk(q, k)[..., :-1].detach())
        return SUNK[form](q, k, v)

    model = Model(Net(SUNK[form]).eval())
    trace = Trace(model, IMAGES)
    assert trace.layout.obstacle is None and trace.layout.layers == 2
    trace.verify(1e-5)
    with torch.no_grad():
        Net(noted).eval()(IMAGES)
    for layer, a in zip(trace.attention, own, strict=True):
        assert off(layer.weights, a) < 1e-5
        assert (layer.weights.sum(-1) < 0.999).all()
    gone = vitreous.explain(model, IMAGES, "token_ablation", 1).map
    assert off(gone, ablated(Net(SUNK[form]).eval())) < 1e-4


def ablated(net: Net) -> Tensor:
    """Token ablation by brute force: each token is cut out of the sequence in turn."""
    found = torch.zeros(2, 16)
    with torch.no_grad():
        tokens = torch.cat([net.cls.expand(2, -1, -1), net.cut(IMAGES).flatten(2).mT], 1) + net.place

        def score(tokens: Tensor) -> Tensor:
            for block in net.blocks:
                tokens = block(tokens)
            return net.head(tokens[:, 0])[:, 1]

        for i in range(16):
            found[:, i] = score(tokens) - score(torch.cat([tokens[:, : i + 1], tokens[:, i + 2 :]], 1))
    return found.view(2, 4, 4)


# ------------------------------------------------------------------------------------- tokens or channels?

CHANNELS: dict[str, Form] = {  # heads as wide as there are tokens: all shapes are those of token attention
    "queries over channels": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "keys over tokens": lambda q, k, v: q @ (k.mT.softmax(-1) @ v),
    "channels": lambda q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).mT,
    "channels, values first": lambda q, k, v: v @ (q.mT @ k).softmax(-1).mT,
}


@pytest.mark.parametrize("form", CHANNELS)
def test_channels_are_not_taken_for_tokens(form: str) -> None:
    layout = Model(Net(CHANNELS[form], width=17, heads=1).eval()).layout_at((32, 32))
    linear = "multiplies queries, keys and values" in (layout.obstacle or "")
    assert layout.obstacle == "attends between channels, not between tokens" or linear


@pytest.mark.parametrize("form", ["a @ v", "v @ a.mT"])
def test_heads_as_wide_as_there_are_patches(form: str) -> None:
    """Their width says nothing: tokens attend to tokens."""
    for width in (16, 17):
        layout = Model(Net(FORMS[form], width=width, heads=1).eval()).layout_at((32, 32))
        assert (layout.obstacle, layout.layers) == (None, 2)


def test_linear_attention_with_narrow_heads_is_refused() -> None:
    for form in CHANNELS.values():
        assert Model(Net(form, width=12, heads=2).eval()).layout_at((32, 32)).obstacle is not None


def test_a_softmax_that_is_changed_is_what_multiplies_the_values() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = weights(q, k)
        a[..., 0] = 0
        return a @ v

    def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (weights(q, k) @ weights(k, q)) @ v

    for form in (written, squared, lambda q, k, v: weights(q, k).square() @ v):
        trace = Trace(Model(Net(form).eval()), torch.randn(2, 3, 32, 32))
        assert trace.layout.obstacle is None and trace.layout.mixed
        trace.verify()
