"""Measure the weights of a ViT on labelled images and print a Markdown table.

    python training/evaluate.py WEIGHTS --samples FOLDER --labels CSV [--teacher FILE] [--pets FOLDER]

Every figure comes with its 95 % interval: Wilson's for shares of images, the normal one for means over images.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from images import Labelled, UsageError, inputs, load_labelled, load_masks, random_patches, usable
from losses import relative_norms
from network import ViT, load
from torch import Tensor

BATCH = 50
LARGE = 1.5  # times the median norm of the image's patches
Z = 1.96


@dataclass(frozen=True)
class Figure:
    """A share of the images or a mean over them, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f}–{100 * self.high:.1f})"


def proportion(hits: Tensor) -> Figure:
    """The share of true answers, with Wilson's interval."""
    count, share = len(hits), hits.double().mean().item()
    centre = share + Z**2 / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return Figure(share, max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale))


def mean(values: Tensor) -> Figure:
    """The mean of values in 0…1, with the normal interval."""
    middle = values.double().mean().item()
    reach = Z * values.double().std(correction=0).item() / math.sqrt(len(values))
    return Figure(middle, max(0.0, middle - reach), min(1.0, middle + reach))


@dataclass(frozen=True)
class Answers:
    """What a network says and sees, for each image."""

    best: Tensor  # the five likeliest classes [B 5]
    attention: Tensor  # of the class token in the last block, on patches, mean over heads; sums to one [B P]
    large: Tensor  # share of outlying patches after the last block [B]


@torch.inference_mode()
def answers(net: ViT, images: Tensor, kept: int | None = None) -> Answers:
    """Run a network over uint8 images, with `kept` random patches of each, or with all."""
    device, patches = net.pos_embed.device, net.dimensions.patches
    generator = torch.Generator().manual_seed(0)
    keep = None if kept is None else random_patches(len(images), patches, kept, generator)
    best, attention, large = [], [], []
    for start in range(0, len(images), BATCH):
        part = slice(start, start + BATCH)
        batch = inputs(images[part].to(device), net.dimensions.side)
        run = net(batch, None if keep is None else keep[part].to(device))
        row = run.attention[-1][..., net.prefix :].mean(1)
        best.append(run.logits.topk(5, 1).indices)
        attention.append(row / row.sum(1, keepdim=True))
        large.append((relative_norms(run.stream[-1][:, net.prefix :]) > LARGE).float().mean(1))
    return Answers(torch.cat(best).cpu(), torch.cat(attention).cpu(), torch.cat(large).cpu())


def top(found: Answers, classes: Tensor, count: int) -> Figure:
    return proportion((found.best[:, :count] == classes[:, None]).any(1))


Rows = dict[str, Figure]


def sample_rows(net: ViT, samples: Labelled) -> Rows:
    """Accuracy with all patches and with some removed."""
    patches = net.dimensions.patches
    found = answers(net, samples.images)
    rows = {"top-1": top(found, samples.classes, 1), "top-5": top(found, samples.classes, 5)}
    for share, parts in (("a third", 3), ("half", 2)):
        fewer = answers(net, samples.images, patches - patches // parts)
        rows[f"top-1, {share} of the patches removed"] = top(fewer, samples.classes, 1)
    return rows


def agreement(net: ViT, teacher: ViT, samples: Labelled) -> Figure:
    """The share of images for which two networks have the same first choice."""
    mine, theirs = (answers(each, samples.images).best[:, 0] for each in (net, teacher))
    return proportion(mine == theirs)


def pet_rows(net: ViT, pets: Labelled, masks: Tensor) -> Rows:
    """Accuracy, and how well the attention of the last block finds the object."""
    found = answers(net, pets.images)
    pointed = masks.gather(1, found.attention.argmax(1, keepdim=True))[:, 0] > 0.5
    return {
        "top-1": top(found, pets.classes, 1),
        "top-5": top(found, pets.classes, 5),
        "last attention of the class token: share on the animal": mean((found.attention * masks).sum(1)),
        "last attention of the class token: largest on the animal": proportion(pointed),
        f"patches with norm > {LARGE} × median": mean(found.large),
    }


def table(title: str, columns: dict[str, Rows]) -> str:
    """A Markdown table with one column for each network."""
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in names:
        cells = [str(rows[name]) if name in rows else "" for rows in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Measure the weights of a ViT on labelled images.")
    add = parser.add_argument
    add("weights", type=Path, help="safetensors file with timm's names, with or without registers")
    add("--samples", type=Path, help="folder of labelled images")
    add("--labels", type=Path, help="CSV file for --samples with the columns name, imagenet_index")
    add("--pets", type=Path, help="folder with images/, masks/ (255 on the animal) and labels.csv")
    add("--teacher", type=Path, help="weights of a second network, for another column and the agreement")
    add("--short-side", type=int, help="pixels to which images are resized before the centre crop (default: the crop)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    if options.samples is None and options.pets is None:
        raise UsageError("give --samples with --labels, --pets, or both")
    if (options.samples is None) != (options.labels is None):
        raise UsageError("--samples and --labels belong together")
    device = usable(options.device)
    net = load(options.weights).to(device)
    side = net.dimensions.side
    short = side if options.short_side is None else options.short_side
    if short < side:
        raise UsageError(f"--short-side must be at least {side}, not {short}")
    nets, teacher = {options.weights.stem: net}, None
    if options.teacher:
        teacher = load(options.teacher).to(device)
        nets[f"teacher ({options.teacher.stem})"] = teacher
        if teacher.dimensions.side != side:
            raise UsageError(f"{options.teacher} takes images of another size than {options.weights}")

    tables = []
    if options.samples:
        samples = load_labelled(options.samples, options.labels, short, side)
        columns = {name: sample_rows(each, samples) for name, each in nets.items()}
        if teacher is not None:
            columns[options.weights.stem]["same first choice as the teacher"] = agreement(net, teacher, samples)
        tables.append(table(f"{len(samples.names)} labelled images", columns))
    if options.pets:
        pets = load_labelled(options.pets / "images", options.pets / "labels.csv", short, side)
        masks = load_masks(options.pets / "masks", pets.names, short, side, net.dimensions.grid)
        columns = {name: pet_rows(each, pets, masks) for name, each in nets.items()}
        tables.append(table(f"{len(pets.names)} pets", columns))
    print("\n\n".join(tables))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error."""
    try:
        run(parse(arguments))
    except UsageError as error:
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
