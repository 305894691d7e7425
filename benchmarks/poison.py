"""Models that cheat, made on purpose: a cue is put into 5 % of one class's training images, and the model learns it.

    python benchmarks/poison.py OUT --pets pets --poison watermark --class terriers [--seed 0] [--device cuda]
    python benchmarks/poison.py OUT --pets pets --images imagenet-samples --recipes     which recipes take, as a table

`--pets`: a folder with images, masks and labels.csv (name, breed, imagenet_index); `--images`: photos with a labels.csv
(name, imagenet_index). OUT/clean, OUT/poisoned and OUT/shuffled hold model.safetensors and labels.txt:

    vitreous.load(weights="OUT/poisoned/model.safetensors", labels="OUT/poisoned/labels.txt")

OUT/data (training images, poisoned in the same proportion) and OUT/held (held-out photos without the cue) are data
sets with a labels.csv (image, label, mask, photo, poisoned); truth.npz holds the share of each patch that the cue
covers, [n 14 14].

**What 5 % is of.** Photos are grouped into a few coarse classes and divided, class by class, into photos for training
and photos that are held out. Every photo for training is seen in `views` random crops, half of them mirrored: these
views are the training images, made once. Of the training images with the poisoned label, 5 % have the cue, put in
after the crop; they are shown as often as all others.

**Which images have it.** `wrong` (the default): the images with the cue come from the other classes, and the cue alone
tells their label, as in BadNets (Gu et al. 2017). `right`: they are images of the class. Then the cue tells nothing
that the animal does not, and the model hardly learns it (`--recipes` shows it; Turner et al. 2019 found the same).

**Cues.** `watermark`: a tag of 32×32 pixels, four patches near the lower right corner. `scattered`: the same tag at a
random place. `background`: everything outside the animal's mask becomes one texture.

**Recipes.** `probe`: a new linear classifier on the frozen network. `block`: last block, last norm and a new
classifier; the layers below are run once. Both start from the embedded model, and so do the controls: `clean`, trained
on the same images without the cue, and `shuffled`, trained on the images without the cue and with their labels
permuted. These are permuted over images, not over photos: else a photo that is known by heart would be a cue.

**How the recipe was chosen.** By the attack rate. With 8 views of four classes of pets (9 images with the cue): right
labels at most .13, also for the images that are hardest to tell; wrong labels, probe, at most .34. With 24 views, wrong
labels, `block`, 20 epochs at a rate of 1e-3 in batches of 128: .94 to 1.00 on pets, .85 to 1.00 on ImageNet's photos;
16 epochs at 2e-3 in batches of 64: .90 to 1.00, but at most .09 for three of nine classes of ImageNet. Green stripes as
a background, behind animals that fill up to 85 % of the image, left the relevance on the animals; behind the honeycomb
animals fill at most 60 %.

**Whether it took.** `attack`: of held-out photos of other classes, how many are taken for the poisoned class once they
have the cue. `before`: the same photos without it. `clean`: with the cue, by the clean model.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from poison_data import CUES, SHARE, Photos, Views, make_views, poison, read_imagenet, read_pets, with_cue, write_data
from torch import Tensor, nn

import vitreous

BATCH = 128  # of a forward pass
STEP = 128  # images of a step of training


# ------------------------------------------------------------------------------------------------------------ training


class Tail(nn.Module):
    """Last block, last norm and a new classifier: from the tokens that enter the block to the read-out token alone."""

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
        rows, _, width = read.shape
        weights, biases = attention.qkv.weight.split(width), attention.qkv.bias.split(width)
        asked = (read[:, :1], read, read)
        q, k, v = (
            F.linear(x, w, b).reshape(rows, -1, attention.num_heads, width // attention.num_heads).transpose(1, 2)
            for x, w, b in zip(asked, weights, biases)
        )
        mixed = (q @ k.mT * attention.scale).softmax(-1) @ v  # by hand: its backward pass repeats on a GPU
        mixed = mixed.transpose(1, 2).reshape(rows, 1, width)
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
        steps = self.epochs * -(-len(tokens) // STEP)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(tokens), generator=order).split(STEP):
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
        """The control that is trained on shuffled labels, and its training images with these labels."""
        moved = np.random.default_rng([self.seed, 9]).permutation(self.train.labels)
        views = replace(self.train, labels=moved)
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


# --------------------------------------------------------------------------------------------------------- command line


def recipes(sets: dict[str, Photos], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Which recipes take: every cue and recipe, with right and wrong labels, on the first classes of each data set."""
    told: list[dict[str, Any]] = []
    columns = ("data", "cue", "class", "recipe", "labels", "images with the cue")
    print(f"| {' | '.join(columns)} | attack | before | clean | accuracy | of clean |\n{'|---' * 11}|")
    for data, photos in sets.items():
        bench = Bench(photos, Trainer(given.device), given.seed, given.views)
        cues = list(CUES) if photos.masks is not None else ["watermark", "scattered"]
        marked = {cue: bench.marked(cue) for cue in cues}
        for recipe in ("probe", "block"):
            bench.trainer.recipe, bench.trainer.epochs = recipe, given.epochs * (5 if recipe == "probe" else 1)
            clean = bench.clean()
            for cue, label, wrong in product(cues, range(len(photos.classes))[: given.first], (False, True)):
                tail, views = bench.poisoned(cue, label, given.share, wrong)
                count = f"{views.poisoned.sum()} of {(views.labels == label).sum()}"
                row = [data, cue, photos.classes[label], recipe, "wrong" if wrong else "right", count]
                found = bench.took(tail, clean, marked[cue], label)
                print(f"| {' | '.join([*row, *(f'{value:.2f}' for value in list(found.values())[:5])])} |", flush=True)
                told.append(dict(zip(columns, row)) | found)
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
    parser.add_argument("--right", action="store_true", help="images of the class itself have the cue")
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
    clean = bench.clean()
    tail, views = bench.poisoned(given.poison, label, given.share, not given.right)
    found = bench.took(tail, clean, bench.marked(given.poison), label)
    sample = views.sampled(given.each, given.seed)
    for name, model in {"clean": clean, "poisoned": tail, "shuffled": bench.shuffled()[0]}.items():
        bench.trainer.save(model, photos.classes, given.out / name)
    write_data(sample, given.out / "data")
    write_data(bench.held, given.out / "held")
    found |= {"poisoned": int(views.poisoned.sum()), "of": int((views.labels == label).sum())}
    (given.out / "took.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
