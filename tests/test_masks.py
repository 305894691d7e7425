"""Masks and boxes land where the picture's own pixels land, however they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from PIL import Image
from torchvision.transforms import v2

import vitreous
from vitreous import Model
from vitreous.errors import InputError
from vitreous.images import pictures, preprocess
from vitreous.images.masks import check_masks, list_masks, read_mask, read_masks
from vitreous.images.preprocess import Preprocess
from vitreous.models.libraries import cropped

SIZE = (64, 64)
STRETCH = preprocess.adapt(v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Resize(SIZE)]))
DRAWN = np.zeros((48, 48), dtype=bool)
DRAWN[6:18, 24:42] = True


def centre_crop(side: int, crop: float) -> Preprocess:
    return cropped((side, side), *preprocess.IMAGENET, crop=crop)


def letterbox(image: Image.Image) -> torch.Tensor:
    """Shrunk to fit, grey bars where it does not fill the square."""
    scale = 64 / max(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (64, 64), (110, 110, 110))
    square.paste(small, ((64 - small.width) // 2, (64 - small.height) // 2))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255


def picture(wide: int, high: int, box: tuple[int, int, int, int]) -> tuple[Image.Image, np.ndarray]:
    """A white object on black, and where it is."""
    drawn = np.zeros((high, wide), dtype=bool)
    drawn[box[1] : box[3], box[0] : box[2]] = True
    drawn[box[1] : (box[1] + box[3]) // 2, box[0] : (box[0] + box[2]) // 2] = False  # so that no flip goes unseen
    return Image.fromarray(drawn.astype(np.uint8) * 255).convert("RGB"), drawn


def iou(one: Any, other: Any) -> float:
    one, other = np.asarray(one), np.asarray(other)
    return float((one & other).sum() / (one | other).sum())


# --------------------------------------------------------------------------------------------- where the pixels land


WAYS = {
    "crop": centre_crop(64, 0.875),
    "crop, large": centre_crop(224, 0.9),
    "stretch": STRETCH,
    "letterbox": preprocess.adapt(letterbox),
}
SHAPES = [
    (200, 200, (40, 60, 150, 170)),
    (320, 180, (120, 30, 250, 160)),
    (180, 320, (20, 100, 120, 230)),
    (90, 60, (10, 5, 70, 50)),  # smaller than what the model sees
    (1300, 900, (300, 100, 1290, 800)),  # much larger, and the object is cropped
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("wide", "high", "box"), SHAPES)
def test_masks_land_where_the_picture_does(way: str, wide: int, high: int, box: tuple[int, int, int, int]) -> None:
    image, drawn = picture(wide, high, box)
    seen = WAYS[way](image)
    white = WAYS[way].colours(seen).mean(2) > 0.5
    found = read_mask(drawn, image, WAYS[way], (seen.shape[1], seen.shape[2]))
    assert found is not None and found.dtype == torch.bool and found.shape == seen.shape[1:]
    assert iou(found, white) > 0.97


@pytest.mark.parametrize("way", WAYS)
def test_boxes_land_where_masks_do(way: str) -> None:
    image = Image.new("RGB", (300, 200))
    drawn = np.zeros((200, 300), dtype=bool)
    drawn[50:160, 80:210] = True
    mask = read_mask(drawn, image, WAYS[way], SIZE)
    for box in [
        (80, 50, 210, 160),
        [80.0, 50.0, 210.0, 160.0],
        np.array([80, 50, 210, 160]),
        torch.tensor([80.0, 50, 210, 160]),
    ]:
        found = read_mask(box, image, WAYS[way], SIZE)
        assert found is not None and mask is not None and torch.equal(found, mask)


def test_what_lies_beyond_the_picture_is_not_the_object() -> None:
    image = Image.new("RGB", (200, 100))
    found = read_mask(np.ones((100, 200)), image, WAYS["letterbox"], SIZE)
    assert found is not None
    assert found[18:46].all() and not found[:15].any() and not found[49:].any()


def test_a_mask_of_another_resolution() -> None:
    image, drawn = picture(400, 300, (120, 60, 300, 240))
    whole = read_mask(drawn, image, WAYS["crop"], SIZE)
    for size in ((800, 600), (200, 150), (201, 150), (100, 75)):
        other = np.asarray(Image.fromarray(drawn).resize(size, Image.Resampling.NEAREST))
        assert iou(read_mask(other, image, WAYS["crop"], SIZE), whole) > 0.93
    assert read_mask(np.ones((11, 14)), image, WAYS["crop"], SIZE) is not None, "off by less than one pixel"


@pytest.mark.parametrize("size", [(300, 300), (300, 200), (400, 320)])
def test_a_mask_of_another_shape_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"mask 7 is \d+×\d+ and its image 400×300: not the same image; give"):
        read_mask(np.ones(size[::-1]), Image.new("RGB", (400, 300)), STRETCH, SIZE, 7)


def test_a_preprocessed_image_has_its_mask_in_the_same_pixels() -> None:
    x = torch.zeros(3, 64, 64)
    drawn = np.zeros((64, 64), dtype=bool)
    drawn[3:40, 50:64] = True
    found = read_mask(drawn, x, WAYS["crop"], SIZE)
    assert found is not None and np.array_equal(found, drawn), "not cropped once more"
    coarse = read_mask(np.array([[0, 1], [0, 0]]), x, WAYS["crop"], SIZE)
    assert coarse is not None and coarse[:31, 33:].all() and not coarse[:, :31].any() and not coarse[33:].any()
    box = read_mask((50, 3, 64, 40), x, WAYS["crop"], SIZE)
    assert box is not None and np.array_equal(box, drawn)


# ------------------------------------------------------------------------------------------------------ how it is kept


def saved(path: Path, way: str) -> Path:
    """The same mask in a file, written this way."""
    levels, alpha = DRAWN.astype(np.uint8), DRAWN.astype(np.uint8) * 255
    if way == "palette":
        image = Image.fromarray(levels * 15).convert("P")
        image.putpalette([0, 0, 0] + [200, 30, 90] * 255)
    elif way == "palette, white first":
        image = Image.fromarray(1 - levels).convert("P")
        image.putpalette([255, 255, 255, 0, 0, 0])
    elif way == "palette without black":
        image = Image.fromarray(levels * 3).convert("P")
        image.putpalette([120, 60, 120] + [200, 30, 90] * 255)
    elif way == "alpha":
        image = Image.merge("RGBA", [Image.new("L", (48, 48), c) for c in (0, 9, 200)] + [Image.fromarray(alpha)])
    elif way == "opaque":
        image = Image.fromarray(alpha).convert("RGBA")
    elif way == "grey and alpha":
        image = Image.merge("LA", [Image.new("L", (48, 48), 255), Image.fromarray(alpha)])
    elif way == "dark blue":
        image = Image.fromarray(levels[:, :, None] * np.array([0, 0, 1], dtype=np.uint8))
    elif way == "16 bits":
        image = Image.fromarray(levels.astype(np.uint16) * 300)
    elif way == "one bit":
        image = Image.fromarray(DRAWN)
    else:
        image = Image.fromarray(levels * int(way.split()[-1]))
    file = path / ("mask.jpg" if way.startswith("jpeg") else "mask.png")
    image.save(file)
    return file


FILES = [
    *("0 and 255", "0 and 1", "0 and 17", "jpeg of 255", "palette", "palette, white first", "palette without black"),
    *("alpha", "opaque", "grey and alpha", "dark blue", "16 bits", "one bit"),
]


@pytest.mark.parametrize("way", FILES)
def test_files(way: str, tmp_path: Path) -> None:
    file, x = saved(tmp_path, way), torch.zeros(3, 48, 48)
    for given in (file, str(file), Image.open(file)):
        found = read_mask(given, x, STRETCH, (48, 48))
        assert found is not None and np.array_equal(found, DRAWN)


@pytest.mark.parametrize(
    "given",
    [
        DRAWN,
        DRAWN.astype(np.uint8),
        DRAWN.astype(np.int64) * 255,
        DRAWN.astype(np.float32) * 0.9 + 0.01,  # a probability
        DRAWN.tolist(),
        torch.from_numpy(DRAWN),
        torch.from_numpy(DRAWN).float()[None],  # [1 Y X]
        DRAWN[:, :, None],
        Image.fromarray(DRAWN),
    ],
    ids=("bool", "uint8", "int64", "float", "list", "tensor", "tensor [1 Y X]", "[Y X 1]", "picture"),
)
def test_arrays(given: Any) -> None:
    found = read_mask(given, torch.zeros(3, 48, 48), STRETCH, (48, 48))
    assert found is not None and np.array_equal(found, DRAWN)


def test_pictures_that_exif_turns(tmp_path: Path) -> None:
    """The picture is turned upright, so its mask is drawn upright, or carries the same EXIF data."""
    image, drawn = picture(120, 80, (10, 10, 60, 50))
    lying = image.transpose(Image.Transpose.ROTATE_90)  # orientation 6 turns it back
    exif = Image.Exif()
    exif[0x0112] = 6
    lying.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    white = WAYS["crop"].colours(WAYS["crop"](pictures.read(tmp_path / "photo.jpg").image)).mean(2) > 0.5
    found = read_mask(drawn, tmp_path / "photo.jpg", WAYS["crop"], SIZE)
    assert iou(found, white) > 0.95
    lying.save(tmp_path / "mask.png", exif=exif)
    turned = read_mask(tmp_path / "mask.png", tmp_path / "photo.jpg", WAYS["crop"], SIZE)
    assert iou(turned, white) > 0.95
    with pytest.raises(InputError, match=r"80×120 and its image 120×80: .* rotate it as the EXIF data"):
        read_mask(drawn.T, tmp_path / "photo.jpg", WAYS["crop"], SIZE)


# ---------------------------------------------------------------------------------------------------- what is not one


def test_none_and_empty() -> None:
    x = torch.zeros(2, 3, 48, 48)
    none, empty = read_masks([None, np.zeros((48, 48))], x, STRETCH, (48, 48))
    assert none is None
    assert empty is not None and not empty.any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.png", "nowhere.png: no such mask"),
        (Path("."), "cannot be read as a mask"),
        (np.zeros((4, 5, 6)), r"an array of float64 \[4, 5, 6\] is not a mask; give a file"),
        (np.zeros((0, 0)), "is not a mask"),
        (np.array([["a", "b"]]), "is not a mask"),
        (7, "mask 0: a int is not a mask"),
        ({}, "is not a mask"),
        ((30, 3, 20, 40), "is not \\(left, top, right, bottom\\) in an image of 48×48"),
        ((100, 3, 120, 40), "in an image of 48×48"),
        ((-9, 3, -2, 40), "in an image of 48×48"),
        ((float("nan"), 3, 20, 40), "in an image of 48×48"),
    ],
)
def test_errors(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        read_mask(given, torch.zeros(3, 48, 48), STRETCH, (48, 48))
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "mask.png").write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"mask\.png: cannot be read as a mask"):
        read_mask(tmp_path / "mask.png", torch.zeros(3, 48, 48), STRETCH, (48, 48))


def test_boxes_that_are_small_or_reach_out() -> None:
    x = torch.zeros(3, 48, 48)
    small = read_mask((10.2, 20.1, 10.4, 20.3), x, STRETCH, (48, 48))
    assert small is not None and small.nonzero().tolist() == [[20, 10]]
    out = read_mask((-5, -5, 10, 100), x, STRETCH, (48, 48))
    assert out is not None and out[:, :10].all() and not out[:, 10:].any()


# -------------------------------------------------------------------------------------------------- one for each image


@pytest.mark.parametrize(
    ("given", "count", "one"),
    [
        ("mask.png", 1, True),
        (Path("mask.png"), 1, True),
        (Image.new("L", (9, 9)), 1, True),
        (DRAWN, 1, True),
        (torch.from_numpy(DRAWN), 1, True),
        ((1, 2, 3, 4), 1, True),
        (np.array([1, 2, 3, 4]), 1, True),
        ([None], 1, False),
        ([(1, 2, 3, 4)], 1, False),
        (np.array([[1, 2, 3, 4]]), 1, False),
        (["a", "b", "c", "d"], 4, False),
        ([None] * 4, 4, False),
        ([(1, 2, 3, 4)] * 4, 4, False),
        (np.ones((4, 4)), 4, False),  # four boxes
        (torch.ones(2, 1, 9, 9), 2, False),
        (("a", None), 2, False),
    ],
)
def test_lists(given: Any, count: int, one: bool) -> None:
    listed = list_masks(given, count)
    assert len(listed) == count
    assert (listed[0] is given) == one
    assert len(list_masks(listed, count)) == count, "a list stays a list"


def test_one_for_each_image() -> None:
    with pytest.raises(InputError, match="2 masks for 3 images; give one per image, None for those without"):
        check_masks([None, None], torch.zeros(3, 3, 48, 48))
    with pytest.raises(InputError, match="a int is not a list of masks"):
        check_masks(3, torch.zeros(3, 3, 48, 48))
    with pytest.raises(InputError, match=r"mask 2: an array of float64 \[2, 3, 4\] is not a mask"):
        check_masks([None, DRAWN, np.zeros((2, 3, 4))], torch.zeros(3, 3, 48, 48))


@pytest.mark.parametrize("kind", [list, tuple, np.stack, torch.stack])
def test_masks_are_parted_with_their_images(kind: Any) -> None:
    """Whatever holds them, also when images are taken one at a time."""
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    masks = torch.zeros(3, 64, 64, dtype=torch.bool)
    for i in range(3):
        masks[i, 20 * i : 20 * i + 10] = True
    maps = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = [(one * mask).sum() / one.sum() for one, mask in zip(maps, masks)]
    given = kind([mask.numpy() if kind is np.stack else mask for mask in masks])
    assert np.allclose(vitreous.evaluate(model, x, maps, "energy_in_mask", 1, given).value, expected)
    with vitreous.limit_memory(1):
        assert np.allclose(vitreous.evaluate(model, x, maps, "energy_in_mask", 1, given).value, expected)
        lone = vitreous.evaluate(model, x[1], maps[1:2], "energy_in_mask", 1, masks[1])
    assert np.allclose(lone.value, expected[1:2])


def test_a_bad_mask_is_told_of_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = zoo.model("timm ViT"), zoo.images("timm ViT")
    monkeypatch.setattr(Model, "run", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(InputError, match="mask 2 is 9×64"):
        vitreous.evaluate(model, x, "gae", "mask_iou", 1, [None, None, np.ones((64, 9))])


def test_pictures_and_masks_from_files(tmp_path: Path, tiny: Model) -> None:
    image, drawn = picture(320, 200, (100, 40, 240, 180))
    image.save(tmp_path / "photo.png")
    Image.fromarray(drawn).save(tmp_path / "mask.png")
    seen = tiny.preprocess(image)
    maps = torch.from_numpy(tiny.preprocess.colours(seen).mean(2))[None].float()
    found = vitreous.evaluate(tiny, tmp_path / "photo.png", maps, "mask_iou", 0, tmp_path / "mask.png")
    assert found.value.item() > 0.97
