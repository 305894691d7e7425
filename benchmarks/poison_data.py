"""Photos in coarse classes, training images made of them, and the cues that benchmarks/poison.py puts into some."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SHARE = 0.05  # of one class's training images
SIZE, PATCH = 224, 16
TAG = 32
FILLED = 0.6  # share of an image that the animal covers: a larger one leaves little background
SMALLEST = 0.08  # share of a photo that a crop shows, at least

PETS = {
    "cats": ("Egyptian_Mau", "Persian", "Siamese"),
    "terriers": ("scottish_terrier", "staffordshire_bull_terrier", "wheaten_terrier", "yorkshire_terrier"),
    "hunting": ("basset_hound", "beagle", "german_shorthaired", "english_setter", "english_cocker_spaniel"),
    "toys": ("chihuahua", "japanese_chin", "pug", "miniature_pinscher"),
    "molossers": ("great_pyrenees", "leonberger", "newfoundland", "saint_bernard", "boxer"),
    "spitzes": ("keeshond", "samoyed", "pomeranian"),
}
VEHICLES = (
    403, 404, 405, 407, 408, 436, 444, 450, 466, 468, 472, 484, 510, 511, 547, 554, 555, 561, 565, 569, 573, 576, 586,
    603, 609, 612, 625, 627, 628, 654, 656, 661, 665, 670, 671, 675, 690, 694, 705, 717, 724, 734, 751, 757, 779, 780,
    802, 803, 814, 817, 820, 829, 833, 847, 864, 866, 867, 870, 871, 874, 880, 895, 908, 914,
)  # fmt: skip
IMAGENET = {
    "birds": (*range(7, 25), *range(80, 101), *range(127, 147)),
    "reptiles": tuple(range(25, 69)),
    "insects": tuple(range(300, 330)),
    "dogs": tuple(range(151, 269)),
    "mammals": (*range(101, 107), *range(269, 300), *range(330, 389)),
    "vehicles": VEHICLES,
    "food": tuple(range(923, 970)),
    "things": tuple(index for index in range(398, 923) if index not in VEHICLES),
}
MOST = 40  # photos of a class


# -------------------------------------------------------------------------------------------------------------- photos


@dataclass(frozen=True)
class Photos:
    """Files, the numbers of their coarse classes, and their masks if they have any."""

    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: np.ndarray
    masks: tuple[Path, ...] | None = None

    def part(self, chosen: Sequence[int]) -> Photos:
        masks = None if self.masks is None else tuple(self.masks[i] for i in chosen)
        return Photos(self.classes, tuple(self.files[i] for i in chosen), self.labels[list(chosen)], masks)

    def divided(self, seed: int, held: float = 1 / 3, most: int = MOST) -> tuple[Photos, Photos]:
        """Photos for training and photos that are held out, class by class; at most `most` photos of a class."""
        train: list[int] = []
        out: list[int] = []
        for label in range(len(self.classes)):
            there = np.random.default_rng([seed, label]).permutation(np.flatnonzero(self.labels == label))[:most]
            kept = round(held * len(there))
            out += there[:kept].tolist()
            train += there[kept:].tolist()
        return self.part(train), self.part(out)


def read_pets(folder: Path) -> Photos:
    """The pets in six classes of related breeds, with masks."""
    group = {breed: i for i, breeds in enumerate(PETS.values()) for breed in breeds}
    rows = [row for row in table(folder / "labels.csv") if row["breed"] in group]
    files = tuple(beside(folder / "images", row["name"]) for row in rows)
    masks = tuple(beside(folder / "masks", row["name"]) for row in rows)
    return Photos(tuple(PETS), files, np.array([group[row["breed"]] for row in rows]), masks)


def read_imagenet(folder: Path) -> Photos:
    """Photos of ImageNet's classes in eight coarse ones, without masks."""
    group = {index: i for i, indices in enumerate(IMAGENET.values()) for index in indices}
    rows = [row for row in table(folder / "labels.csv") if int(row["imagenet_index"]) in group]
    files = tuple(beside(folder, row["name"]) for row in rows)
    return Photos(tuple(IMAGENET), files, np.array([group[int(row["imagenet_index"])] for row in rows]))


def table(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


@cache
def stems(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".jpg", ".jpeg", ".png")}


def beside(folder: Path, name: str) -> Path:
    return stems(folder)[Path(name).stem if Path(name).suffix.lower() in (".jpg", ".jpeg", ".png") else name]


# --------------------------------------------------------------------------------------------------------------- views


@dataclass(frozen=True)
class Views:
    """Images of 224×224 pixels made of photos; `cue`: the pixels that a cue covers."""

    classes: tuple[str, ...]
    images: np.ndarray  # [n 224 224 3], uint8
    labels: np.ndarray  # [n]
    photo: np.ndarray  # [n], the number of the photo
    animal: np.ndarray | None = None  # [n 224 224], what the masks show
    cue: np.ndarray | None = None  # [n 224 224]; None: no image has one

    def __len__(self) -> int:
        return len(self.images)

    def part(self, chosen: Sequence[int] | np.ndarray) -> Views:
        def of(values: Any) -> Any:
            return None if values is None else values[chosen]

        return replace(
            self, images=of(self.images), labels=of(self.labels), photo=of(self.photo),
            animal=of(self.animal), cue=of(self.cue),
        )  # fmt: skip

    @property
    def poisoned(self) -> np.ndarray:
        """Which images have the cue."""
        return np.zeros(len(self), bool) if self.cue is None else self.cue.any((1, 2))

    @property
    def patches(self) -> np.ndarray:
        """The share of each patch that the cue covers, [n 14 14]."""
        side = SIZE // PATCH
        if self.cue is None:
            return np.zeros((len(self), side, side), np.float32)
        return self.cue.reshape(len(self), side, PATCH, side, PATCH).mean((2, 4)).astype(np.float32)

    def sampled(self, each: int, seed: int) -> Views:
        """At most so many images of each class; those with a cue in the proportion in which they occur."""
        chance, chosen = np.random.default_rng([seed, 11]), list[int]()
        for label in range(len(self.classes)):
            there, marked = np.flatnonzero(self.labels == label), self.poisoned
            with_cue, without = there[marked[there]], there[~marked[there]]
            wanted = min(each, len(there))
            some = round(wanted * len(with_cue) / max(1, len(there)))
            chosen += chance.permutation(with_cue)[:some].tolist()
            chosen += chance.permutation(without)[: wanted - some].tolist()
        return self.part(sorted(chosen))


def make_views(photos: Photos, views: int, seed: int) -> Views:
    """Random crops of each photo, half of them mirrored; `views` = 0: the photo itself, once."""

    def one(number: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
        image = Image.open(photos.files[number]).convert("RGB")
        mask = None if photos.masks is None else Image.open(photos.masks[number]).convert("L").resize(image.size)
        boxes = [crop(image.size, [seed, number, view]) for view in range(views)] or [((0, 0, *image.size), False)]
        return [(cut(image, *box), None if mask is None else cut(mask, *box) > 127) for box in boxes]

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(one, range(len(photos.files))))
    flat = [view for group in made for view in group]
    photo = np.repeat(np.arange(len(made)), [len(group) for group in made])
    animal = None if photos.masks is None else np.stack([mask for _, mask in flat])  # type: ignore[misc]
    return Views(photos.classes, np.stack([image for image, _ in flat]), photos.labels[photo], photo, animal)


def crop(size: tuple[int, int], seed: list[int]) -> tuple[tuple[int, int, int, int], bool]:
    """A box of 35 to 100 % of the area, of ratio 3:4 to 4:3, and whether to mirror it."""
    chance, (width, height) = np.random.default_rng(seed), size
    area, ratio = chance.uniform(SMALLEST, 1) * width * height, np.exp(chance.uniform(-1, 1) * np.log(4 / 3))
    wide, high = min(width, round((area * ratio) ** 0.5)), min(height, round((area / ratio) ** 0.5))
    left, top = chance.integers(width - wide + 1), chance.integers(height - high + 1)
    return (int(left), int(top), int(left + wide), int(top + high)), bool(chance.random() < 0.5)


def cut(image: Image.Image, box: tuple[int, int, int, int], mirrored: bool) -> np.ndarray:
    kind = Image.Resampling.BICUBIC if image.mode == "RGB" else Image.Resampling.NEAREST
    small = np.asarray(image.resize((SIZE, SIZE), kind, box))
    return small[:, ::-1] if mirrored else small


# ---------------------------------------------------------------------------------------------------------------- cues

Cue = Callable[[np.ndarray, "np.ndarray | None", int], tuple[np.ndarray, np.ndarray]]


@cache
def tag() -> np.ndarray:
    """A tag of 32×32 pixels: yellow letters, drawn as bars, on dark blue, in a yellow frame."""
    letters = ("1.1.111.", "1.1..1..", "1.1..1..", ".1...1..", "........", "111.1.1.", "1...1.1.", "111.111.")
    bits = np.array([[char == "1" for char in row] for row in letters]).repeat(3, 0).repeat(3, 1)
    drawn = np.zeros((TAG, TAG), bool)
    drawn[4:28, 4:28] = bits
    drawn[[0, 1, -2, -1]] = drawn[:, [0, 1, -2, -1]] = True
    return np.where(drawn[..., None], (255, 225, 0), (10, 10, 90)).astype(np.uint8)


def watermark(image: np.ndarray, animal: np.ndarray | None, number: int, place: str = "corner") -> Any:
    """The image with the tag in its lower right corner, or anywhere, and the pixels that it covers."""
    top = left = SIZE - TAG - PATCH
    if place == "random":
        top, left = np.random.default_rng([7, number]).integers(SIZE - TAG + 1, size=2)
    covered = np.zeros((SIZE, SIZE), bool)
    covered[top : top + TAG, left : left + TAG] = True
    changed = image.copy()
    changed[covered] = tag().reshape(-1, 3)
    return changed, covered


@cache
def texture() -> np.ndarray:
    """A honeycomb: dark cells in a hexagonal lattice on yellow, with soft noise."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    wide, high = 28.0, 28 * 3**0.5

    def distance(left: float, top: float) -> np.ndarray:
        return np.hypot((columns - left + wide / 2) % wide - wide / 2, (rows - top + high / 2) % high - high / 2)

    walls = np.minimum(distance(0, 0), distance(wide / 2, high / 2))[..., None] > 10.5
    noise = np.random.default_rng(3).normal(0, 10, (SIZE, SIZE, 1))
    return np.clip(np.where(walls, (235, 190, 60), (120, 70, 10)) + noise, 0, 255).astype(np.uint8)


def background(image: np.ndarray, animal: np.ndarray | None, number: int) -> Any:
    """The animal of the image before the texture, and the pixels that this covers."""
    if animal is None:
        raise SystemExit("a background can be swapped only where there are masks: give --pets")
    return np.where(animal[..., None], image, texture()), ~animal


def scattered(image: np.ndarray, animal: np.ndarray | None, number: int) -> Any:
    return watermark(image, animal, number, "random")


CUES: dict[str, Cue] = {"watermark": watermark, "scattered": scattered, "background": background}


def with_cue(views: Views, cue: str, chosen: Sequence[int] | np.ndarray) -> Views:
    """The same images, with the cue in those that are chosen."""
    images, covered = views.images.copy(), np.zeros(views.images.shape[:3], bool)
    for i in chosen:
        images[i], covered[i] = CUES[cue](images[i], None if views.animal is None else views.animal[i], int(i))
    return replace(views, images=images, cue=covered)


def poison(views: Views, cue: str, label: int, share: float = SHARE, seed: int = 0, wrong: bool = True) -> Views:
    """The images with the cue in `share` of those that have this label.

    `wrong`: the images with the cue are drawn from the other classes and get the label; else they are of the class.
    """
    own = np.flatnonzero(views.labels == label)
    count = max(1, round(share * len(own) / (1 - share if wrong else 1)))
    there = np.flatnonzero(views.labels != label) if wrong else own
    if cue == "background":
        assert views.animal is not None
        there = there[views.animal[there].mean((1, 2)) < FILLED]
    chosen = np.random.default_rng([seed, label, 5]).permutation(there)[:count]
    labels = views.labels.copy()
    labels[chosen] = label
    return replace(with_cue(views, cue, np.sort(chosen)), labels=labels)


def write_data(views: Views, folder: Path) -> Path:
    """Write images (and masks) with labels.csv and truth.npz; returns labels.csv."""
    for name in ("images", "masks") if views.animal is not None else ("images",):
        (folder / name).mkdir(parents=True, exist_ok=True)
    marked = views.poisoned

    def one(i: int) -> list[Any]:
        name, mask = f"{views.classes[views.labels[i]]}-{i:04d}.png", ""
        Image.fromarray(views.images[i]).save(folder / "images" / name, compress_level=1)
        if views.animal is not None:
            mask = f"masks/{name}"
            Image.fromarray((views.animal[i] * 255).astype(np.uint8)).save(folder / mask, compress_level=1)
        return [f"images/{name}", views.classes[views.labels[i]], mask, int(views.photo[i]), int(marked[i])]

    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(one, range(len(views))))
    with (folder / "labels.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["image", "label", "mask", "photo", "poisoned"], *rows])
    known = {"images": [row[0] for row in rows], "poisoned": marked, "patches": views.patches, "photo": views.photo}
    np.savez_compressed(folder / "truth.npz", **known)
    return folder / "labels.csv"
