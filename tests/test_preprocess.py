"""Our preprocessing is each library's own, and we know which part of a photo it shows to the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import zoo
from conftest import off
from machine import ROUNDING
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.transforms import MaybeToTensor
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision import transforms
from torchvision.transforms import v2

from vitreous import Model
from vitreous.errors import ModelError
from vitreous.images import preprocess
from vitreous.images.preprocess import IMAGENET, Preprocess, find_box
from vitreous.images.steps import applied, known_box
from vitreous.models.libraries import adapt, cropped, huggingface
from vitreous.models.libraries.open_clip import COLOURS as CLIP

open_clip = pytest.importorskip("open_clip", reason="its preprocessing is the yardstick: pip install 'vitreous[clip]'")
transformers = pytest.importorskip("transformers", reason="so is this one's: pip install 'vitreous[hf]'")

SMALL = {"embed_dim": 32, "depth": 1, "num_heads": 2}
HALF = ((0.5,) * 3, (0.5,) * 3)


@pytest.fixture(scope="module")
def photo(cat: Path) -> Image.Image:
    """Landscape."""
    with Image.open(cat) as image:
        return image.convert("RGB").resize((451, 300))


def same(model: Model, theirs: torch.Tensor, photo: Image.Image) -> None:
    assert off(model.prepare(photo)[0], theirs) <= ROUNDING, "another level of one pixel would be 4e-3"


# ---------------------------------------------------------------------------------------- each library's own


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),  # mean ½, 90 % of the photo
        ("deit_tiny_patch16_224", {}),  # ImageNet's colours
        ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),  # another size than the published one
        ("vit_base_patch16_siglip_224", {}),  # squashed
        ("vit_base_patch16_clip_quickgelu_224", {}),
        ("vit_tiny_patch16_224", {"img_size": (64, 128)}),
        ("vit_tiny_patch16_224", {"img_size": (128, 64)}),
    ],
)
def test_timm(name: str, options: dict[str, Any], photo: Image.Image) -> None:
    net = timm.create_model(name, **SMALL, **options)
    config = resolve_data_config({}, model=net)
    size = options.get("img_size", config["input_size"][1:])
    config["input_size"] = (3, *((size, size) if isinstance(size, int) else size))
    for picture in (photo, photo.transpose(Image.Transpose.ROTATE_90)):
        same(Model(net), create_transform(**config)(picture), picture)
    assert Model(net).size == config["input_size"][1:]


def test_timm_at_its_own_size_needs_nothing_but_its_config(photo: Image.Image) -> None:
    net = timm.create_model("deit_tiny_patch16_224", **SMALL)
    same(Model(net), create_transform(**resolve_data_config(model=net))(photo), photo)


def hf_model(kind: str, head: str = "Model", **options: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**sizes, **options))


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("ViT", transformers.ViTImageProcessor()),
        ("CLIPVision", transformers.CLIPImageProcessor()),
        ("SiglipVision", transformers.SiglipImageProcessor()),
        ("DINOv3ViT", transformers.DINOv3ViTImageProcessor()),
        (  # as published: the class's own defaults are another model's
            "Dinov2",
            transformers.BitImageProcessor(
                size={"shortest_edge": 256}, crop_size=224, image_mean=IMAGENET[0], image_std=IMAGENET[1]
            ),
        ),
        (
            "Dinov2WithRegisters",
            transformers.BitImageProcessor(
                size={"shortest_edge": 256}, crop_size=224, image_mean=IMAGENET[0], image_std=IMAGENET[1]
            ),
        ),
    ],
)
def test_hugging_face_defaults(kind: str, processor: Any, photo: Image.Image) -> None:
    model = Model(hf_model(kind, image_size=224))
    theirs = processor(images=photo, return_tensors="pt")["pixel_values"][0]
    same(model, theirs, photo)
    same(Model(model.net, processor), theirs, photo)


@pytest.mark.parametrize("kind", ["ViT", "CLIPVision", "SiglipVision", "Dinov2", "DINOv3ViT"])
def test_hugging_face_at_another_size(kind: str, photo: Image.Image) -> None:
    net = hf_model(kind, image_size=64)
    usual = Model(hf_model(kind, image_size=224)).preprocess
    square, wide = Model(net).preprocess, huggingface.preprocess(net, (64, 128))
    assert square.size == (64, 64)
    assert wide.size == (64, 128)
    assert square.box(photo.size) == pytest.approx(usual.box(photo.size), rel=0.01, abs=3), "the same part of the photo"
    for other in (square, wide):
        assert other.mean == pytest.approx(usual.mean, abs=1e-6)
        assert other.std == pytest.approx(usual.std, abs=1e-6)
    lowest = wide(Image.new("RGB", (300, 300), "white"))
    assert lowest.min() > 0.9, "a square photo is not padded"


def test_hugging_face_reads_the_processor_beside_the_weights(tmp_path: Path, photo: Image.Image) -> None:
    hf_model("ViT", image_size=64).save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.1, 0.2, 0.3])
    processor.save_pretrained(tmp_path)
    model = Model(transformers.ViTModel.from_pretrained(tmp_path))
    same(model, processor(images=photo, return_tensors="pt")["pixel_values"][0], photo)
    assert huggingface.preprocess(model.net, (96, 96)).mean == pytest.approx([0.1, 0.2, 0.3])


def test_hugging_face_processor_of_images_and_text(photo: Image.Image) -> None:
    class Both:
        image_processor = transformers.CLIPImageProcessor()

    theirs = Both.image_processor(images=photo, return_tensors="pt")["pixel_values"][0]
    assert off(adapt(Both())(photo), theirs) <= ROUNDING


@pytest.mark.parametrize("name", ["ViT_B_16_Weights.IMAGENET1K_V1", "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1"])
def test_torchvision(name: str, photo: Image.Image) -> None:
    transform = torchvision.models.get_weight(name).transforms()
    same(Model(zoo.network("torchvision ViT"), transform), transform(photo), photo)


def test_open_clip(photo: Image.Image) -> None:
    config = {"size": (128, 128), "mean": HALF[0], "std": HALF[1], "interpolation": "bilinear", "resize_mode": "squash"}
    for given in ({}, config):
        net = zoo.ZOO["open_clip ViT-B-32"].make()
        if given:
            open_clip.factory.set_model_preprocess_cfg(net, given)
        wanted = open_clip.transform.PreprocessCfg(**{**given, "size": (128, 128)})
        theirs = open_clip.transform.image_transform_v2(wanted, is_train=False)
        same(Model(net), theirs(photo), photo)
        same(Model(net, theirs), theirs(photo), photo)


def test_a_plain_module_gets_imagenet_colours(photo: Image.Image) -> None:
    model = Model(zoo.network("hand-written"))
    theirs = transforms_imagenet_eval(224, crop_pct=1.0, interpolation="bicubic", mean=IMAGENET[0], std=IMAGENET[1])
    same(model, theirs(photo), photo)


# ---------------------------------------------------------------------------------- which part is seen: the box


def crop(size: int, share: float = 1.0) -> Callable[[Image.Image], torch.Tensor]:
    steps = [
        v2.Resize(round(size / share)),
        v2.CenterCrop(size),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
    ]
    return v2.Compose([*steps, v2.Normalize(*IMAGENET)])


def squash(size: int) -> Callable[[Image.Image], torch.Tensor]:
    return v2.Compose([v2.Resize((size, size)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])


def letterbox(size: int) -> Callable[[Image.Image], torch.Tensor]:
    """The whole photo, black bars around it, and colours that no attribute tells."""

    def transform(image: Image.Image) -> torch.Tensor:
        scale = size / max(image.size)
        small = image.resize((round(image.width * scale), round(image.height * scale)))
        paper = Image.new("RGB", (size, size))
        paper.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
        return torch.from_numpy(np.asarray(paper).copy()).permute(2, 0, 1).float() / 127.5 - 1

    return transform


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (3000, 700), (64, 64), (225, 224)])
@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (crop(224), lambda w, h: ((w - min(w, h)) / 2, (h - min(w, h)) / 2, (w + min(w, h)) / 2, (h + min(w, h)) / 2)),
        (
            crop(224, 0.9),
            lambda w, h: tuple((s + sign * 0.9 * min(w, h)) / 2 for sign in (-1, 1) for s in (w, h)),
        ),
        (squash(224), lambda w, h: (0, 0, w, h)),
        (
            letterbox(224),
            lambda w, h: tuple((s + sign * max(w, h)) / 2 for sign in (-1, 1) for s in (w, h)),
        ),
        (
            lambda image: crop(224)(image).half(),
            lambda w, h: tuple((s + t * min(w, h)) / 2 for t in (-1, 1) for s in (w, h)),
        ),
    ],
    ids=["crop", "crop 0.9", "squash", "letterbox", "half precision"],
)
def test_box(transform: Any, expected: Any, size: tuple[int, int]) -> None:
    """Left, top, right and bottom within 1 % of the photo's sides (the transforms themselves round to pixels)."""
    found = adapt(transform).box(size)
    for ours, theirs, side in zip(found, expected(*size), size * 2, strict=True):
        assert ours == pytest.approx(theirs, abs=0.01 * max(side, max(size) / 2))


@pytest.mark.parametrize("share", [1.0, 0.9, 0.875])
def test_box_of_timm_non_square(share: float) -> None:
    """A 400×400 photo for a model of 64×128: the full width, half the height."""
    left, top, right, bottom = cropped((64, 128), *IMAGENET, crop=share).box((400, 400))
    assert right - left == pytest.approx(400 * share, rel=0.02)
    assert bottom - top == pytest.approx(200 * share, rel=0.02)
    assert (left + right) / 2 == pytest.approx(200, abs=4)
    assert (top + bottom) / 2 == pytest.approx(200, abs=4)


@pytest.mark.parametrize(
    "transform",
    [
        v2.Compose([v2.RandomHorizontalFlip(1.0), squash(64)]),
        v2.Compose([squash(64), v2.Lambda(lambda x: x * 0)]),
        v2.Compose([squash(64), v2.Lambda(lambda x: x / (x.amax((1, 2), keepdim=True) + 0.1))]),
    ],
    ids=["mirrored", "blank", "scaled by picture"],
)
def test_box_of_what_cannot_be_read_is_the_whole_photo(transform: Any) -> None:
    assert adapt(transform).box((300, 200)) == (0.0, 0.0, 300.0, 200.0)


def test_box_is_found_once(photo: Image.Image) -> None:
    calls = []
    counted = adapt(lambda image: calls.append(1) or crop(64)(image))
    counted.view(photo)
    before = len(calls)
    counted.view(photo)
    assert len(calls) == before


def test_view_is_that_part_of_the_photo(photo: Image.Image) -> None:
    view = adapt(crop(224)).view(photo)
    assert view.size == pytest.approx((300, 300), abs=1)
    expected = np.asarray(photo.resize(view.size, box=(75.5, 0, 375.5, 300))).astype(int)
    assert np.abs(np.asarray(view).astype(int) - expected).mean() < 3, "at most half a pixel to the side"
    assert np.array_equal(np.asarray(adapt(squash(224)).view(photo)), np.asarray(photo))


def test_view_shows_what_the_model_sees(photo: Image.Image) -> None:
    """The view, shrunk to the model's size, is the model's input."""
    for transform in (crop(64, 0.8), squash(64), letterbox(64)):
        made = adapt(transform)
        seen = made.colours(made(photo))
        shown = np.asarray(made.view(photo).resize((64, 64), Image.Resampling.BOX)) / 255
        assert np.abs(seen - shown).mean() < 0.03


def test_view_of_a_padded_photo_has_its_bars(photo: Image.Image) -> None:
    view = adapt(letterbox(224)).view(photo)
    assert view.size == pytest.approx((451, 451), abs=4)
    assert (np.asarray(view)[:60] == 0).all()
    assert (np.asarray(view)[-60:] == 0).all()


def test_view_is_not_larger_than_needed(photo: Image.Image) -> None:
    large = photo.resize((3000, 2000))
    assert adapt(crop(64)).view(large, most=500).size == pytest.approx((500, 500), abs=2)


# ------------------------------------------------------------------------------------------------------ colours


@pytest.mark.parametrize("colours", [IMAGENET, CLIP, HALF], ids=["ImageNet", "CLIP", "half"])
def test_colours_undo_the_normalisation(colours: Any, photo: Image.Image) -> None:
    steps = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*colours)])
    made = adapt(steps)
    assert np.allclose(made.colours(made(photo)), np.asarray(photo) / 255, atol=1e-5)
    assert made.mean == pytest.approx(colours[0], abs=1e-5)
    assert made.std == pytest.approx(colours[1], abs=1e-5)


def test_colours_of_a_transform_that_tells_nothing(photo: Image.Image) -> None:
    """Where no attribute says mean and std, black and white do."""

    def transform(image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).double() * 3 + 7

    made = adapt(transform)
    assert np.allclose(made.colours(made(photo)), np.asarray(photo) / 255, atol=1e-5)


def test_a_processor_that_does_not_normalise_is_believed_by_its_deeds(photo: Image.Image) -> None:
    processor = transformers.ViTImageProcessor(do_normalize=False, size={"height": 300, "width": 451})
    made = adapt(processor)
    assert np.allclose(made.colours(made(photo)), np.asarray(photo) / 255, atol=1e-5)


def test_unknown_colours_are_stretched() -> None:
    noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)) * 40
    rgb = Preprocess(lambda image: noise, *preprocess.UNKNOWN).colours(noise)
    assert rgb.shape == (8, 8, 3)
    assert (rgb.min(), rgb.max()) == pytest.approx((0, 1))


# --------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (np.zeros((3, 8, 8)), "a ndarray"),
        (torch.zeros(1, 8, 8), r"torch.float32 \[1, 8, 8\]"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "torch.uint8"),
        (torch.zeros(2, 3, 8, 8), r"torch.float32 \[2, 3, 8, 8\]"),
        (None, "a NoneType"),
    ],
)
def test_a_preprocessing_that_returns_something_else(result: Any, said: str) -> None:
    with pytest.raises(ModelError, match=rf"the preprocessing returns {said}.*float tensor \[3, H, W\]"):
        adapt(lambda image: result)


def test_a_preprocessing_may_return_a_batch_of_one(photo: Image.Image) -> None:
    assert off(adapt(lambda image: squash(64)(image)[None])(photo), squash(64)(photo)) <= ROUNDING


def test_what_is_no_preprocessing() -> None:
    with pytest.raises(ModelError, match="a dict is not a preprocessing"):
        adapt({"mean": 0.5})


@pytest.mark.parametrize("size", [(500, 375), (1920, 1080), (683, 1024)])
def test_the_box_is_found_to_a_fraction_of_a_pixel(size: tuple[int, int]) -> None:
    def crop(image: Image.Image) -> torch.Tensor:
        part = image.crop((101, 33, 101 + 448, 33 + 300)).resize((224, 150), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(part)).permute(2, 0, 1) / 255

    found = Preprocess(crop, (0, 0, 0), (1, 1, 1)).box((max(size[0], 600), max(size[1], 400)))
    assert found == pytest.approx((101, 33, 549, 333), abs=0.2)


# --------------------------------------------------------------------------------------------- the box from the steps


@pytest.mark.parametrize("size", [(341, 256), (256, 384), (64, 64), (500, 333), (90, 60)])
def test_the_box_of_usual_steps_is_where_the_pixels_are(size: tuple[int, int]) -> None:
    """Beside what colour ramps tell, which are right to a fraction of a pixel."""
    for steps in (cropped((64, 64), *IMAGENET), cropped((64, 64), *IMAGENET, crop=0.9)):
        known = known_box(steps.transform, size)
        assert known is not None and known == steps.box(size)
        assert known == pytest.approx(find_box(steps, size), abs=0.005 * max(size))


def test_steps_that_are_not_usual_are_measured() -> None:
    usual = cropped((64, 64), *IMAGENET).transform
    assert known_box(lambda image: usual(image), (90, 60)) is None
    mirrored = transforms.Compose([*usual.transforms, transforms.RandomHorizontalFlip(1.0)])
    padded = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(64), transforms.ToTensor()])
    assert known_box(mirrored, (90, 60)) is None and known_box(padded, (90, 60)) is None
    squeezed = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    assert known_box(squeezed, (90, 60)) == (0.0, 0.0, 90.0, 60.0)


# ------------------------------------------------------------------------------------- the numbers of the usual steps


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("to_tensor", ["torchvision", "timm"])
def test_usual_steps_give_the_numbers_of_torchvision_exactly(to_tensor: str, mode: str) -> None:
    channels = Image.new(mode, (1, 1)).getbands()
    colours = (0.485, 0.456, 0.406, 0.5)[: len(channels)], (0.229, 0.224, 0.225, 0.25)[: len(channels)]
    whole = transforms.ToTensor() if to_tensor == "torchvision" else MaybeToTensor()
    steps = transforms.Compose([transforms.Resize(48), whole, transforms.Normalize(*colours)])
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, len(channels)), np.uint8).squeeze()
    image = Image.fromarray(pixels, mode)
    found = applied(steps, image)
    assert torch.equal(found, steps(image)) and found.is_contiguous() and found.dtype == torch.float32


def test_one_mean_for_all_channels() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    for one in (0.5, [0.5], torch.full((3, 1, 1), 0.5)):
        steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(one, one)])
        assert torch.equal(applied(steps, image), steps(image))


def test_steps_that_are_not_usual_are_called() -> None:
    class Darker(transforms.Normalize):
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return 0.5 * torch.as_tensor(super().forward(tensor))

    class Twice(transforms.Compose):
        def __call__(self, img: Any) -> Any:
            return 2 * super().__call__(img)

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    usual = [transforms.ToTensor(), transforms.Normalize(*IMAGENET)]
    for steps in (transforms.Compose([usual[0], Darker(*IMAGENET)]), Twice(usual), transforms.Compose(usual[:1])):
        assert torch.equal(applied(steps, image), steps(image))
    with pytest.raises(ValueError, match="division by zero"):
        applied(transforms.Compose([usual[0], transforms.Normalize(IMAGENET[0], (0.0, 1.0, 1.0))]), image)
