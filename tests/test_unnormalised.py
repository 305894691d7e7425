"""Float tensors count as preprocessed: one that is not is told, and one that is never is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from PIL import Image

import vitreous
from vitreous import InputWarning, Model
from vitreous.cli.main import brief
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models.libraries import cropped

PHOTOS = sorted((Path(vitreous.__file__).parent / "assets" / "photos").glob("*.jpg"))
SIZE = (64, 64)
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = ((0.481, 0.458, 0.408), (0.269, 0.261, 0.276))
PLAIN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
WAYS = {"ImageNet": IMAGENET, "halves": HALVES, "CLIP": CLIP}


def model_of(way: tuple[Any, Any]) -> Model:
    return Model(zoo.network("timm ViT"), cropped(SIZE, *way), name="small")


def pixels(image: Image.Image) -> torch.Tensor:
    """An image as ToTensor makes it: whole 255ths in 0…1."""
    return torch.from_numpy(np.array(image.convert("RGB").resize(SIZE), np.float32) / 255).permute(2, 0, 1)[None]


def synthetic() -> Iterator[tuple[str, Image.Image]]:
    chance = np.random.default_rng(0)
    for name, low, high in (
        ("noise", 0, 256),
        ("dark", 0, 20),
        ("bright", 128, 256),
        ("white", 250, 256),
        ("grey", 120, 160),
    ):
        yield name, Image.fromarray(chance.integers(low, high, (64, 64, 3), dtype=np.uint8))
    for value in (0, 1, 64, 116, 124, 127, 128, 129, 255):
        yield f"constant {value}", Image.new("RGB", SIZE, (value, value, value))
    yield "checkerboard", Image.fromarray((np.indices((64, 64)).sum(0) % 2 * 127 + 128).astype(np.uint8))
    yield "mean colour", Image.new("RGB", SIZE, (124, 116, 104))
    ramp = np.linspace(124, 160, 64).round().astype(np.uint8)
    yield "fog", Image.fromarray(np.broadcast_to(ramp[:, None, None], (64, 64, 3)).copy())


def prepared(model: Model, images: torch.Tensor) -> list[str]:
    """The warnings of a tensor."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.prepare(images)
    assert all(one.category is InputWarning for one in seen)
    return [str(one.message) for one in seen]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_normalised_images_raise_no_alarm(way: str, dtype: torch.dtype) -> None:
    model = model_of(WAYS[way])
    images = [*(Image.open(file) for file in PHOTOS), *(image for _, image in synthetic())]
    each = [model.preprocess(image.resize(SIZE).convert("RGB"))[None] for image in images]
    resampled = [torch.nn.functional.interpolate(x, 48, mode="bilinear", antialias=True) for x in each]
    noise = [scale * torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0)) for scale in (0.1, 1, 50)]
    plain = [torch.full((1, 3, *SIZE), value) for value in (0.0, 0.3, 1.0, 2.0)]
    for x in (*each, torch.cat(each), *resampled, *noise, *plain):
        assert prepared(model, x.to(dtype)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("photo", PHOTOS, ids=lambda p: p.stem)
def test_photos_that_were_not_normalised_are_told(way: str, photo: Path) -> None:
    model, x = model_of(WAYS[way]), pixels(Image.open(photo))
    (said,) = prepared(model, x * 255)
    assert said == (
        "a float tensor counts as preprocessed, but values in 0…255 are not what small takes; "
        "give uint8 0…255, or float tensors made by model.preprocess(image)"
    )
    for dtype in (torch.float16, torch.float64):
        assert "0…255" in prepared(model, (x * 255).to(dtype))[0]
    (said,) = prepared(model, x)
    assert "values in 0…1 are" in said
    smaller = torch.nn.functional.interpolate(255 * x, 48, mode="bilinear")
    assert "0…255" in prepared(model, smaller)[0], "no whole numbers any more"


def test_a_dark_photo_in_0_to_255_is_told() -> None:
    dark = pixels(dict(synthetic())["dark"]) * 255
    assert "0…255" in prepared(model_of(IMAGENET), dark)[0]


def test_noise_in_0_to_1_is_told_where_normalised_values_go_far_beyond() -> None:
    noise = torch.rand(1, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    assert "0…1" in prepared(model_of(IMAGENET), noise)[0] and prepared(model_of(HALVES), noise) == []


def test_what_takes_such_values_is_not_warned_of() -> None:
    x = pixels(Image.open(PHOTOS[0]))
    assert prepared(model_of(PLAIN), x) == [], "it takes 0…1"
    assert prepared(Model(zoo.network("timm ViT"), cropped(SIZE, (0.0,) * 3, (1 / 255,) * 3)), 255 * x) == []
    assert prepared(model_of(PLAIN), 255 * x) != []
    alone = Preprocess(lambda image: pixels(image)[0] - pixels(image).mean(), *PLAIN, known=False)
    assert prepared(Model(zoo.network("timm ViT"), alone), x) == [], "each image is normalised by itself"
    unknown = Model(zoo.network("hand-written"))
    assert unknown.preprocess.assumed and prepared(unknown, x) == [], "nothing says that it normalises"


def test_a_model_whose_preprocessing_cannot_be_made_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(zoo.network("hand-written"))

    def broken(*_: object) -> Preprocess:
        raise KeyError("mean")

    monkeypatch.setattr(type(model), "library", property(lambda self: type("Other", (), {"preprocess": broken})()))
    monkeypatch.setattr(model, "_channels", 3)
    assert prepared(model, 255 * pixels(Image.open(PHOTOS[0]))) == []


def test_a_bright_batch_in_half_precision_is_finite() -> None:
    x = model_of(IMAGENET).prepare(torch.full((4, 3, 256, 256), 2.0, dtype=torch.float16))
    assert x.dtype == torch.float32, "its sum does not fit into 16 bits"


def test_explain_warns_once_at_the_line_that_calls_it() -> None:
    model, x = model_of(IMAGENET), pixels(Image.open(PHOTOS[0])) * 255
    with pytest.warns(InputWarning) as seen:
        vitreous.explain(model, x, "gae")
    assert len(seen) == 1 and Path(vitreous.__file__).parent not in Path(seen[0].filename).parents
    with pytest.warns(InputWarning, match="uint8"):
        vitreous.evaluate(model, x, "gae", "deletion", steps=3)
    vitreous.explain(model, (x[0].permute(1, 2, 0)).to(torch.uint8).numpy(), "gae")


def test_arrays_of_other_channels_as_floats_in_0_to_255(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey = Model(one_channel(), name="grey")
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 1))
    with pytest.warns(InputWarning, match=r"image 0: floats are taken for values in 0…1, .* give uint8"):
        grey.prepare(values.astype(np.float32))
    grey.prepare(values.astype(np.uint8))
    grey.prepare((values / 255).astype(np.float32))
    monkeypatch.setattr("vitreous.cli.arguments.load_model", lambda *_: grey)
    np.save(tmp_path / "x.npy", values.astype(np.float32))
    with pytest.warns(InputWarning, match=r"x\.npy: floats are taken for values in 0…1"):
        said = run("explain", tmp_path / "x.npy", "--method", "gradient", "--target", "1", "-o", tmp_path / "out")
    assert said.code == 0
    assert brief(InputWarning("x"), InputWarning, "f.py", 3) == "note: x\n"
    np.save(tmp_path / "rgb.npy", np.float32(values.repeat(3, 2)))
    with pytest.raises(vitreous.InputError, match="colours as floats are values in 0…1"):
        model_of(IMAGENET).prepare([tmp_path / "rgb.npy"])


def one_channel() -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=32, num_heads=2, in_chans=1, num_classes=7
    )
    return net.eval()
