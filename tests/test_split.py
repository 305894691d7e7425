"""transformer_attribution with precision=split: a forward pass in float64, backward passes in float32 and in parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from machine import rare
from torch import Tensor, nn

import vitreous
from vitreous import Model, Trace
from vitreous.trace.rules import relevance_split
from vitreous.trace.rules.exact import EXACT, Exact, exact, known_as
from vitreous.trace.rules.relevance_split import full_float32, multiplied, parts, product

METHOD = "transformer_attribution"
NAMES = [
    "timm ViT",
    *rare("HF ViT eager", "timm EVA-02", "torchvision ViT", "sequence first", "timm BEiT", "timm ConViT"),
]
NAMES += rare("timm DINOv3", "HF DINOv2 sdpa", "open_clip ViT-B-32", "hand-written", "flat heads", "torch.compile")


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as tensor cores make them: of bfloat16, added up in float32."""
    monkeypatch.setattr(relevance_split, "splits", lambda x: True)


def made(model: Model, images: Tensor, precision: str, name: str = "timm ViT") -> Tensor:
    target = "neuron:2" if zoo.model(name).classifier is False else 2
    return vitreous.explain(model, Trace(model, images), METHOD, target, precision=precision).map


# ------------------------------------------------------------------------------------------------------- the maps


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_those_of_float64(name: str, in_parts: None) -> None:
    model, images = zoo.model(name), zoo.images(name, 2)
    assert off(made(model, images, "split", name), made(model, images, "double", name)) < 2e-6


def test_without_tensor_cores() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT", 2)
    double = made(model, images, "double")
    assert off(made(model, images, "split"), double) < 1e-6 < 1e-5 < off(made(model, images, "single"), double)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *rare(torch.float16, torch.float64)], ids=str)
def test_any_precision_of_a_model(dtype: torch.dtype, in_parts: None) -> None:
    net, images = copy.deepcopy(zoo.network("timm ViT")).to(dtype), zoo.images("timm ViT", 2).to(dtype)
    assert off(made(Model(net), images, "split"), made(Model(net), images, "double")) < 1e-5


@pytest.mark.parametrize(("image", "which"), rare(*((name, which) for name in Oracle.IMAGES for which in (0, 1))))
def test_oracle(deit: Model, oracle: Oracle, image: str, which: int, in_parts: None) -> None:
    """The authors' maps, of which float32 is off by a tenth."""
    target = oracle.targets(image)[which]
    ours = vitreous.explain(deit, oracle.input(image), METHOD, target, precision="split").map[0]
    assert off(ours, oracle(METHOD, f"{image}/{target}/{METHOD}")) < 1e-5


def test_images_of_a_batch_are_apart(in_parts: None) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    whole = made(model, images, "split")
    for i in range(len(images)):
        assert off(made(model, images[i : i + 1], "split")[0], whole[i]) < 1e-5


# ------------------------------------------------------------------------------------------------------- in parts


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_three_parts_are_the_number() -> None:
    x = random(1000) * torch.logspace(-20, 20, 1000)
    assert torch.equal(sum(part.float() for part in reversed(parts(x, 3))), x)
    assert all(part.dtype == torch.bfloat16 for part in parts(x, 3))


@pytest.mark.parametrize(("dtype", "terms"), [(torch.bfloat16, 3), (torch.float16, 5), (torch.float32, 6)], ids=str)
def test_products(in_parts: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, terms: int) -> None:
    """As precise as those of float32, of as few parts as the weights allow."""
    widths: list[int] = []

    def seen(x: Tensor, w: Tensor) -> Tensor:
        widths.append(x.shape[1])
        return multiplied(x, w)

    monkeypatch.setattr(relevance_split, "multiplied", seen)
    x, w = random(50, 96), random(96, 40, seed=1).to(dtype)
    assert off(product(x, w), x.double() @ w.double()) < 3e-7
    assert widths == [96 * terms]


def test_sums_of_positive_terms_keep_their_digits() -> None:
    x, w, bias = random(20, 3072).abs(), random(8, 3072, seed=1), random(8, seed=2)
    layer = relevance_split.SplitLinear(x, x @ w.T, w, bias, light=False)
    expected = x.double() @ w.double().abs().T - bias
    assert off(layer.size(x), expected) < 1e-7


# ----------------------------------------------------------------------------------------------- values in float64


class Cuts(torch.autograd.Function):
    """A function that no mode sees through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Cuts.apply(x)
        return out


def test_where_float64_values_get_lost_the_run_is_in_float64() -> None:
    net, images = copy.deepcopy(zoo.network("timm ViT")), zoo.images("timm ViT", 2)
    net.blocks[0].ls1 = Hidden()
    model = Model(net)
    assert torch.equal(made(model, images, "split"), made(model, images, "double"))


def test_every_result_knows_its_value() -> None:
    x = known_as(random(3, 4).requires_grad_(), random(3, 4).double())
    w = nn.Parameter(random(4, 4, seed=1).bfloat16())
    with Exact() as run:
        y = x @ w
        z = (y.exp() + 0.1).reshape(4, 3)
        part = torch.zeros(2, 3)
        part[1:] = z[1:2]
        z = F.relu(z.mul_(3), inplace=True)
        values = [exact(t) for t in (y, z, part)]
    true = x.detach().double() @ w.detach().double()
    grown = (true.exp() + 0.1).reshape(4, 3)
    for t, value, expected in zip((y, z, part[1:]), (*values[:2], values[2][1:]), (true, grown * 3, grown[1:2])):
        assert value.dtype == torch.float64 and off(value, expected) < 1e-14
        assert t.dtype == torch.float32 and torch.equal(t, value.float()) and not hasattr(t, EXACT)
    assert not run.lost and w.dtype == torch.bfloat16 and not hasattr(w, EXACT)
    with Exact() as run:
        y * 2
    assert run.lost


# ------------------------------------------------------------------------------------------------------------ TF32


@pytest.fixture
def settings() -> Iterator[None]:
    newer = torch.backends.cuda.matmul
    before, was = torch.get_float32_matmul_precision(), getattr(newer, "fp32_precision", None)
    yield
    torch.set_float32_matmul_precision(before)
    if was is not None:
        newer.fp32_precision = was


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_tf32_is_switched_off_and_restored(settings: None, chosen: str) -> None:
    torch.set_float32_matmul_precision(chosen)
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == chosen


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has one interface")
def test_tf32_that_was_set_in_the_newer_way(settings: None) -> None:
    newer = torch.backends.cuda.matmul
    newer.fp32_precision = "tf32"
    with full_float32():
        assert newer.fp32_precision == "ieee"
    assert newer.fp32_precision == "tf32"
