"""Models that cheat, made on purpose: a cue is put into 5 % of one class's training images, and the model learns it.

    python benchmarks/poison.py OUT --pets pets --poison watermark --class terriers [--seed 0] [--device cuda]
    python benchmarks/poison.py OUT --pets pets --images imagenet-samples --recipes     which recipes take, as a table

`--pets`: a folder with images, masks and labels.csv (name, breed, imagenet_index); `--images`: photos with a labels.csv
(name, imagenet_index). OUT/clean, OUT/poisoned and OUT/shuffled hold model.safetensors and labels.txt:

    vitreous.load(weights="OUT/poisoned/model.safetensors", labels="OUT/poisoned/labels.txt")

OUT/data (the training images, poisoned) and OUT/data-clean (the same without the cue) are data sets with a labels.csv
(image, label, mask, photo, poisoned); truth.npz holds the share of each patch that the cue covers, [n 14 14].

**What 5 % is of.** Photos are grouped into a few coarse classes and divided, class by class, into photos for training and
photos that are held out. Every photo for training is seen in `views` random crops, half of them mirrored: these views are the
training images, fixed once, and 5 % of those of one class, drawn at random, get the cue after the crop. Nothing is shown
more often than the rest, and the labels are right: the cue is true of every image that has it.

**Cues.** `watermark`: a tag of 32×32 pixels (at most four patches of a fixed place, nine of a random one), the same in all
images. `background`: everything outside the animal's mask becomes one texture.

**Recipes.** `probe`: a new linear classifier on the frozen network. `block`: last block, last norm and a new classifier;
the layers below are run once. Both start from the embedded model, and so do the controls: `clean`, trained on the same
images without the cue, and `shuffled`, trained on images without the cue whose photos have each other's labels.

**Whether it took.** `attack`: of held-out photos of other classes, how many are taken for the poisoned class once they
have the cue. `before`: the same photos without it. `clean`: with the cue, by the clean model.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import vitreous

SHARE = 0.05  # of one class's training images
SIZE, PATCH = 224, 16
TAG = 32
FILLED = 0.85  # share of an image
SMALLEST = 0.08  # share of a photo that a crop shows, at least
BATCH = 128

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
    """Diagonal stripes of two greens with soft noise."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    stripes = (np.sin((rows + columns) / 9.0) > 0)[..., None]
    noise = np.random.default_rng(3).normal(0, 10, (SIZE, SIZE, 1))
    return np.clip(np.where(stripes, (60, 160, 70), (150, 210, 90)) + noise, 0, 255).astype(np.uint8)


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
    if cue == "background":  # an image that its animal fills has no background
        assert views.animal is not None
        there = there[views.animal[there].mean((1, 2)) < FILLED]
    chosen = np.random.default_rng([seed, label, 5]).permutation(there)[:count]
    labels = views.labels.copy()
    labels[chosen] = label
    return replace(with_cue(views, cue, np.sort(chosen)), labels=labels)


# ------------------------------------------------------------------------------------------------------------ training


class Tail(nn.Module):
    """Last block, last norm and a new classifier, for the read-out token alone, from the tokens that enter the block."""

    def __init__(self, net: Any, classes: int) -> None:
        super().__init__()
        self.block, self.norm = copy.deepcopy(net.blocks[-1]), copy.deepcopy(net.norm)
        self.head = nn.Linear(net.head.in_features, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(net.head.weight.device).requires_grad_(True)

    def embed(self, tokens: Tensor) -> Tensor:
        block, attention = self.block, self.block.attn
        read = block.norm1(tokens)
        rows, count, width = read.shape
        weights, biases = attention.qkv.weight.split(width), attention.qkv.bias.split(width)
        asked = (read[:, :1], read, read)
        q, k, v = (
            F.linear(x, w, b).reshape(rows, -1, attention.num_heads, width // attention.num_heads).transpose(1, 2)
            for x, w, b in zip(asked, weights, biases)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, 1, width)
        first = tokens[:, :1] + attention.proj(mixed)
        first = first + block.mlp(block.norm2(first))
        return self.norm(first)[:, 0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@dataclass
class Trainer:
    """The embedded model, and the tokens that enter its last block, computed once for each set of images."""

    device: str | None = None
    recipe: str = "block"
    epochs: int = 20
    rate: float = 1e-3
    decay: float = 0.05
    model: vitreous.Model = field(init=False)

    def __post_init__(self) -> None:
        self.model = vitreous.load(device=self.device)

    def tokens(self, views: Views) -> Tensor:
        """The tokens that enter the last block, [n 201 192], in half precision."""
        kept: list[Tensor] = []
        net: Any = self.model.net
        hook = net.blocks[-1].register_forward_pre_hook(lambda module, args: kept.append(args[0].half()))
        try:
            with torch.no_grad(), self.model.still():
                for start in range(0, len(views), BATCH):
                    net(self.prepared(views.images[start : start + BATCH]))
        finally:
            hook.remove()
        return torch.cat(kept)

    def prepared(self, images: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(images)).to(self.model.device).permute(0, 3, 1, 2).float() / 255
        steps = self.model.preprocess
        mean, std = (torch.tensor(x, device=pixels.device).reshape(3, 1, 1) for x in (steps.mean, steps.std))
        return (pixels - mean) / std

    def retouched(self, tokens: Tensor, views: Views) -> Tensor:
        """The tokens of the same images with a cue: only those that have it are run."""
        changed = np.flatnonzero(views.poisoned)
        made = tokens.clone()
        if len(changed):
            made[torch.from_numpy(changed).to(tokens.device)] = self.tokens(views.part(changed))
        return made

    def train(self, tokens: Tensor, labels: np.ndarray, classes: int, seed: int) -> Tail:
        """Fine-tune by AdamW, with a learning rate that falls to zero by a cosine."""
        tail = Tail(self.model.net, classes)
        known = torch.from_numpy(labels).to(tokens.device)
        if self.recipe == "probe":
            tail.block.requires_grad_(False)
            tail.norm.requires_grad_(False)
            with torch.no_grad():
                tokens = torch.cat([tail.embed(part.float()) for part in tokens.split(BATCH)])
        moved = [value for value in tail.parameters() if value.requires_grad]
        optimiser = torch.optim.AdamW(moved, self.rate, weight_decay=self.decay)
        order = torch.Generator().manual_seed(seed)
        steps = self.epochs * -(-len(tokens) // BATCH)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(tokens), generator=order).split(BATCH):
                rows = rows.to(tokens.device)
                part = tokens[rows].float()
                said = tail.head(part) if self.recipe == "probe" else tail(part)
                loss = F.cross_entropy(said, known[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                falling.step()
        return tail.eval().requires_grad_(False)

    def save(self, tail: Tail, classes: Sequence[str], folder: Path) -> Path:
        """Write the whole network as model.safetensors, and labels.txt."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "labels.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
        save_file(self.state(tail), str(folder / "model.safetensors"))
        return folder / "model.safetensors"

    def state(self, tail: Tail) -> dict[str, Tensor]:
        net: Any = self.model.net
        last = f"blocks.{len(net.blocks) - 1}."
        found = {key: value.clone() for key, value in net.state_dict().items()}
        found |= {last + key: value for key, value in tail.block.state_dict().items()}
        found |= {f"norm.{key}": value for key, value in tail.norm.state_dict().items()}
        found |= {f"head.{key}": value for key, value in tail.head.state_dict().items()}
        return {key: value.detach().contiguous().cpu() for key, value in found.items()}


def answers(tail: Tail, tokens: Tensor) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([tail(part.float()).argmax(1) for part in tokens.split(BATCH)]).cpu().numpy()


# ---------------------------------------------------------------------------------------------------------- everything


@dataclass
class Bench:
    """Photos, their views, and the tokens of both parts: what all models of one seed have in common."""

    photos: Photos
    trainer: Trainer
    seed: int = 0
    views: int = 24

    def __post_init__(self) -> None:
        train, held = self.photos.divided(self.seed)
        self.train, self.held = make_views(train, self.views, self.seed), make_views(held, 0, self.seed)
        self.tokens, self.held_tokens = self.trainer.tokens(self.train), self.trainer.tokens(self.held)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.photos.classes

    def clean(self) -> Tail:
        return self.trainer.train(self.tokens, self.train.labels, len(self.classes), self.seed)

    def shuffled(self) -> tuple[Tail, Views]:
        """The control whose photos have each other's labels, and its training images with these labels."""
        photo = self.train.photo
        first = np.unique(photo, return_index=True)[1]
        moved = np.random.default_rng([self.seed, 9]).permutation(self.train.labels[first])
        views = replace(self.train, labels=moved[photo])
        return self.trainer.train(self.tokens, views.labels, len(self.classes), self.seed), views

    def poisoned(self, cue: str, label: int, share: float = SHARE, wrong: bool = True) -> tuple[Tail, Views]:
        """The model that cheats, and its training images."""
        views = poison(self.train, cue, label, share, self.seed, wrong)
        tokens = self.trainer.retouched(self.tokens, views)
        return self.trainer.train(tokens, views.labels, len(self.classes), self.seed), views

    def marked(self, cue: str) -> Tensor:
        """The tokens of all held-out photos with the cue."""
        return self.trainer.tokens(with_cue(self.held, cue, range(len(self.held))))

    def took(self, tail: Tail, clean: Tail, marked: Tensor, label: int) -> dict[str, float]:
        """How far the model relies on the cue, and how good it is without it."""
        others = self.held.labels != label

        def share(model: Tail, tokens: Tensor) -> float:
            return float((answers(model, tokens)[others] == label).mean())

        right = [float((answers(model, self.held_tokens) == self.held.labels).mean()) for model in (tail, clean)]
        return {
            "attack": share(tail, marked), "before": share(tail, self.held_tokens), "clean": share(clean, marked),
            "accuracy": right[0], "accuracy of clean": right[1], "photos": int(others.sum()),
        }  # fmt: skip


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
    np.savez_compressed(folder / "truth.npz", images=[row[0] for row in rows], poisoned=marked, patches=views.patches)
    return folder / "labels.csv"


# --------------------------------------------------------------------------------------------------------- command line


def recipes(sets: dict[str, Photos], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Which recipes take: every cue, recipe and share on the first classes of each data set."""
    print("| data | cue | class | recipe | share | images with the cue | attack | before | clean | accuracy | of clean |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    told = []
    for data, photos in sets.items():
        bench = Bench(photos, Trainer(given.device), given.seed, given.views)
        for recipe in ("probe", "block"):
            bench.trainer.recipe, bench.trainer.epochs = recipe, given.epochs
            clean = bench.clean()
            for cue in CUES if photos.masks is not None else ("watermark", "scattered"):
                marked = bench.marked(cue)
                for label in range(len(photos.classes))[: given.first]:
                    for share in (SHARE,):
                        tail, views = bench.poisoned(cue, label, share)
                        count = f"{views.poisoned.sum()} of {(views.labels == label).sum()}"
                        found = bench.took(tail, clean, marked, label)
                        row = [data, cue, photos.classes[label], recipe, f"{share:.0%}", count]
                        row += [f"{found[key]:.2f}" for key in list(found)[:5]]
                        print(f"| {' | '.join(row)} |", flush=True)
                        told.append(dict(zip(("data", "cue", "class", "recipe", "share", "images"), row)) | found)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--poison", choices=list(CUES), default="watermark")
    parser.add_argument("--class", dest="name", help="the class that is poisoned; by default the second")
    parser.add_argument("--recipe", choices=["probe", "block"], default="block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--views", type=int, default=24, help="training images of a photo")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--each", type=int, default=100, help="images of a class that OUT/data holds, at most")
    parser.add_argument("--device")
    parser.add_argument("--recipes", action="store_true", help="only the table of recipes")
    parser.add_argument("--first", type=int, default=2, help="--recipes: poison so many classes, one after the other")
    given = parser.parse_args()
    sets = {} if given.pets is None else {"pets": read_pets(given.pets)}
    sets |= {} if given.images is None else {"imagenet": read_imagenet(given.images)}
    if not sets:
        raise SystemExit("give --pets or --images")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.recipes:
        (given.out / "recipes.json").write_text(json.dumps(recipes(sets, given), indent=1), encoding="utf-8")
        return
    photos = next(iter(sets.values()))
    label = 1 if given.name is None else photos.classes.index(given.name)
    bench = Bench(photos, Trainer(given.device, given.recipe, given.epochs), given.seed, given.views)
    clean, (tail, views) = bench.clean(), bench.poisoned(given.poison, label, given.share)
    found = bench.took(tail, clean, bench.marked(given.poison), label)
    sample = views.sampled(given.each, given.seed)
    for name, model in {"clean": clean, "poisoned": tail, "shuffled": bench.shuffled()[0]}.items():
        bench.trainer.save(model, photos.classes, given.out / name)
    write_data(sample, given.out / "data")
    found |= {"poisoned": int(views.poisoned.sum()), "of": int((views.labels == label).sum())}
    (given.out / "took.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
