"""Sums over attention without attention: Triton's kernels, run here by its interpreter, beside whole matrices."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
import torch
import zoo
from conftest import off
from machine import rare

import vitreous
from vitreous.capture import attention, attention_backward
from vitreous.trace import batched_targets

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)


def unhooked(name: str) -> ModuleType:
    """A module without the checks of types, which Triton's interpreter cannot read through."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, found.origin), origin=found.origin)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Fused = unhooked("vitreous.capture.triton_kernels").Fused
SHAPES = [(2, 3, 70, 70, 16), (1, 2, 1, 37, 24), (2, 2, 65, 130, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SHAPES[1:])], ids=str
)
def test_sums_are_those_of_the_matrices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    b, h, n, m, d = shape
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(b, h, rows, d, generator=random).to(dtype) for rows in (n, m, m, n))
    weights = torch.rand(b, n, generator=random)
    a = ((q.float() * 0.3) @ k.float().mT).softmax(-1)
    product = a * (grad.float() @ v.float().mT)
    mean = product.mean(1).clamp_min(0)
    sums = Fused(q, k, 0.3, v, grad)
    assert off(sums.read(weights), torch.einsum("bn,bhnm->bhm", weights, a)) < 1e-6
    assert off(sums.gained(weights), torch.einsum("bn,bhnm->bhm", weights, product.clamp_min(0))) < 1e-6
    assert off(sums.mean_rows(), mean.sum(-1)) < 1e-6
    assert off(sums.mean_columns(weights), torch.einsum("bn,bnm->bm", weights, mean)) < 1e-6


def test_tensors_in_any_order_of_memory() -> None:
    qkv = torch.randn(2, 20, 3, 2, 16, generator=torch.Generator().manual_seed(0)).permute(2, 0, 3, 1, 4)
    weights = torch.rand(2, 20)
    apart = Fused(*(t.contiguous() for t in qkv[:2]), 0.25).read(weights)  # type: ignore[arg-type]
    assert off(Fused(qkv[0], qkv[1], 0.25).read(weights), apart) < 1e-6


def test_rows_of_several_targets_share_the_images() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 20, 16, generator=random) for _ in range(3))
    grads, weights = torch.randn(3, 2, 1, 20, 16, generator=random), torch.rand(3, 2, 20, generator=random)
    sums, rows = Fused(q, k, 0.3, v, grads.flatten(0, 1)), weights.flatten(0, 1)
    alone = [Fused(q, k, 0.3, v, grad) for grad in grads]
    assert off(sums.gained(rows), torch.cat([one.gained(w) for one, w in zip(alone, weights)])) < 1e-6
    assert off(sums.mean_rows(), torch.cat([one.mean_rows() for one in alone])) < 1e-6
    assert off(sums.mean_columns(rows), torch.cat([one.mean_columns(w) for one, w in zip(alone, weights)])) < 1e-6


@pytest.mark.parametrize("method", ["rollout", "gae", "grad_rollout"])
@pytest.mark.parametrize("name", ["timm ViT", *rare("timm BEiT", "timm SigLIP", "torchvision ViT", "HF ViT eager")])
def test_methods_with_kernels_and_without(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a bias (BEiT) or written-out attention leaves the kernels no use."""
    model, images = zoo.model(name), zoo.images(name)[:2]
    aim: Any = None if method == "rollout" else 1
    plain = vitreous.explain(model, images, method, aim).map
    used = []
    monkeypatch.setattr(attention, "fusible", lambda q: used.append(q) or True)
    monkeypatch.setattr(attention_backward, "fusible", lambda q: True)
    assert off(vitreous.explain(model, images, method, aim).map, plain) < 1e-5
    assert bool(used) == (name in ("timm ViT", "timm SigLIP", "torchvision ViT"))
    if aim is not None:
        monkeypatch.setattr(batched_targets, "one_by_one", None)
        both = vitreous.explain_targets(model, images, method, [2, 1])
        assert off(both[1].map, plain) < 1e-5
