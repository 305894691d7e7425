"""What patch features tell of real photos: the animal apart from its background, and the same part in another image.

python benchmarks/features.py --pets pets --weights deit_tiny_patch16_224.safetensors --device cuda

`--pets`: a folder with images, masks and a labels.csv (name, breed). For the embedded model and DeiT-Tiny, after every
layer:

foreground       AUROC of the first component of one basis for all photos, animal against background, of each photo.
                 The side is that which the borders of photos show less, without a look at the masks. Controls:
                 directions at random under the same rule, and how near a patch is to the centre.
correspondence   For each patch of a photo, the nearest one of another photo of the same breed: do both lie on the
                 animal, or both beside it? The mean of both kinds of patches, so that 0.5 is chance. Near by the
                 cosine of all features; by three components of a basis of photos of other breeds; by three of a basis
                 of each photo alone; by three directions at random. Controls: a patch at random, and the same place.

Intervals are 95 % bootstrap intervals of the mean over photos. Writes FOLDER/features.json, prints the tables.
`--table --write docs/features.md --figure docs/figures/features-by-layer.png` puts some layers of the results that are
there into the page, and draws all.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor

import vitreous
from vitreous._support.statistics import intervals
from vitreous.images.masks import read_masks
from vitreous.inspect.basis import Components, Covariance, parted
from vitreous.inspect.stream import streaming
from vitreous.models.model import Model

RANDOM = 10  # directions at random, and bases of them
DEIT = "deit_tiny_patch16_224"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TOLD = (0, 3, 6, 9, 11)  # layers in the page
COLOURS = ("#D55E00", "#332288", "#44AA99", "#AA4499", "#8A8F98", "#B4B9C2")
ORDER = {
    "foreground": ("first component", "random direction", "centre"),
    "correspondence": (
        "all features",
        "3 components, basis of other breeds",
        "3 components, basis of each photo",
        "3 random directions",
        "same place",
        "random patch",
    ),
}
Scores = dict[str, np.ndarray]  # by what was tried: one number for each photo


@dataclass(frozen=True)
class Pets:
    """Photos, their masks and breeds."""

    images: list[str]
    masks: list[str]
    breeds: np.ndarray

    @classmethod
    def read(cls, folder: Path, limit: int | None) -> Pets:
        with (folder / "labels.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))[:limit]
        images, masks = (
            [str(next((folder / part).glob(f"{row['name']}.*"))) for row in rows] for part in ("images", "masks")
        )
        return cls(images, masks, np.array([row["breed"] for row in rows]))

    @property
    def partners(self) -> list[int]:
        """The next photo of the same breed."""
        found = []
        for i, breed in enumerate(self.breeds):
            same = np.flatnonzero(self.breeds == breed)
            found.append(int(same[(np.flatnonzero(same == i)[0] + 1) % len(same)]))
        return found


def on_patches(model: Model, pets: Pets, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Whether at least half of each patch is animal, [N h·w]."""
    masks = read_masks(pets.masks, pets.images, model.preprocess, size)
    stacked = torch.stack([torch.as_tensor(np.asarray(mask), dtype=torch.float32) for mask in masks])
    return F.adaptive_avg_pool2d(stacked[:, None], grid)[:, 0].flatten(1) >= 0.5


# ---------------------------------------------------------------------------------------------------------- foreground


def auroc(values: np.ndarray, animal: np.ndarray) -> float:
    """The share of pairs in which the animal's patch has the higher value; NaN where a photo has one kind only."""
    inside, outside = int(animal.sum()), int((~animal).sum())
    if not inside or not outside:
        return float("nan")
    return float((rankdata(values)[animal].sum() - inside * (inside + 1) / 2) / (inside * outside))


def of_direction(features: Tensor, axis: Components, animal: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The AUROC of each photo along the first of these directions, on the side that borders show less."""
    first = axis.of(features)[..., 0].float().cpu().numpy()  # [N n]
    side = parted(axis, [one.reshape(grid) for one in first]).side
    return np.array([auroc(side * one, own) for one, own in zip(first, animal)])


def foreground(features: Tensor, sums: list[Covariance], animal: Tensor, grid: tuple[int, int], seed: int) -> Scores:
    own, known = components(sums), animal.cpu().numpy()
    random = [of_direction(features, axes, known, grid) for axes in at_random(own, seed)]
    rows, columns = (np.abs(np.arange(n) - (n - 1) / 2) for n in grid)
    centre = -np.hypot(rows[:, None], columns[None]).ravel()
    return {
        "first component": of_direction(features, own, known, grid),
        "random direction": np.mean(random, 0),
        "centre": np.array([auroc(centre, one) for one in known]),
    }


def scatters(features: Tensor) -> list[Covariance]:
    """Of each photo, [N n D]."""
    found = [Covariance() for _ in features]
    for sums, one in zip(found, features):
        sums.add(one)
    return found


def components(some: Iterable[Covariance]) -> Components:
    """Of all patches of some photos."""
    sums = Covariance()
    for one in some:
        sums.join(one)
    return sums.components()


def at_random(like: Components, seed: int) -> list[Components]:
    """Orthonormal directions at random around the same mean."""
    random = np.random.default_rng(seed)
    width = len(like.mean)
    drawn = [np.linalg.qr(random.normal(size=(width, 3)))[0].T for _ in range(RANDOM)]
    return [Components(like.mean, np.ascontiguousarray(axes), like.share, like.ends) for axes in drawn]


# ------------------------------------------------------------------------------------------------------ correspondence


def agreement(nearest: Tensor, here: Tensor, there: Tensor) -> float:
    """The share of patches whose nearest is of their kind, the mean of animal and background; NaN where one is none."""
    same = there[nearest] == here
    if not here.any() or here.all() or not there.any() or there.all():
        return float("nan")
    return float((same[here].double().mean() + same[~here].double().mean()) / 2)


def near(one: Tensor, other: Tensor) -> Tensor:
    """For each row the number of the nearest row of the other, by cosine."""
    return (F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).mT).argmax(1)


def close(one: Tensor, other: Tensor) -> Tensor:
    """The same by Euclidean distance, as colours are compared."""
    return torch.cdist(one, other).argmin(1)


def correspondence(features: Tensor, sums: list[Covariance], animal: Tensor, pets: Pets, seed: int) -> Scores:
    partners, count = pets.partners, len(features)
    whole, alone = components(sums), [one.components() for one in sums]
    breeds = {
        breed: components(one for one, own in zip(sums, pets.breeds) if own != breed) for breed in set(pets.breeds)
    }
    drawn, chance = at_random(whole, seed), torch.Generator().manual_seed(seed)
    places = torch.arange(features.shape[1], device=features.device)

    def each(find: Callable[[int, int], Tensor]) -> np.ndarray:
        return np.array([agreement(find(i, j), animal[i], animal[j]) for i, j in enumerate(partners)])

    def by(bases: Callable[[int], Components]) -> np.ndarray:
        parts = [bases(i).of(one).float() for i, one in enumerate(features)]
        return each(lambda i, j: close(parts[i], parts[j]))

    dice = [torch.randint(len(places), (count, len(places)), generator=chance).to(places) for _ in range(RANDOM)]
    return {
        "all features": each(lambda i, j: near(features[i], features[j])),
        "3 components, basis of other breeds": by(lambda i: breeds[pets.breeds[i]]),
        "3 components, basis of each photo": by(lambda i: alone[i]),
        "3 random directions": np.mean([by(lambda i, axes=axes: axes) for axes in drawn], 0),  # type: ignore[misc]
        "same place": each(lambda i, j: places),
        "random patch": np.mean([each(lambda i, j, own=own: own[i]) for own in dice], 0),  # type: ignore[misc]
    }


# --------------------------------------------------------------------------------------------------------------- tables


def measured(model: Model, pets: Pets, seed: int) -> dict[str, Any]:
    """Both, after every layer of a model."""
    with streaming(model, pets.images, None, "tokens", None) as stream:
        taken: dict[int, list[Tensor]] = {layer: [] for layer in stream.layers}
        for some in stream.each("photos"):
            for layer, each in some.items():
                taken[layer] += [one.flatten(0, 1) for one in each]
        grid = stream.first.layout.grid
        animal = on_patches(model, pets, grid, stream.first.size).to(model.device)
        found: dict[str, Any] = {"grid": list(grid), "photos": len(pets.images), "normed": stream.norm is not None}
        for layer, each in taken.items():
            features = torch.stack(each)
            sums = scatters(features)
            scores = {
                "foreground": foreground(features, sums, animal, grid, seed),
                "correspondence": correspondence(features, sums, animal, pets, seed),
            }
            found[str(layer)] = {part: told(of) for part, of in scores.items()}
            said = ", ".join(f"{found[str(layer)][part][ORDER[part][0]]['mean']:.3f}" for part in ORDER)
            print(f"  layer {layer}: {said}", flush=True)
    return found


def told(scores: Scores) -> dict[str, Any]:
    """Means, intervals, and the interval of the difference from the first of them, photo by photo."""
    first = next(iter(scores.values()))
    found = {}
    for name, values in scores.items():
        (low, high), (under, over) = (intervals(one[None])[:, 0] for one in (values, first - values))
        known = int(np.isfinite(values).sum())
        found[name] = {"mean": float(np.nanmean(values)), "low": float(low), "high": float(high), "photos": known}
        found[name] |= {"behind": float(np.nanmean(first - values)), "behind_low": under, "behind_high": over}
    return found


def tables(results: dict[str, Any], some: Sequence[int] | None = None) -> str:
    """Markdown: for each model and part a row for each layer, or for some."""
    lines = []
    for model, found in results["models"].items():
        layers = [name for name in found if name.isdigit() and (some is None or int(name) in some)]
        for part, names in ORDER.items():
            lines += ["", f"**{model}**, {part}, {found['photos']} photos:", ""]
            lines += ["| layer | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
            for layer in layers:
                cells = [spelt(found[layer][part][name]) for name in names]
                lines.append(f"| {layer} | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip()


def draw(results: dict[str, Any], file: Path) -> None:
    """A line with its interval for each, by layer: a row for each model, a column for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.1 * len(results["models"])), dpi=90, layout="constrained")
    every = figure.subplots(len(results["models"]), len(ORDER), squeeze=False, sharey="col", sharex=True)
    for row, (model, found) in zip(every, results["models"].items()):
        layers = [int(name) for name in found if name.isdigit()]
        for axes, (part, names) in zip(row, ORDER.items()):
            for name, colour in zip(names, (*COLOURS[:1], *COLOURS[-2:]) if len(names) == 3 else COLOURS):
                of = [found[str(layer)][part][name] for layer in layers]
                axes.fill_between(layers, [o["low"] for o in of], [o["high"] for o in of], color=colour, alpha=0.15)
                axes.plot(layers, [o["mean"] for o in of], color=colour, linewidth=1.4)
            label(axes, {name: found[str(layers[-1])][part][name]["mean"] for name in names}, layers[-1])
            axes.set_title(f"{model}: {part}", fontsize=10, loc="left")
            axes.axhline(0.5, color="#B4B9C2", linewidth=0.6)
            axes.set_ylabel("AUROC" if part == "foreground" else "agreement", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    for axes in every[-1]:
        axes.set_xlabel("layer", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, pil_kwargs={"optimize": True})


def label(axes: Any, ends: dict[str, float], x: int) -> None:
    """The name of each line at its end, no nearer to each other than can be read."""
    y = -1.0
    for name, end in sorted(ends.items(), key=lambda pair: pair[1]):
        y = max(end, y + 0.028)
        axes.text(x + 0.25, y, name, fontsize=7, va="center", color="#1A1C1F")
    axes.set_xlim(-0.2, x * 1.75)
    axes.set_xticks(range(0, x + 1, 2))


def written(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def spelt(one: dict[str, float]) -> str:
    return f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--weights", type=Path, help="a DeiT-Tiny checkpoint; without it, the embedded model only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, help="use the first N photos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--table", action="store_true", help="only print the tables of the results that are there")
    parser.add_argument("--write", type=Path, help="a page to put some layers into")
    parser.add_argument("--figure", type=Path, help="a file to draw all layers into")
    given = parser.parse_args()
    file = given.out / "features.json"
    if not given.table:
        if given.pets is None:
            parser.error("--pets: name the folder of photos")
        pets = Pets.read(given.pets, given.limit)
        if len(set(pets.breeds)) < 2:
            parser.error("--limit: take photos of two breeds at least, as one basis is that of other breeds")
        results: dict[str, Any] = {"seed": given.seed, "device": given.device, "models": {}}
        names = [(None, None), *([(DEIT, str(given.weights))] if given.weights else [])]
        for name, weights in names:
            start, model = time.monotonic(), vitreous.load(name, weights=weights, device=given.device)
            print(model.name, flush=True)
            results["models"][model.name] = measured(model, pets, given.seed)
            results["models"][model.name]["seconds"] = round(time.monotonic() - start, 1)
            given.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    print(tables(found))
    if given.write is not None:
        written(given.write, tables(found, TOLD))
    if given.figure is not None:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
