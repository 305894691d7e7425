"""Are found latents concepts? Purity of their top patches, and what classes lose without them, beside controls.

python benchmarks/discover.py --pets pets --weights deit_tiny_patch16_224.safetensors --device cuda
python benchmarks/discover.py --render --figure docs/figures/discover.png           the table and chart of the JSON

`--pets`: a folder with images, masks (of the animal) and a labels.csv with the ImageNet class of each image. Everything
is fitted and chosen on half of the images of each breed and measured on the other half.

animal   of the 16 images where a latent is largest, how many of these patches are on the animal, or off it if most are
breed    of the 4 images where it is largest, how many are of the same breed
AUROC    how well the direction that tells a breed from the others best in one half tells it in the other half
drop     what the logit of the breed loses without the patches that have its best latent; beside it as many random
         patches, and as many random patches of the animal
effect   what it loses without the latent's part in the patch tokens; beside it as much along a random direction

Intervals are 95 %: of purities by the jackknife over 12 groups of images (a bootstrap would draw the same image twice,
which is pure by itself), of drops and effects by the paired bootstrap over images.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import rankdata
from torch import Tensor

import vitreous
from vitreous.evaluation.discover.fit import Size, fit, quality, random_directions, stability
from vitreous.evaluation.discover.rank import DRAWS, MOST, Spread, ablate, measured_by, remove, scores
from vitreous.evaluation.discover.search import Search
from vitreous.evaluation.discover.shards import Shards
from vitreous.images.dataset import Data, read_data
from vitreous.images.readers import Reader
from vitreous.models.match_labels import match_labels
from vitreous.trace.features import patch_features
from vitreous.trace.latents import Latents
from vitreous.trace.perturb.drop_tokens import ends_keeping
from vitreous.trace.perturb.dropped_runs import kept
from vitreous.trace.trace import Trace

RESULTS = Path(__file__).parent / "results" / "discover.json"
ANIMAL, BREED = 16, 4  # images whose top patch is looked at
GROUPS = 12  # of images, each left out once
RANDOM = 5  # draws of random directions
CANDIDATES = 8
MEASURES = {"animal": "animal or not", "breed": "same breed", "auroc": "AUROC of a breed"}
COVERED = 0.5  # of a patch by the mask, to be on the animal


@dataclass(frozen=True, eq=False)
class Half:
    """The patches of some images: tokens [N P D], whether each is on the animal [N P], and the breed of each image."""

    tokens: Tensor
    animal: Tensor
    breed: Tensor
    numbers: list[int]


def main() -> None:
    given = parse()
    if not given.render:
        done: dict[str, Any] = {}
        for name, weights in ((None, None), ("deit_tiny_patch16_224", given.weights)):
            if name is not None and weights is None:
                print("DeiT-Tiny is left out: give its --weights")
                continue
            model = vitreous.load(name, weights, given.device)
            done[model.name] = prove(model, given)
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(done, indent=1, ensure_ascii=False))  # after each model
    found = json.loads(given.json.read_text())
    print(table(found))
    if given.figure is not None:
        draw(found, given.figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--weights", help="of DeiT-Tiny")
    parser.add_argument("--device")
    parser.add_argument("--layer", type=float, default=0.8, help="how deep, as a share of all layers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--classes", type=int, help="only so many breeds, for a quick look")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="only show what the JSON holds")
    parser.add_argument("--figure", type=Path)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------------------- data


def halves(data: Data, breeds: int | None) -> tuple[list[int], list[int]]:
    """The numbers of the images to fit to and to measure on: every other image of each breed."""
    labels = [sample.label for sample in data.samples]
    some = sorted({label for label in labels if isinstance(label, int)})[:breeds]
    parts: tuple[list[int], list[int]] = ([], [])
    for label in some:
        for i, number in enumerate(n for n, own in enumerate(labels) if own == label):
            parts[i % 2].append(number)
    return sorted(parts[0]), sorted(parts[1])


def read(model: vitreous.Model, data: Data, numbers: list[int], layer: int) -> Half:
    reader = Reader(dict(enumerate(data.samples)), model.preprocess, masked=True)
    tokens, animal, order = [], [], []
    for start in range(0, len(numbers), 16):
        for batch in reader[numbers[start : start + 16]].batches:
            seen = [i for i, mask in enumerate(batch.masks) if mask is not None]  # it may be cropped away
            if not seen:
                continue
            placed = patch_features(Trace(model, torch.as_tensor(batch.images)[seen]), [layer])[layer]
            tokens.append(placed.float().flatten(1, 2).cpu())
            masks = torch.stack([torch.as_tensor(batch.masks[i]).float() for i in seen])[:, None]
            animal.append(F.adaptive_avg_pool2d(masks, placed.shape[1:3]).flatten(1) > COVERED)
            order += [batch.numbers[i] for i in seen]
    breed = torch.tensor([int(data.samples[number].label) for number in order])  # type: ignore[arg-type]
    return Half(torch.cat(tokens), torch.cat(animal), breed, order)


# -------------------------------------------------------------------------------------------------------------- purity


def bases(train: Half, latents: Latents, nmf: Latents, seed: int) -> Iterator[tuple[str, list[Any]]]:
    """Each kind of direction with functions that tell how active its directions are in tokens."""
    tokens = train.tokens.flatten(0, 1).to(latents.decoder)
    mean, width = tokens.mean(0), tokens.shape[1]
    yield "sparse autoencoder", [latents.encode]
    yield "semi-NMF", [nmf.encode]
    main = torch.linalg.eigh(torch.cov(tokens.double().T.cpu())).eigenvectors.flip(1).T[: len(latents) // 2].to(tokens)
    yield "PCA", [along(mean, torch.cat([main, -main]))]
    yield "neurons", [along(mean, torch.cat([torch.eye(width), -torch.eye(width)]).to(tokens))]
    drawn = [random_directions(tokens - mean, len(latents), seed + i) for i in range(RANDOM)]
    yield "random, as tokens vary", [along(mean, one) for one in drawn]
    chance = torch.Generator().manual_seed(seed)
    plain = [F.normalize(torch.randn(len(latents), width, generator=chance), dim=1).to(tokens) for _ in range(RANDOM)]
    yield "random", [along(mean, one) for one in plain]


def along(mean: Tensor, directions: Tensor) -> Any:
    return lambda tokens: F.relu((tokens - mean) @ directions.T)


def purities(most: Tensor, animal: Tensor, breed: Tensor, chosen: dict[int, int]) -> tuple[float, float, float]:
    """Means over latents that enough images have; `most` [N K], `animal` [N K] of the patch where it is largest."""
    count = min(ANIMAL, len(most) // 2)  # fewer only in a quick look
    live = (most > 0).sum(0) >= count
    if not live.any():
        return float("nan"), float("nan"), float("nan")
    top = most[:, live].topk(count, 0).indices
    share = animal[:, live].gather(0, top).double().mean(0)
    breeds = breed[top[:BREED]]
    same = (breeds[:, None] == breeds[None]).sum(1).amax(0).double() / BREED
    told = [auroc(most[:, [latent]], breed == number)[0] for number, latent in chosen.items()]
    return float(torch.maximum(share, 1 - share).mean()), float(same.mean()), float(np.nanmean(told))


def auroc(values: Tensor, positive: Tensor) -> np.ndarray:
    """Of each column; ties count half."""
    here, count = positive.numpy(), int(positive.sum())
    if count in (0, len(here)):
        return np.full(values.shape[1], np.nan)
    ranks = rankdata(values.numpy(), axis=0)[here].sum(0)
    return np.asarray((ranks - count * (count + 1) / 2) / (count * (len(here) - count)))


def largest(half: Half, encode: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """How large each latent is in each image [N K], and in which patch."""
    found = [encode(tokens.to(device)).max(1) for tokens in half.tokens.split(16)]
    return torch.cat([one.values.cpu() for one in found]), torch.cat([one.indices.cpu() for one in found])


def measure(train: Half, test: Half, encode: Any, device: torch.device) -> np.ndarray:
    """The three measures, of all images and without each group of them: [1 + GROUPS, 3]."""
    learnt, _ = largest(train, encode, device)
    chosen = {number: int(auroc(learnt, train.breed == number).argmax()) for number in set(train.breed.tolist())}
    values, places = largest(test, encode, device)
    animal = test.animal.gather(1, places)
    group = torch.arange(len(values)) % GROUPS
    rows = [torch.ones(len(values), dtype=torch.bool), *(group != g for g in range(GROUPS))]
    return np.array([purities(values[row], animal[row], test.breed[row], chosen) for row in rows])


def jackknife(found: np.ndarray) -> list[dict[str, float]]:
    """Mean and interval of each column of [1 + GROUPS, 3]."""
    spread = np.sqrt((GROUPS - 1) / GROUPS * ((found[1:] - found[1:].mean(0)) ** 2).sum(0))
    return [interval(mean, mean - 1.96 * half, mean + 1.96 * half) for mean, half in zip(found[0], spread)]


def interval(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": float(mean), "low": float(low), "high": float(high)}


# ------------------------------------------------------------------------------------------------------------- effects


def losses(search: Search, latents: Latents, train: Half, test: Half, seed: int) -> dict[str, Any]:
    """What each breed loses in held-out images without the latent that was best for it in the others."""
    seen = search_seen(search, latents, train)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("effect", "control", "drop", "random", "on animal")}
    rows = []
    for number in sorted(set(test.breed.tolist())):
        own = [n for n, breed in zip(train.numbers, train.breed.tolist()) if breed == number]
        predicted = seen[[train.numbers.index(n) for n in own]].mean(0)
        best = predicted.topk(CANDIDATES).indices.tolist()
        made = search.of_class(latents, 0, (number, own, best))
        latent = best[int(made["effect"][:, 0].mean(1).argmax())]
        held = [n for n, breed in zip(test.numbers, test.breed.tolist()) if breed == number]
        told = of_held_out(search, latents, latent, number, held, test, seed)
        for name, values in told.items():
            found[name].append(values)
        rows.append({"class": search.model.label(number), "latent": latent})
        rows[-1] |= {name: float(np.nanmean(values)) for name, values in told.items()}
        print(f"  {rows[-1]}", flush=True)
    flat = {name: np.concatenate(values) for name, values in found.items()}
    pairs = {"effect − control": ("effect", "control"), "drop − random": ("drop", "random")}
    pairs["drop − on animal"] = ("drop", "on animal")
    flat |= {name: flat[one] - flat[other] for name, (one, other) in pairs.items()}
    return {"classes": rows, **{name: vars(Spread.of(values, seed)) for name, values in flat.items()}}


def search_seen(search: Search, latents: Latents, train: Half) -> Tensor:
    """The predicted effects of all latents in the images to choose on."""
    parts = [search.look_at(latents, search.reader[group]) for group in search.groups(train.numbers)]
    order = {int(n): i for i, n in enumerate(torch.cat([part["number"] for part in parts]))}
    predicted = torch.cat([part["predicted"] for part in parts])
    return predicted[[order[n] for n in train.numbers]]


def of_held_out(
    search: Search, latents: Latents, latent: int, number: int, held: list[int], test: Half, seed: int
) -> dict[str, np.ndarray]:
    """Effects and drops of one class, image by image."""
    parts: list[np.ndarray] = []
    for trace, numbers, patches in search.draw(search.reader[held]):
        by = measured_by(trace, [number] * len(trace))
        effect = ablate(trace, latents, latent, by, seed)[[0, 2]].cpu().double()
        a = latents.to(patches.new_zeros(0)).encode(patches)[..., latent]
        gone = remove(trace, by, a, numbers, seed)[[0, 2]]
        animal = torch.stack([test.animal[test.numbers.index(n)] for n in numbers])
        same = on_animal(trace, by, a, animal, numbers, seed)
        parts.append(torch.cat([effect, gone, same[None]]).numpy())
    whole = np.concatenate(parts, 1)
    return dict(zip(("effect", "control", "drop", "random", "on animal"), whole))


def on_animal(trace: Trace, by: Any, a: Tensor, animal: Tensor, numbers: list[int], seed: int) -> Tensor:
    """The logit lost without as many random patches of the animal (all of them and others, if it has fewer)."""
    before, found = scores(trace, by)[0], torch.full((len(trace),), torch.nan, dtype=torch.float64)
    for i, row in enumerate(a):
        gone = min(int((row > 0).sum()), int(MOST * len(row)))
        if gone == 0:
            continue
        chance = torch.Generator().manual_seed(1_000_003 * seed + numbers[i])
        orders = [(torch.rand(len(row), generator=chance) + animal[i]).argsort(descending=True) for _ in range(DRAWS)]
        keep = kept(trace, torch.stack([order[gone:].sort().values for order in orders]).to(row.device))
        after = by[0].of_rows([i] * DRAWS)(*ends_keeping(trace, [i] * DRAWS, keep))
        found[i] = float((before[i] - after.float()).mean())
    return found


# ---------------------------------------------------------------------------------------------------------------- both


def prove(model: vitreous.Model, given: argparse.Namespace) -> dict[str, Any]:
    begun, seed = time.time(), 0
    layer = round(given.layer * model.layout.layers) - 1
    data = match_labels(read_data(given.pets, given.pets / "masks"), model)
    train, test = (read(model, data, numbers, layer) for numbers in halves(data, given.classes))
    tokens = train.tokens.flatten(0, 1).to(model.device)
    print(f"{model.name}, layer {layer} of {model.layout.layers}, {len(train.breed)} images to fit to", flush=True)
    size = Size.of("sae", len(tokens), tokens.shape[1])
    fitted = [fit(tokens, "sae", size, seed + i, given.steps)[0] for i in range(given.seeds)]
    nmf = replace(fit(tokens, "nmf", Size.of("nmf", len(tokens), tokens.shape[1]), seed)[0], layer=layer)
    latents = replace(fitted[0], layer=layer, name="pets")
    measured = quality(latents, [own.to(model.device) for own in test.tokens])
    agreed = stability(latents, fitted[1:], tokens, seed)
    told: dict[str, Any] = {"layer": layer, "layers": model.layout.layers, "latents": len(latents), "k": latents.k}
    told |= {"images": [len(train.breed), len(test.breed)], "dead": measured.dead}
    told["explained variance"] = vars(Spread.of(measured.explained, seed))
    if agreed is not None:
        told["stability"] = {"mean": float(agreed.mean.mean()), "control": float(agreed.control.mean())}
        told["stability"] |= {"stable": int(agreed.stable.sum()), "threshold": agreed.threshold}
    print(f"  {told} after {time.time() - begun:.0f} s", flush=True)
    found = {}
    for name, encoders in bases(train, latents, nmf, seed):
        found[name] = np.mean([measure(train, test, encode, model.device) for encode in encoders], axis=0)
    told["purity"] = {name: dict(zip(MEASURES, jackknife(values))) for name, values in found.items()}
    control = found["random"]
    for name, values in found.items():
        told["purity"][name]["gain"] = dict(zip(MEASURES, jackknife(values - control)))
        print(f"  {name}: {told['purity'][name]}", flush=True)
    search = Search(model, data, layer, seed, Shards(None, {}))
    told["losses"] = losses(search, latents, train, test, seed)
    return {**told, "seconds": round(time.time() - begun), "device": str(model.device)}


def spelled(one: dict[str, float], digits: int = 2) -> str:
    ends = [f"{one[end]:.{digits}f}".replace("-", "−") for end in ("mean", "low", "high")]
    return f"{ends[0]} [{ends[1]}, {ends[2]}]"


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = []
    for name, told in found.items():
        lines += [f"**{name}**, layer {told['layer']} of {told['layers']}, {told['latents']} latents, k = {told['k']}"]
        heads = [head for said in MEASURES.values() for head in (said, "more than random")]
        lines += ["", f"| directions | {' | '.join(heads)} |", "|---" * 7 + "|"]
        for basis, one in told["purity"].items():
            cells = [cell for what in MEASURES for cell in (one[what], one["gain"][what])]
            lines.append(f"| {basis} | {' | '.join(map(spelled, cells))} |")
        lost = told["losses"]
        lines += ["", "| logit of the breed, held-out images | lost |", "|---|---|"]
        names = {"drop": "without the patches of its best latent", "random": "without as many random patches"}
        names |= {"on animal": "without as many random patches of the animal", "drop − random": "more than random"}
        names |= {"drop − on animal": "more than random on the animal", "effect": "without the latent in the tokens"}
        names |= {"control": "without as much along a random direction", "effect − control": "more than that"}
        lines += [f"| {said} | {spelled(lost[key])} |" for key, said in names.items()]
        said = f"explained variance {spelled(told['explained variance'])}, {told['dead']} dead latents"
        if "stability" in told:
            one = told["stability"]
            said += f", cosine over seeds {one['mean']:.2f} (random {one['control']:.2f}), {one['stable']} stable"
        lines += ["", f"{said}; {told['seconds']} s on {told['device']}", ""]
    return "\n".join(lines)


def draw(found: dict[str, Any], file: Path) -> None:
    """Purities with their intervals, a panel for each model and measure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(found), 3, figsize=(10, 2.3 * len(found)), squeeze=False, sharey=True)
    for row, (name, told) in zip(panels, found.items()):
        for axes, (what, said) in zip(row, MEASURES.items()):
            for y, (basis, one) in enumerate(reversed(told["purity"].items())):
                own, colour = one[what], "0.6" if basis.startswith("random") else "C0"
                axes.plot([own["low"], own["high"]], [y, y], color=colour, linewidth=2)
                axes.plot([own["mean"]], [y], "o", color=colour)
            axes.set_yticks(range(len(told["purity"])), list(reversed(told["purity"])))
            axes.set_title(f"{name}: {said}", fontsize=9, loc="left")
            axes.tick_params(labelsize=8)
            axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
