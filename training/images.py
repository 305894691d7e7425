"""Images for training and evaluation: found, decoded, held as uint8 tensors, augmented.

Axes: B images, P patches.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}

Draw = Callable[..., Tensor]  # uniform random numbers in 0…1 of a given shape


class UsageError(Exception):
    """A mistake that the user can correct; shown in one line, exit code 2."""


def usable(device: str) -> torch.device:
    """A device by its name, tried."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # what torch raises
        raise UsageError(f"cannot use the device {device}: {str(error).splitlines()[0]}") from error


# ------------------------------------------------------------------------------------------------------ files


def find_images(folder: Path) -> list[Path]:
    """All images below a folder, in a fixed order."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise UsageError(f"no images under {folder} (looked for {', '.join(sorted(SUFFIXES))})")
    return files


def centre_square(image: Image.Image, short: int, side: int, filtering: Image.Resampling) -> Image.Image:
    """Resize the short side to `short` pixels and cut out the central square of `side` pixels, as timm does."""
    width, height = (int(short * length / min(image.size)) for length in image.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.resize((width, height), filtering).crop((left, top, left + side, top + side))


def decode(path: Path, short: int, side: int) -> Tensor | None:
    """The central square of an image as uint8 [3 side side], or None if the file cannot be read."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises
        return None
    square = centre_square(image, short, side, Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square, np.uint8)).permute(2, 0, 1)


def load_images(paths: Sequence[Path], short: int, side: int) -> tuple[Tensor, list[Path]]:
    """The readable images as one uint8 tensor [B 3 side side], and the files that cannot be read."""
    images = torch.empty(len(paths), 3, side, side, dtype=torch.uint8)

    def put(number: int) -> bool:
        square = decode(paths[number], short, side)
        if square is not None:
            images[number] = square
        return square is not None

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes and resizes without the interpreter lock
        readable = list(pool.map(put, range(len(paths))))
    unreadable = [path for path, ok in zip(paths, readable, strict=True) if not ok]
    return images[torch.tensor(readable)] if unreadable else images, unreadable


# --------------------------------------------------------------------------------------------- labelled images


@dataclass(frozen=True)
class Labelled:
    names: list[str]
    images: Tensor  # uint8 [B 3 side side]
    classes: Tensor  # int64 [B]


def load_labelled(folder: Path, labels: Path, short: int, side: int) -> Labelled:
    """The images named in a CSV file with the columns `name` (with or without suffix) and `imagenet_index`."""
    files = {key: path for path in find_images(folder) for key in (path.name, path.stem)}
    try:
        with labels.open(newline="", encoding="utf-8") as lines:
            rows = [(row["name"], int(row["imagenet_index"])) for row in csv.DictReader(lines)]
    except OSError as error:
        raise UsageError(f"cannot read {labels}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{labels} needs the columns name and imagenet_index (a number)") from error
    if not rows:
        raise UsageError(f"{labels} names no images")
    names = [name for name, _ in rows]
    if missing := [name for name in names if name not in files]:
        raise UsageError(f"{labels} names {missing[0]}, which is not under {folder}")
    images, unreadable = load_images([files[name] for name in names], short, side)
    if unreadable:
        raise UsageError(f"cannot read {unreadable[0]}")
    return Labelled(names, images, torch.tensor([index for _, index in rows]))


def load_masks(folder: Path, names: Sequence[str], short: int, side: int, grid: int) -> Tensor:
    """How much of each patch the object covers, 0…1 [B P], from masks with the images' names that are 255 on it."""
    files = {path.stem: path for path in find_images(folder)}
    masks = []
    for name in names:
        if Path(name).stem not in files:
            raise UsageError(f"no mask for {name} in {folder}")
        with Image.open(files[Path(name).stem]) as file:
            square = centre_square(file.convert("L"), short, side, Image.Resampling.NEAREST)
        masks.append(torch.from_numpy(np.array(square) > 127).float())
    return F.avg_pool2d(torch.stack(masks), side // grid).flatten(1)


# ----------------------------------------------------------------------------------------------------- inputs


def normalise(images: Tensor) -> Tensor:
    """From 0…1 to the range on which the networks were trained."""
    mean = torch.tensor(MEAN, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    return (images - mean) / std


def inputs(images: Tensor, side: int) -> Tensor:
    """uint8 squares [B 3 s s] as inputs [B 3 side side], whole and not augmented."""
    pixels = images.float() / 255
    if pixels.shape[-1] != side:
        pixels = F.interpolate(pixels, (side, side), mode="bilinear")
    return normalise(pixels)


def random_crops(images: Tensor, side: int, draw: Draw) -> Tensor:
    """Crops of 25 to 100 % of the area, half of them mirrored: [B 3 s s] -> [B 3 side side]."""
    count = len(images)
    area = 0.25 + 0.75 * draw(count)
    aspect = torch.exp((2 * draw(count) - 1) * math.log(4 / 3))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where(draw(count) < 0.5, -1.0, 1.0)
    window = torch.zeros(count, 2, 3, device=images.device)  # affine map from crop to image
    window[:, 0, 0], window[:, 0, 2] = width * mirror, (2 * draw(count) - 1) * (1 - width)
    window[:, 1, 1], window[:, 1, 2] = height, (2 * draw(count) - 1) * (1 - height)
    grid = F.affine_grid(window, [count, 3, side, side], align_corners=False).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def random_colours(images: Tensor, draw: Draw) -> Tensor:
    """Random contrast and brightness (± 20 %) and saturation (± 30 %)."""

    def factor(strength: float) -> Tensor:
        return (1 + (2 * draw(len(images), 1, 1, 1) - 1) * strength).to(images.dtype)

    mean = images.mean((1, 2, 3), keepdim=True)
    images = ((images - mean) * factor(0.2) + mean) * factor(0.2)
    grey = images.mean(1, keepdim=True)
    return ((images - grey) * factor(0.3) + grey).clamp(0, 1)


def mixup(images: Tensor, draw: Draw) -> Tensor:
    """Blend 40 % of the images with another one of the batch; the teacher sees the blend as well."""
    share = torch.where(draw(len(images), 1, 1, 1) < 0.6, 1.0, draw(len(images), 1, 1, 1)).to(images.dtype)
    return images * share + images.flip(0) * (1 - share)


def augment(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """uint8 squares [B 3 s s] to training inputs [B 3 side side]; in half precision on a GPU."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, device=images.device, generator=generator)

    pixels = images.to(torch.float16 if images.is_cuda else torch.float32) / 255
    return mixup(normalise(random_colours(random_crops(pixels, side, draw), draw)), draw)


def random_patches(count: int, patches: int, kept: int, generator: torch.Generator) -> Tensor:
    """For each image the indices of the `kept` patches that stay [B kept]."""
    order = torch.rand(count, patches, device=generator.device, generator=generator).argsort(1)
    return order[:, :kept].contiguous()
