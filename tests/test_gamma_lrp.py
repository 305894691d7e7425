"""The γ rule: the authors' numbers, a second implementation that forms every contribution, and what must hold."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from machine import rare
from oracles import lrp as plain_lrp
from test_lrp import entering, exact, goal, some, under
from torch import Tensor

import vitreous
from vitreous import METHODS, Model, Trace
from vitreous.errors import OptionError
from vitreous.methods.lrp.propagate import token_relevance
from vitreous.trace.rules.gamma import gamma_table
from vitreous.trace.rules.gradient import ATTN_LRP, CP_LRP
from vitreous.trace.target import Class

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
counting = importlib.import_module("counting")

TABLES = {"attn_lrp": ATTN_LRP, "cp_lrp": CP_LRP}
X, W, BIAS = some(5, 8), some(6, 8, seed=11), some(6, seed=12)
NONE = torch.zeros(6, dtype=X.dtype)


# ------------------------------------------------------------------------------------------------ the authors' maps


@pytest.fixture(scope="module")
def deit64(deit: Model) -> Model:
    return Model(exact(deit.net), name="deit64", labels=deit.labels)


CASES = [(image, which, double) for image in Oracle.IMAGES for which in (0, 1) for double in (False, True)]


@pytest.mark.parametrize(("image", "which", "double"), [CASES[0], *rare(*CASES[1:])])
def test_oracle(deit: Model, deit64: Model, oracle: Oracle, image: str, which: int, double: bool) -> None:
    model, limit = (deit64, 1e-6) if double else (deit, 5e-3)
    trace, target = Trace(model, oracle.input(image)), oracle.targets(image)[which]

    def far(ours: Tensor, variant: str) -> float:
        return off(ours.float(), oracle("gamma_lrp", f"{image}/{target}/{variant}"))

    def made(**options: Any) -> Tensor:
        return vitreous.explain(model, trace, "cp_lrp", target, **options).map[0]

    for gamma in (0.05, 0.25):
        every = token_relevance(trace, Class(target), gamma_table(CP_LRP, gamma, 0.0)).sum(-1)[0]
        assert far(every, f"lin{gamma}_tokens") < limit
        assert far(made(gamma_linear=gamma), f"lin{gamma}") < limit
        if gamma == 0.05 or which == 0:  # the others are not stored
            assert far(made(gamma_linear=gamma, gamma_patch=0.25, wrt="image"), f"lin{gamma}_conv0.25") < limit
    if which == 0:
        assert far(made(gamma_patch=0.25, wrt="image"), "lin0_conv0.25") < (limit if double else 1e-4)


@pytest.mark.parametrize("method", TABLES)
@pytest.mark.parametrize("name", plain_lrp.READERS)
def test_plain_matrices(name: str, method: str) -> None:
    """Packed projections of nn.MultiheadAttention and the classifier too."""
    net = exact(zoo.network(name))
    model = Model(net, name=name, layout=zoo.model(name).layout_at(zoo.ZOO[name].size))
    plain, images = plain_lrp.read(name, net), zoo.images(name, 2).double()
    ours = token_relevance(Trace(model, images), goal(name), gamma_table(TABLES[method], 0.25, 0.0))
    for tokens, got in zip(entering(model, images), ours, strict=True):
        expected = plain_lrp.relevance(plain, tokens, 2, constant=method == "cp_lrp", linear=0.25)
        assert off(got, expected) < 1e-4, "the stabilisers are not in it"
        without = plain_lrp.relevance(plain, tokens, 2, constant=method == "cp_lrp")
        assert off(got, without) > 1e-2


# --------------------------------------------------------------------------------------------------------- the rule


def gamma(linear: float, patch: float = 0.0) -> Any:
    return gamma_table(ATTN_LRP, linear, patch)


@pytest.mark.parametrize("value", [0.05, 1.0])
@pytest.mark.parametrize("bias", [BIAS, NONE])
def test_linear_layers(value: float, bias: Tensor) -> None:
    def layer(x: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, (8,)), W, bias if bias is BIAS else None)

    y, (grad,), g = under(gamma(value), layer, X)
    assert torch.allclose(y, layer(X))
    norm = torch.ones(8, dtype=X.dtype), torch.zeros(8, dtype=X.dtype), 1e-5
    r = plain_lrp.through_linear(plain_lrp.normed(X, norm), W, bias, y.detach() * g, value)
    assert off(X * grad, plain_lrp.through_norm(X, norm, r)) < 1e-4


def test_convolutions_are_linear_layers_of_what_they_read() -> None:
    images, weight = some(2, 3, 8, 8), some(6, 3, 4, 4, seed=13)
    y, (grad,), g = under(gamma(0.0, 0.5), lambda x: F.conv2d(x, weight, BIAS, stride=2, padding=1), images)
    cut = F.unfold(images, 4, padding=1, stride=2)  # [B 3·4·4 places]
    shares = torch.stack(
        [
            plain_lrp.through_linear(one.T, weight.flatten(1), BIAS, r.flatten(1).T, 0.5).T
            for one, r in zip(cut, y.detach() * g, strict=True)
        ]
    )
    assert off(images * grad, F.fold(shares, (8, 8), 4, padding=1, stride=2)) < 1e-4


def test_a_linear_layer_that_reads_pixels_embeds_the_patches() -> None:
    """As the convolution would, which a GPU runs in this form."""
    images, weight = some(2, 3, 8, 8), some(6, 48, seed=13)

    def cut(x: Tensor) -> Tensor:
        return x.view(2, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).flatten(3)

    def embed(x: Tensor) -> Tensor:
        return F.linear(cut((x - 0.1) / 2), weight, BIAS)

    def convolve(x: Tensor) -> Tensor:
        return F.conv2d((x - 0.1) / 2, weight.view(6, 3, 4, 4), BIAS, stride=4).permute(0, 2, 3, 1)

    (ours,), (same,) = (under(gamma(0.0, 0.5), way, images)[1] for way in (embed, convolve))
    assert off(ours, same) < 1e-10
    assert off(under(gamma(0.5, 0.0), embed, images)[1][0], same) > 1e-2


def test_gated_layers_with_rms_norm() -> None:
    """W₂(silu(W₁n)·W₃n), n = x/rms(x), as in SwiGLU."""
    one, two, three = (some(*shape, seed=seed) for shape, seed in (((6, 8), 21), ((7, 6), 22), ((6, 8), 23)))

    def block(x: Tensor) -> Tensor:
        n = F.rms_norm(x, (8,), eps=1e-6)
        return F.linear(F.silu(F.linear(n, one)) * F.linear(n, three), two)

    y, (grad,), g = under(gamma(0.25), block, X)
    n = X / (X.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    inner = F.silu(n @ one.T) * (n @ three.T)
    r = plain_lrp.through_linear(inner, two, torch.zeros(7, dtype=X.dtype), y.detach() * g, 0.25) / 2
    assert off(X * grad, sum(plain_lrp.through_linear(n, w, NONE, r, 0.25) for w in (one, three))) < 1e-4


def test_what_is_zero_has_and_gives_nothing() -> None:
    x = X.clone()
    x[:, 0] = 0
    _, (grad,), _ = under(gamma(0.25, 0.25), lambda x: F.linear(x * 1, W), x)
    assert (grad[:, 0] == 0).all() and grad.isfinite().all()
    _, (grad,), _ = under(gamma(0.25, 0.25), lambda x: F.linear(x * 0, W), X)
    assert (grad == 0).all(), "y = 0"


def test_a_weight_that_carries_a_signal_is_a_factor() -> None:
    ours = under(gamma(0.25), F.linear, X, W)[1]
    for found, expected in zip(ours, under(ATTN_LRP, F.linear, X, W)[1], strict=True):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------------- the options


@pytest.mark.parametrize("method", TABLES)
def test_without_gamma_nothing_changes(method: str) -> None:
    table = TABLES[method]
    assert gamma_table(table, 0.0, 0.0) is table
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    for wrt in ("tokens", "image"):
        ours = vitreous.explain(model, images, method, 1, wrt=wrt, gamma_linear=0, gamma_patch=0).map
        assert torch.equal(ours, vitreous.explain(model, images, method, 1, wrt=wrt).map)


def test_one_trace_keeps_each_run_apart() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    trace = Trace(model, images)
    for options in ({}, {"gamma_linear": 0.05}, {"gamma_linear": 0.25}, {"gamma_patch": 0.25}, {"gamma_linear": 0.05}):
        ours = vitreous.explain(model, trace, "attn_lrp", 1, wrt="image", **options).map
        assert off(ours, vitreous.explain(model, images, "attn_lrp", 1, wrt="image", **options).map) < 1e-5


def test_several_targets_share_a_backward_pass() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    many = vitreous.explain_targets(model, images, "cp_lrp", [1, 2, 3], gamma_linear=0.25)
    for target, one in zip((1, 2, 3), many, strict=True):
        assert off(one.map, vitreous.explain(model, images, "cp_lrp", target, gamma_linear=0.25).map) < 1e-5


@pytest.mark.parametrize("option", ["gamma_linear", "gamma_patch"])
def test_a_negative_gamma_is_refused(option: str) -> None:
    with pytest.raises(OptionError, match=f"attn_lrp.{option} takes a number ≥ 0, not -1"):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT"), "attn_lrp", 1, **{option: -1})


def test_advise_tries_some() -> None:
    for method in TABLES:
        assert [options["gamma_linear"] for options in METHODS[method].tried] == [0.05, 0.25]


def test_it_costs_at_most_twice_as_much() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    options = {"gamma_linear": 0.25, "gamma_patch": 0.25, "wrt": "image"}
    plain = counting.flops(lambda: vitreous.explain(model, images, "attn_lrp", 1, wrt="image"))
    assert plain < counting.flops(lambda: vitreous.explain(model, images, "attn_lrp", 1, **options)) <= 2 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    net, images = zoo.ZOO["timm ViT"].make().eval(), zoo.images("timm ViT")
    net.load_state_dict(zoo.network("timm ViT").state_dict())
    full = vitreous.explain(zoo.model("timm ViT"), images, "cp_lrp", 1, gamma_linear=0.25).map
    half = vitreous.explain(Model(net.to(dtype)), images.to(dtype), "cp_lrp", 1, gamma_linear=0.25).map
    assert half.isfinite().all()
    assert torch.corrcoef(torch.stack([full.flatten(), half.flatten()]))[0, 1] > 0.9
