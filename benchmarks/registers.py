"""What test-time registers do to a real network: its outliers, the attention they take, its accuracy and its maps.

python benchmarks/registers.py --weights deit_tiny_patch16_224.safetensors --images imagenet-samples --pets pets

`--images`: a folder of photos with a labels.csv (name, imagenet_index); `--pets`: one with folders images and masks
beside such a file. Register neurons are found on some photos, and everything is measured on the others.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import vitreous
from vitreous.inspect.outliers.measure import Images, norms_of, ratios_of, shares_of

FOUND_ON = 64
LOOKED_AT = 64
METHODS = ("attention", "rollout", "gae")


@dataclass(frozen=True)
class Photos:
    """Files and the numbers of their classes."""

    files: list[str]
    labels: np.ndarray

    @classmethod
    def read(cls, folder: Path, inside: str = "") -> Photos:
        with (folder / "labels.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        name = next(key for key in rows[0] if key in ("name", "image", "file"))
        files = [str(next((folder / inside).glob(f"{Path(row[name]).stem}.*"))) for row in rows]
        return cls(files, np.array([int(row["imagenet_index"]) for row in rows]))

    def part(self, order: Sequence[int] | np.ndarray) -> Photos:
        return Photos([self.files[i] for i in order], self.labels[list(order)])


def guesses(model: vitreous.Model, files: list[str], batch: int = 16) -> np.ndarray:
    """The best class of each photo."""
    parts = [files[i : i + batch] for i in range(0, len(files), batch)]
    with torch.no_grad(), model.still():
        found = [model.run(model.prepare(part)).argmax(1) for part in parts]
    return torch.cat(found).cpu().numpy()


def describe(model: vitreous.Model, files: list[str]) -> None:
    """The norms of the tokens that leave each block, against the median of their image."""
    ratios = ratios_of(norms_of(Images(model, files)))
    print("layer  99 %  largest  mean of the largest  above 1.5  above 2  above 3")
    for layer in range(ratios.shape[1]):
        one = ratios[:, layer]
        above = [f"{(one > ratio).mean():8.2%}" for ratio in (1.5, 2, 3)]
        top, largest = np.quantile(one, 0.99), one.max((1, 2))
        print(f"{layer:5d}  {top:.2f}  {largest.max():7.2f}  {largest.mean():19.2f}  {'  '.join(above)}")


def compare(plain: vitreous.Model, repaired: vitreous.Model, files: list[str], ratio: float) -> None:
    """Outliers before and after, and the attention at the places where they were."""
    seen = vitreous.inspect.registers(plain, files, ratio=ratio)
    after = ratios_of(norms_of(Images(repaired, files)))
    there = seen.outliers
    counts = seen.ratios[:, seen.layer] > ratio, after[:, seen.layer] > ratio
    print(f"  outliers an image: {counts[0].sum() / len(files):.2f} -> {counts[1].sum() / len(files):.2f}")
    mean = seen.ratios[:, seen.layer][there].mean(), after[:, seen.layer][there].mean()
    print(f"  their norm against the median: {mean[0]:.2f} -> {mean[1]:.2f}; share of the tokens {seen.even_share:.1%}")
    shares = shares_of(Images(repaired, files), there)
    for what, before, behind in zip(("read-out", "all tokens"), (seen.read_share, seen.mean_share), shares):
        pairs = [f"{a:.1%}->{b:.1%}" for a, b in zip(seen.share(before)[-4:], seen.share(behind)[-4:])]
        print(f"  attention of {what} at these places, last four layers: {'  '.join(pairs)}")


def maps(plain: vitreous.Model, repaired: vitreous.Model, pets: Path, count: int, metrics: list[str]) -> None:
    """How well maps agree with masks of the animals, and how faithful they are to their own network."""
    photos = Photos.read(pets, "images")
    photos = photos.part(np.random.default_rng(1).permutation(len(photos.files))[:count])
    masks = [str(next((pets / "masks").glob(f"{Path(file).stem}.*"))) for file in photos.files]
    for method in METHODS:
        for metric in metrics:
            scores = []
            for model in (plain, repaired):
                more = {"masks": masks} if vitreous.METRICS[metric].masks else {}
                target = [int(label) for label in photos.labels]
                found = vitreous.evaluate(model, photos.files, method, metric, target=target, **more)
                scores.append(np.asarray(found.value, np.float64))
            change = scores[1] - scores[0]
            known = np.isfinite(change)  # an image whose map or mask is even has no score
            error = change[known].std(ddof=1) / known.sum() ** 0.5
            means = " -> ".join(f"{score[known].mean():.3f}" for score in scores)
            print(
                f"  {method:10s} {metric:8s} {means} ({change[known].mean():+.3f} ± {error:.3f}), {known.sum()} photos"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--pets", type=Path)
    parser.add_argument("--ratio", type=float, nargs="+", default=[1.5, 2.0])
    parser.add_argument("--neurons", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--count", type=int, nargs="+", default=[1])
    parser.add_argument("--photos", type=int, default=48, help="of the pets")
    parser.add_argument("--metrics", nargs="+", default=["mask_ap", "pointing_game", "srg"], help="on the pets")
    given = parser.parse_args()
    model = vitreous.load(given.model, weights=given.weights)
    photos = Photos.read(given.images)
    order = np.random.default_rng(0).permutation(len(photos.files))
    finding, others = photos.part(order[:FOUND_ON]), photos.part(order[FOUND_ON:])
    describe(model, others.files[:LOOKED_AT])
    before = guesses(model, others.files)
    print(f"top-1 of {len(others.files)} photos: {np.mean(before == others.labels):.1%}")
    repaired = None
    for ratio in given.ratio:
        seen = vitreous.inspect.registers(model, finding.files, ratio=ratio, most=max(given.neurons))
        print(f"ratio {ratio}: {seen.said}; they appear in layer {seen.onset}")
        print("  neurons:", " ".join(f"{u.layer}/{u.unit} ({u.times:.0f}×)" for u in seen.units))
        for most in given.neurons:
            for count in given.count:
                units = [(unit.layer, unit.unit) for unit in seen.units[:most]]
                repaired = vitreous.with_registers(model, count, neurons=units)
                after = guesses(repaired, others.files)
                same = np.mean(before == after)
                top = np.mean(after == others.labels)
                print(f"ratio {ratio}, {most} neurons, {count} registers: top-1 {top:.1%}, same class {same:.1%}")
                compare(model, repaired, others.files[:LOOKED_AT], ratio)
                if given.pets:
                    maps(model, repaired, given.pets, given.photos, given.metrics)


if __name__ == "__main__":
    main()
