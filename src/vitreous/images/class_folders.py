"""Images in one sub-folder per class, read by threads one batch ahead."""

from __future__ import annotations

import hashlib
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous._support.words import plain
from vitreous.errors import InputError, nearest
from vitreous.images import listing, pictures
from vitreous.images import preprocess as steps_of
from vitreous.images.bands import Bands
from vitreous.images.preprocess import BICUBIC, Preprocess

WORKERS = min(8, os.cpu_count() or 1)
AREA = (0.08, 1.0)  # share of the image that a random crop keeps
ASPECT = (3 / 4, 4 / 3)
TRIES = 10
REPORTS = frozenset({"findings.json", "latest.json", "leaderboard.json", "study.json"})
Made = Float[Tensor, "channels Y X"]
Make = Callable[[Image.Image | Bands, int], Made]  # turns an image and its number into a tensor


@dataclass(frozen=True)
class ImageFolder:
    """The files of every class, class by class."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: tuple[int, ...]
    note: str | None = None  # on results that were left out

    def by_class(self, numbers: Iterable[int]) -> dict[int, list[int]]:
        """These files, grouped by the number of their class."""
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(self.labels[number], []).append(number)
        return groups

    @property
    def digest(self) -> str:
        """A hash that changes whenever a file is added, removed or changed."""
        told = hashlib.sha256()
        for file in self.files:
            stat = file.stat()
            told.update(
                f"{file.relative_to(self.root)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "replace")
            )
        return told.hexdigest()[:16]


def open_folder(root: Path, known: Sequence[str] | None = None, limit: int | None = None) -> ImageFolder:
    """Read a folder with one sub-folder per class: two or more, sorted by name, or some of the `known` classes.

    `limit`: only the first N images of each class.
    """
    if not root.is_dir():
        raise InputError(f"{root}: {'is a file, not a folder' if root.exists() else 'no such folder'}")
    inside = {p.name: listing.below(p) for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")}
    left_out = listing.Listed([], [file for one in inside.values() for file in one.results])
    names = [name for name, one in inside.items() if one.files or not (one.results or holds_reports(root / name))]
    if not names:
        raise InputError(f"{root}: has no sub-folders; put the images of each class in a folder of its own")
    if known is None and len(names) == 1:
        raise InputError(f"{root}: has a single class, {names[0]}; a classifier needs two or more sub-folders")
    classes = tuple(names if known is None else known)
    number = {plain(name): i for i, name in enumerate(classes)} | {name: i for i, name in enumerate(classes)}
    for name in names:
        if name not in number and plain(name) not in number:
            raise InputError(f"{root / name}: the probe has no class of this name{nearest(name, classes)}")
    found = {name: inside[name].files[:limit] for name in names}
    empty = [name for name, files in found.items() if not files]
    if empty:
        some = ", ".join(empty[:5]) + (" …" if len(empty) > 5 else "")
        raise InputError(f"{root}: no images in the class folder{'s' if len(empty) > 1 else ''} {some}")
    pairs = [(file, number.get(name, number.get(plain(name), -1))) for name, files in found.items() for file in files]
    files, labels = tuple(file for file, _ in pairs), tuple(label for _, label in pairs)
    return ImageFolder(root, classes, files, labels, left_out.note)


def holds_reports(folder: Path) -> bool:
    """Whether a folder without images is one of results: of studies, leaderboards or concepts."""
    return any(file.name in REPORTS or file.suffix == ".safetensors" for file in folder.iterdir())


def split(folder: ImageFolder, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split into files for training and for validation: the same share of every class, but never all of it."""
    learn: list[int] = []
    check: list[int] = []
    for number, files in folder.by_class(range(len(folder.files))).items():
        random.Random(f"split {seed} {folder.classes[number]}").shuffle(files)
        kept = min(max(1, round(share * len(files))), len(files) - 1)
        check += files[:kept]
        learn += files[kept:]
    if not check:
        raise InputError(f"{folder.root}: every class has a single image; validation needs two or more")
    return learn, check


class Reader:
    """Reads images of a folder by their numbers. Unreadable ones are left out, with the reason in `skipped`."""

    def __init__(self, folder: ImageFolder, channels: int = 3) -> None:
        self.folder, self.channels = folder, channels
        self.skipped: dict[int, str] = {}
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="vitreous-read")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, make: Make, number: int) -> Made | str:
        """The tensor made of an image, or why it cannot be read."""
        if number in self.skipped:
            return self.skipped[number]
        try:
            image = pictures.open_file(self.folder.files[number], self.channels).image
        except InputError as error:
            return str(error)
        return make(image, number)

    def batches(self, groups: Iterable[list[int]], make: Make) -> Iterator[tuple[list[int], Tensor | None]]:
        """Numbers and tensor of the readable images of each group (None if there are none), read one group ahead."""
        begun: deque[tuple[list[int], list[Future[Tensor | str]]]] = deque()
        for group in groups:
            begun.append((group, [self._pool.submit(partial(self.read, make), number) for number in group]))
            if len(begun) > 1:
                yield self._gather(*begun.popleft())
        while begun:
            yield self._gather(*begun.popleft())

    def _gather(self, group: list[int], begun: list[Future[Tensor | str]]) -> tuple[list[int], Tensor | None]:
        made: dict[int, Tensor] = {}
        for number, future in zip(group, begun):
            result = future.result()
            if isinstance(result, str):
                self.skipped[number] = result
            else:
                made[number] = result
        sizes = sorted({tuple(x.shape[1:]) for x in made.values()})
        if len(sizes) > 1:
            raise InputError(f"preprocessing gives these images different sizes: {sizes[:5]}")
        return list(made), torch.stack(list(made.values())) if made else None

    def reasons(self) -> dict[str, str]:
        """Why images were left out, by file."""
        return {str(self.folder.files[number]): why for number, why in sorted(self.skipped.items())}

    def why_none(self, numbers: list[int]) -> str | None:
        """Why the first of these images cannot be read, if none of them can."""
        why = None
        for number in numbers:
            try:
                pictures.open_file(self.folder.files[number], self.channels)
                return None
            except InputError as error:
                why = why or str(error)
        return why

    def check(self, learn: list[int], check: list[int]) -> None:
        """Raise unless every class has a readable image to train on, and validation has at least one."""
        groups = self.folder.by_class(learn)
        for label, why in zip(groups, self._pool.map(self.why_none, groups.values())):
            if why is not None:
                raise InputError(f"no training image of class {self.folder.classes[label]} can be read: {why}")
        why = self.why_none(check)
        if why is not None:
            raise InputError(f"no validation image can be read: {why}")


# -------------------------------------------------------------------------------------------------------- augmentation


def augmentation(steps: Preprocess, seed: int, epoch: int) -> Make:
    """Random crops in the model's size and colours, half of them mirrored; another for each image and epoch."""

    def make(image: Image.Image | Bands, number: int) -> Made:
        chance = random.Random(f"crop {seed} {epoch} {number}")
        high, wide = steps.size
        image = image.resize((wide, high), BICUBIC, box=random_box(*image.size, chance))
        if chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return normalised(image, steps)

    return make


def random_box(wide: int, high: int, chance: random.Random) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a box of random area and aspect ratio; the centre if none fits."""
    for _ in range(TRIES):
        area = wide * high * chance.uniform(*AREA)
        aspect = np.exp(chance.uniform(*np.log(ASPECT)))
        w, h = float((area * aspect) ** 0.5), float((area / aspect) ** 0.5)
        if 1 <= w <= wide and 1 <= h <= high:
            left, top = chance.uniform(0, wide - w), chance.uniform(0, high - h)
            return left, top, left + w, top + h
    w, h = min(wide, high * ASPECT[1]), min(high, wide / ASPECT[0])
    return (wide - w) / 2, (high - h) / 2, (wide + w) / 2, (high + h) / 2


def normalised(image: Image.Image | Bands, steps: Preprocess) -> Made:
    """Normalise an image of the right size; run the whole preprocessing if its colours are unknown."""
    mean, std = tuple(steps.mean), tuple(steps.std)
    if not any(mean) and set(std) == {1}:
        return steps(image)
    if isinstance(image, Bands):
        return steps_of.normalised(image, mean, std)
    x = torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)  # [3 Y X]
    mean_, std_ = (torch.tensor(c, dtype=torch.float32)[:, None, None] for c in (mean, std))
    return (x - mean_) / std_
