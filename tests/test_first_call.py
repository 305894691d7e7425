"""What the first explanation of a fresh model costs: the layout run, the check of the last block, and the map."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest
import zoo
from conftest import Run as Command

import vitreous
from vitreous import Model

FEW = ["timm ViT", "torchvision ViT", "HF ViT sdpa", "HF ViT eager", "timm SigLIP", "timm DINOv2 registers"]

OTHERS = ["grad_rollout", "cdam", "attn_lrp", "gradient", "attention", "rollout"]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of every forward pass."""
    counted: list[int] = []
    plain = Model.run
    monkeypatch.setattr(Model, "run", lambda self, images: counted.append(len(images)) or plain(self, images))
    return counted


def fresh(name: str) -> Model:
    """A model that nothing is known about."""
    model = zoo.model(name)
    model.forget()
    return model


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "gae") for name in FEW), *(("timm ViT", method) for method in OTHERS)]
)
def test_three_forward_passes(name: str, method: str, passes: list[int]) -> None:
    model = fresh(name)
    vitreous.explain(model, zoo.images(name)[:1], method, "neuron:1" if model.classifier is False else 1)
    assert len(passes) <= 3, passes
    passes.clear()
    vitreous.explain(model, zoo.images(name)[:1], method, "neuron:1" if model.classifier is False else 2)
    assert len(passes) == 1, "everything is known the second time"


@pytest.mark.parametrize("name", ["timm ViT", "torchvision ViT", "HF ViT sdpa"])
def test_token_ablation_needs_three_besides_its_variants(name: str, passes: list[int]) -> None:
    model, image = fresh(name), zoo.images(name)[:1]
    vitreous.explain(model, image, "token_ablation", 1)
    first = len(passes)
    passes.clear()
    vitreous.explain(model, image, "token_ablation", 1)
    variants = len(passes) - 1  # one pass for the score of the whole image
    tried = 1  # a pass of variants whose result is known: nothing dropped, and a dropped token with other pixels
    assert first <= 3 + tried + variants, (first, variants)


def test_a_network_shares_what_was_found_out(passes: list[int]) -> None:
    net = zoo.ZOO["timm ViT"].make().eval()
    vitreous.explain(Model(net), zoo.images("timm ViT")[:1], "gae", 1)
    passes.clear()
    vitreous.explain(Model(net), zoo.images("timm ViT")[:1], "gae", 1)
    assert len(passes) == 2, "another Model has its own layout, for its forward may differ; the rest is known"


def test_a_changed_network_can_be_forgotten(passes: list[int]) -> None:
    model = fresh("timm ViT")
    vitreous.explain(model, zoo.images("timm ViT")[:1], "gae", 1)
    model.forget()
    passes.clear()
    vitreous.explain(model, zoo.images("timm ViT")[:1], "gae", 1)
    assert len(passes) == 3


def test_an_image_is_decoded_once(run: Command, cat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    plain = PIL.Image.open
    monkeypatch.setattr(PIL.Image, "open", lambda file, *rest, **options: opened.append(file) or plain(file, *rest))
    assert run("explain", cat, "--method", "gae").code == 0
    assert len(opened) == 1, opened
