"""What ships inside the package: the embedded model, its labels and the sample photographs."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data.transforms_factory import create_transform

ASSETS = Path(__file__).parents[1] / "src" / "vitreous" / "assets"
PHOTOS = sorted((ASSETS / "photos").glob("*.jpg"))


def test_there_are_photos_and_the_default_one() -> None:
    assert 3 <= len(PHOTOS) <= 5
    assert ASSETS / "photos" / "cat.jpg" in PHOTOS


@pytest.mark.parametrize("path", PHOTOS, ids=lambda path: path.stem)
def test_photo_is_small_and_attributed(path: Path) -> None:
    with Image.open(path) as photo:
        photo.load()
        assert (photo.mode, photo.format) == ("RGB", "JPEG")
        assert min(photo.size) >= 224
        assert max(photo.size) <= 448
        assert not photo.getexif()
    assert path.stat().st_size < 60_000
    assert f"`{path.name}`" in (ASSETS / "photos" / "README.md").read_text(encoding="utf-8")


def test_labels_are_imagenets_in_the_usual_order() -> None:
    lines = (ASSETS / "imagenet1k.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1000
    assert all(line and line == line.strip() for line in lines)
    assert lines[0] == "tench, Tinca tinca"
    assert lines[281:283] == ["tabby, tabby cat", "tiger cat"]
    assert lines[134] == lines[517] == "crane"
    assert lines[638:640] == ["maillot", "maillot, tank suit"]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(ASSETS / "vitreous_tiny.safetensors")


def test_weights_are_half_precision_and_fit_timm(weights: dict[str, torch.Tensor]) -> None:
    assert (ASSETS / "vitreous_tiny.safetensors").stat().st_size <= 12_000_000
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert all(value.isfinite().all() for value in weights.values())
    timm.create_model("deit_tiny_patch16_224").load_state_dict(weights, strict=True)


def test_model_sees_a_cat_in_the_default_photo(weights: dict[str, torch.Tensor]) -> None:
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(weights)
    transform = create_transform(224, interpolation="bicubic", crop_pct=1.0)  # ImageNet mean and std
    with Image.open(ASSETS / "photos" / "cat.jpg") as photo, torch.inference_mode():
        logits = model(transform(photo)[None])
    assert logits.argmax().item() in {281, 282, 283, 284, 285}  # the five cats of ImageNet
