"""Where the object is: masks and boxes in pixels of the image, cropped and scaled to the model's input."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image, ImageOps
from torch import Tensor

from vitreous.errors import InputError, one_line
from vitreous.images import pictures
from vitreous.images.bands import ARRAYS, MOST_PIXELS, read_array
from vitreous.images.preprocess import Box, Preprocess

Mask = Bool[Tensor, "Y X"]
Drawn = Bool[np.ndarray, "rows columns"]
ASPECT = 0.02  # a mask and its image may differ by this much in aspect ratio
LOSSY = ("JPEG", "MPO")  # compression blurs black and white
TAKES = "give a file, an array [Y, X] or a box (left, top, right, bottom)"


def list_masks(given: Any, count: int) -> list[Any]:
    """One mask per image; None for an image without a mask."""
    one = isinstance(given, str | Path | Image.Image | pictures.Stored) or is_box(given)
    if isinstance(given, Tensor | np.ndarray):
        one |= given.ndim == 2 and tuple(given.shape) != (count, 4)
    if not one and not isinstance(given, Sequence | Tensor | np.ndarray):
        raise InputError(f"a {type(given).__name__} is not a list of masks; for each image, {TAKES}")
    listed = [given] if one else list(given)
    if len(listed) != count:
        raise InputError(f"{len(listed)} masks for {count} images; give one per image, None for those without")
    return listed


def check_masks(given: Any, images: Any, channels: int = 3) -> list[Any]:
    """Read every mask once, so that an error is raised now and not after hours of work."""
    listed = list_masks(given, len(images))
    for i, mask in enumerate(listed):
        if mask is not None:
            draw(mask, images[i], i, channels)
    return listed


def read_masks(given: Any, images: Any, preprocess: Preprocess, size: tuple[int, int]) -> list[Mask | None]:
    """One mask per image (or None), as the model sees it; `size` is (height, width)."""
    listed = list_masks(given, len(images))
    return [read_mask(mask, images[i], preprocess, size, i) for i, mask in enumerate(listed)]


def read_mask(given: Any, image: Any, preprocess: Preprocess, size: tuple[int, int], number: int = 0) -> Mask | None:
    """Read a file, a PIL image, an array [Y X] or a box (left, top, right, bottom), as the model sees it."""
    if given is None:
        return None
    drawn, seen = draw(given, image, number, preprocess.channels)
    left, top, right, bottom = (0.0, 0.0, *seen) if is_ready(image) else preprocess.box(seen)
    across, down = drawn.shape[1] / seen[0], drawn.shape[0] / seen[1]
    return cut(drawn, (left * across, top * down, right * across, bottom * down), size)


def draw(given: Any, image: Any, number: int, channels: int) -> tuple[Drawn, tuple[int, int]]:
    """A mask in its own resolution, and the (width, height) of its image."""
    seen = (image.shape[-1], image.shape[-2]) if is_ready(image) else pictures.read(image, number, channels).image.size
    drawn = draw_box(given, seen, number) if is_box(given) else open_mask(given, number)
    check_shape((drawn.shape[1], drawn.shape[0]), seen, number)
    return drawn, seen


def is_ready(image: Any) -> bool:
    """Is the image preprocessed already, and its mask with it?"""
    return isinstance(image, Tensor) and image.is_floating_point()


def check_shape(mask: tuple[int, int], seen: tuple[int, int], number: int) -> None:
    """Raise unless mask and image have the same aspect ratio."""
    high = mask[0] * seen[1] / seen[0]  # height of a mask of this width
    if abs(mask[1] / high - 1) <= ASPECT or abs(mask[1] - high) <= 1:
        return
    turned = mask == seen[::-1]
    remedy = "rotate it as the EXIF data of the image say" if turned else "give a mask of the image's size or shape"
    raise InputError(
        f"mask {number} is {mask[0]}×{mask[1]} and its image {seen[0]}×{seen[1]}: not the same image; {remedy}"
    )


def cut(drawn: Drawn, part: Box, size: tuple[int, int]) -> Mask:
    """A part of a mask at this (height, width): true where half of a pixel is object; false outside the image."""
    (high, wide), (left, top, right, bottom) = drawn.shape, part
    beyond = [max(0, math.ceil(side)) for side in (-left, -top, right - wide, bottom - high)]
    canvas = ImageOps.expand(Image.fromarray(drawn.astype(np.uint8) * 255), tuple(beyond))
    seen = left + beyond[0], top + beyond[1], right + beyond[0], bottom + beyond[1]
    shown = canvas.resize((size[1], size[0]), Image.Resampling.BOX, box=seen)
    return torch.from_numpy(np.array(shown) >= 128)


# ------------------------------------------------------------------------------------------------------------- reading


def is_box(given: Any) -> bool:
    """Is it four numbers?"""
    if isinstance(given, Tensor | np.ndarray):
        return tuple(given.shape) == (4,)
    return isinstance(given, list | tuple) and len(given) == 4 and all(isinstance(x, int | float) for x in given)


def draw_box(given: Any, seen: tuple[int, int], number: int) -> Drawn:
    left, top, right, bottom = box = [float(side) for side in given]
    if not (left < right and top < bottom and left < seen[0] and top < seen[1] and right > 0 and bottom > 0):
        raise InputError(f"box {number}, {box}, is not (left, top, right, bottom) in an image of {seen[0]}×{seen[1]}")
    drawn = np.zeros((seen[1], seen[0]), dtype=np.bool_)
    right, bottom = min(right, seen[0]), min(bottom, seen[1])
    drawn[max(0, math.floor(top)) : math.ceil(bottom), max(0, math.floor(left)) : math.ceil(right)] = True
    return drawn


def open_mask(given: Any, number: int) -> Drawn:
    """True where the object is."""
    if not isinstance(given, str | Path | Image.Image | pictures.Stored):
        return from_array(given, number)
    name = f"mask {number}" if isinstance(given, Image.Image) else given
    try:
        if isinstance(given, Image.Image):
            return from_image(given)
        if isinstance(given, str | Path) and Path(given).suffix.lower() in ARRAYS:
            ending = Path(given).suffix.lower()
            return from_array(read_array(Path(given), ending, str(given), MOST_PIXELS), number)
        return from_file(io.BytesIO(given.read_bytes()) if isinstance(given, pictures.Stored) else given, str(name))
    except FileNotFoundError:
        raise InputError(f"{name}: no such mask") from None
    except InputError:
        raise
    except Exception as error:  # Pillow's readers raise all kinds of errors
        raise InputError(f"{name}: cannot be read as a mask ({one_line(error, 100)})") from None


def from_file(opened: str | Path | io.BytesIO, name: str) -> Drawn:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of damaged files
        with Image.open(opened) as image:
            if image.width * image.height > MOST_PIXELS:
                most = MOST_PIXELS // 10**6
                raise InputError(
                    f"{name}: {image.width}×{image.height} is more than {most} megapixels; shrink it first"
                )
            return from_image(image)


def from_array(given: Any, number: int) -> Drawn:
    """Non-zero values are the object; of floats, those above 0.5."""
    array = pictures.as_array(given)
    while array is not None and array.ndim > 2 and 1 in (array.shape[0], array.shape[-1]):
        array = array[0] if array.shape[0] == 1 else array[..., 0]
    if array is None or array.ndim != 2 or array.size == 0 or array.dtype.kind not in "biuf":
        said = f"a {type(given).__name__}" if array is None else f"an array of {array.dtype} {list(array.shape)}"
        raise InputError(f"mask {number}: {said} is not a mask; {TAKES}")
    return array > 0.5 if array.dtype.kind == "f" else array != 0


def from_image(image: Image.Image) -> Drawn:
    """What is not black, or not transparent, is the object; in a palette without black, all but the first colour."""
    least = 127 if image.format in LOSSY else 0
    image = ImageOps.exif_transpose(image)
    if "A" in image.getbands() or "transparency" in image.info:
        alpha = np.asarray(image.convert("RGBA"))[:, :, 3]
        if alpha.min() < alpha.max():
            return alpha > 0
    if image.mode in ("1", "L", "I", "F") or image.mode.startswith("I;"):
        values = np.asarray(image)
        return values > (0.5 if image.mode == "F" else least)
    coloured: Drawn = np.asarray(image.convert("RGB")).max(2) > least
    return np.asarray(image) != 0 if image.mode == "P" and coloured.all() else coloured
