"""Devices without float64: what is computed in double precision there, and where."""

from __future__ import annotations

import pytest
import torch
import zoo
from conftest import off

import vitreous
from vitreous._support.precision import doubled, widest
from vitreous.methods.attention import norm_attention
from vitreous.methods.attention_gradient import transformer_attribution


def test_apple_has_no_double() -> None:
    assert widest(torch.device("mps")) == torch.float32
    assert widest(torch.device("cpu")) == widest(torch.device("cuda")) == torch.float64


class Apple(torch.Tensor):
    """A tensor that says it is on MPS, and refuses float64 as tensors there do."""

    device = torch.device("mps")

    def double(self) -> torch.Tensor:  # type: ignore[override]
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_values_are_doubled_on_the_cpu() -> None:
    found = doubled(torch.ones(2).as_subclass(Apple))
    assert type(found) is torch.Tensor and found.dtype == torch.float64


def test_norm_attention_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")[:1]
    expected = vitreous.explain(model, images, "norm_attention").map
    monkeypatch.setattr(norm_attention, "widest", lambda device: torch.float32)
    assert off(vitreous.explain(model, images, "norm_attention").map, expected) <= 1e-4


def test_transformer_attribution_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_attribution, "widest", lambda device: torch.float32)
    with pytest.raises(vitreous.Unsupported, match="has no float64: use"):
        vitreous.explain(zoo.model("timm ViT"), zoo.images("timm ViT")[:1], "transformer_attribution", 1)
