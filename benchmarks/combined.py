"""Is a combination better than the best single map? Chosen on one half of the images, judged on the other.

    python benchmarks/combined.py DATA OUT.json [--model NAME --weights FILE]

Two choices are made on the even images and judged on the odd ones, by metrics that did not make them as well:

* the weight of a second method beside the first, by token_deletion: `ensemble`;
* the best of all candidates of `optimus`, by token_deletion: the same candidate for every image.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import vitreous
from vitreous import Model, Trace
from vitreous._support.statistics import intervals
from vitreous.images.dataset import read_data
from vitreous.methods.arbitration.optimus import candidates, quick_maps
from vitreous.models.match_labels import match_labels
from vitreous.trace.target import Class

FIRST = "centred_lrp"
SECOND = ("token_ablation", "grad_rollout", "gradcam", "libra_fullgrad", "attn_lrp")
WEIGHTS = (0.1, 0.25, 0.5, 1.0, 2.0)  # of the second; the first has one
JUDGES = ("srg", "token_deletion", "insertion", "deletion")
BATCH = 100


class Half:
    """Some of the images, their classes, and the value of maps by a metric."""

    def __init__(self, model: Model, images: Tensor, labels: list[int]) -> None:
        self.model, self.images, self.labels = model, images, labels

    def value(self, maps: Tensor, metric: str) -> np.ndarray:
        found = vitreous.evaluate(self.model, self.images, maps.cpu(), metric, target=self.labels)
        sign = 1 if found.better == "higher" else -1
        return sign * found.value.double().numpy()

    def parts(self) -> list[tuple[Tensor, list[int]]]:
        starts = range(0, len(self.images), BATCH)
        return [(self.images[i : i + BATCH], self.labels[i : i + BATCH]) for i in starts]

    def maps(self, method: str) -> Tensor:
        made = [vitreous.explain(self.model, images, method, labels).map for images, labels in self.parts()]
        return torch.cat(made)

    def candidates(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for images, labels in self.parts():
            trace, target = Trace(self.model, images), Class(tuple(labels))
            with torch.no_grad():
                names, maps = candidates(trace, target, single_heads=True)
                every = {**dict(zip(names, maps.unbind(1))), **quick_maps(trace, target)}
            for name, one in every.items():
                found.setdefault(name, []).append(one.float().cpu())
        return {name: torch.cat(parts) for name, parts in found.items()}


def share(maps: Tensor) -> Tensor:
    return maps / maps.abs().sum((1, 2), keepdim=True)


def compared(half: Half, maps: Tensor, other: Tensor) -> dict[str, Any]:
    """How much better the first maps are than the others on each metric, with intervals."""
    told = {}
    for metric in JUDGES:
        ours, theirs = half.value(maps, metric), half.value(other, metric)
        low, high = intervals((ours - theirs)[None])[:, 0]
        gain = (ours - theirs).mean()
        told[metric] = {"value": abs(ours.mean()), "other": abs(theirs.mean()), "gain": gain, "interval": [low, high]}
    return told


def combine(fitted: Half, judged: Half) -> dict[str, Any]:
    first, told = {half: share(half.maps(FIRST)) for half in (fitted, judged)}, {}
    alone = fitted.value(first[fitted], "token_deletion").mean()
    for name in SECOND:
        second = {half: share(half.maps(name)) for half in (fitted, judged)}

        def joined(half: Half, weight: float, second: dict[Half, Tensor] = second) -> Tensor:
            return first[half] + weight * second[half].to(first[half])

        tried = {weight: fitted.value(joined(fitted, weight), "token_deletion").mean() for weight in WEIGHTS}
        best = max(tried, key=lambda weight: tried[weight])
        told[name] = {
            "weight": best,
            "gain on the fitted half": tried[best] - alone,
            **compared(judged, joined(judged, best), first[judged]),
        }
    return told


def held_out_optimus(fitted: Half, judged: Half) -> dict[str, Any]:
    tried = {name: fitted.value(maps, "token_deletion").mean() for name, maps in fitted.candidates().items()}
    ranked = sorted(tried, key=lambda name: -tried[name])
    best = judged.candidates()[ranked[0]]
    return {
        "candidates": len(tried),
        "chosen": ranked[:5],
        **compared(judged, best, judged.maps(FIRST)),
        "against attn_lrp": compared(judged, best, judged.maps("attn_lrp")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--device")
    parser.add_argument("--optimus", type=int, default=100, help="images whose halves choose and judge a candidate")
    args = parser.parse_args()
    model = vitreous.load(args.model, args.weights, args.device)
    samples = [one for one in match_labels(read_data(args.data), model).samples if isinstance(one.label, int)]
    labels = [int(one.label) for one in samples if one.label is not None]
    starts = range(0, len(samples), BATCH)
    images = torch.cat([model.prepare([str(one.image) for one in samples[i : i + BATCH]]) for i in starts])

    def halves(count: int | None) -> list[Half]:
        made = partial(Half, model)
        return [made(images[:count][i::2], labels[:count][i::2]) for i in (0, 1)]

    told = {
        "model": model.name, "data": Path(args.data).name, "images": len(images),
        "ensemble": combine(*halves(None)), "optimus": held_out_optimus(*halves(args.optimus)),
    }  # fmt: skip
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(json.dumps(told, indent=1, default=float), encoding="utf-8")
    print(json.dumps(told, indent=1, default=float))


if __name__ == "__main__":
    main()
