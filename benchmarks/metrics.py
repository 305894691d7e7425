"""Our metrics beside Quantus and pytorch-grad-cam on the same input: do they agree, and how much faster are they?

    pip install quantus grad-cam
    python benchmarks/metrics.py [--weights FILE] [--images 1] [--repeats 3] [--device cpu]

Both sides run in turns, so that whatever else the machine does meets both alike; shown is the ratio of the medians and
of the fastest runs. Absolute times mean nothing on a shared machine and are not shown.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peers import need
from torch import Tensor, nn

import vitreous
from vitreous.metrics.faithfulness.sensitivity_n import draw

SHARES = (0.2, 0.4, 0.6, 0.8)
Job = Callable[[], np.ndarray]


class Setting:
    """One model, some photographs, their maps and classes."""

    def __init__(self, model: vitreous.Model, images: Tensor) -> None:
        self.model, self.images = model, images
        with torch.no_grad():
            self.targets = model.net(images).argmax(1)
        self.classes = self.targets.cpu().numpy()
        found = vitreous.explain(model, images, "gae", list(self.classes))
        self.maps = found.map.cpu()  # [B h w]
        y, x = self.patch = images.shape[-2] // self.maps.shape[-2], images.shape[-1] // self.maps.shape[-1]
        self.pixels = self.maps.repeat_interleave(y, 1).repeat_interleave(x, 2).numpy()  # [B Y X]

    def ours(self, metric: str, **options: Any) -> vitreous.Score:
        return vitreous.evaluate(self.model, self.images, self.maps, metric, list(self.classes), **options)


# --------------------------------------------------------------------------------------------------------- two by two


def deletion(given: Setting) -> tuple[Job, Job]:
    """The probability after each of all patches is hidden by zeros: Quantus as it is.

    It counts each channel of a pixel as a feature, but checks its steps against the pixels, so that a whole patch
    (3 · 256 features) is refused as a step: every third of its steps ends a patch.
    """
    quantus = need("quantus", "quantus")
    pixels = given.images[0, 0].numel() // given.maps[0].numel()
    flipping = quantus.PixelFlipping(features_in_step=pixels, perturb_baseline=0.0, **quiet())
    return lambda: patch_by_patch(given), lambda: call(flipping, given, softmax=True)[:, 2::3]


def deletion_unchecked(given: Setting) -> tuple[Job, Job]:
    """The same without that check: a patch is a step, so that both run the network as often."""
    quantus = need("quantus", "quantus")

    class Patchwise(quantus.PixelFlipping):  # type: ignore[misc, name-defined]
        def custom_preprocess(self, **kwargs: Any) -> None:
            return None

    features = given.images[0].numel() // given.maps[0].numel()
    flipping = Patchwise(features_in_step=features, perturb_baseline=0.0, **quiet())
    return lambda: patch_by_patch(given), lambda: call(flipping, given, softmax=True)


def patch_by_patch(given: Setting) -> np.ndarray:
    curve = given.ours("deletion", steps=None, fill="zero").curve
    assert curve is not None
    return curve[:, 1:].numpy()


def sensitivity(given: Setting) -> tuple[Job, Job]:
    """Pearson's r over random sets of a fifth of the patches: the same sets, handed to Quantus as its chance."""
    quantus = need("quantus", "quantus")
    trace = vitreous.Trace(given.model, given.images)
    sets = draw(trace, (0.2,), 50, 0).cpu()
    size = int(sets[0, 0].sum())
    metric = quantus.FaithfulnessCorrelation(nr_runs=50, subset_size=size, perturb_baseline=0.0, **quiet())
    cover = trace.images.mean((2, 3), keepdim=True).expand_as(trace.images)

    def one(i: int) -> float:
        model = Patches(given.model.net, given.images[i : i + 1], cover[i : i + 1]).eval()
        chosen = [one.nonzero()[:, 0].numpy() for one in sets[i]]
        with mock.patch("numpy.random.choice", side_effect=chosen):
            grid = np.ones((1, 1, *given.maps.shape[1:]), dtype=np.float32)
            return run(metric, model, grid, given.classes[i : i + 1], given.maps[i : i + 1, None].numpy())[0]

    return (
        lambda: given.ours("sensitivity_n", shares=(0.2,), subsets=50).value.numpy(),
        lambda: np.array([one(i) for i in range(len(given.images))]),
    )


class Patches(nn.Module):
    """An image as a grid [B 1 h w] of ones; where there is none, the patch is hidden."""

    def __init__(self, net: nn.Module, image: Tensor, cover: Tensor) -> None:
        super().__init__()
        self.net, self.image, self.cover = net, image, cover

    def forward(self, grid: Tensor) -> Tensor:
        shown = nn.functional.interpolate(grid, self.image.shape[-2:], mode="nearest") > 0
        return self.net(torch.where(shown, self.image, self.cover))


def gini(given: Setting) -> tuple[Job, Job]:
    quantus = need("quantus", "quantus")
    metric = quantus.Sparseness(**quiet() | {"abs": True})
    grid = np.ones((len(given.maps), 1, *given.maps.shape[1:]), dtype=np.float32)
    maps = given.maps[:, None].numpy()
    return (
        lambda: given.ours("gini").value.numpy(),
        lambda: run(metric, given.model.net, grid, given.classes, maps.copy()),
    )


def road(given: Setting) -> tuple[Job, Job]:
    """Without its noise, which each library draws in its own way."""
    need("pytorch_grad_cam", "grad-cam")
    theirs = importlib.import_module("pytorch_grad_cam.metrics.road")
    softmax = importlib.import_module("pytorch_grad_cam.utils.model_targets").ClassifierOutputSoftmaxTarget
    targets = [softmax(int(number)) for number in given.classes]
    imputer = theirs.NoisyLinearImputer(noise=0.0)

    def both() -> np.ndarray:
        points = []
        for share in SHARES:
            ways = [
                theirs.PerturbationConfidenceMetric(remove(100 * (1 - share), imputer))(
                    given.images, given.pixels, targets, given.model.net
                )
                for remove in (theirs.RemoveLeastRelevantFirst, theirs.RemoveMostRelevantFirst)
            ]
            points.append((ways[0] - ways[1]) / 2)
        return np.stack(points, 1)

    def ours() -> np.ndarray:
        curve = given.ours("road", shares=SHARES, noise=0.0).curve
        assert curve is not None
        return curve.numpy()

    return ours, both


def quiet() -> dict[str, Any]:
    return {"abs": False, "normalise": False, "disable_warnings": True, "display_progressbar": False}


def call(metric: Any, given: Setting, softmax: bool) -> np.ndarray:
    return run(
        metric, given.model.net, given.images.cpu().numpy(), given.classes, given.pixels[:, None], softmax=softmax
    )


def run(metric: Any, net: nn.Module, x: np.ndarray, y: np.ndarray, a: np.ndarray, softmax: bool = False) -> np.ndarray:
    device = str(next(net.parameters()).device)
    return np.array(metric(model=net, x_batch=x, y_batch=y, a_batch=a, device=device, softmax=softmax))


PAIRS: dict[str, tuple[str, Callable[[Setting], tuple[Job, Job]]]] = {
    "deletion, patch by patch": ("Quantus PixelFlipping", deletion),
    "deletion, equal runs": ("… with a patch as one step", deletion_unchecked),
    "sensitivity_n": ("Quantus FaithfulnessCorrelation", sensitivity),
    "gini": ("Quantus Sparseness", gini),
    "road": ("pytorch-grad-cam ROADCombined", road),
}


# ---------------------------------------------------------------------------------------------------------- measuring


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def timed(job: Job) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    found = job()
    return time.perf_counter() - start, found


def compare(ours: Job, theirs: Job, repeats: int) -> tuple[float, float, float]:
    """The largest difference, and how many times as long the other takes: medians and fastest."""
    taken: list[tuple[float, float]] = []
    worst = 0.0
    for _ in range(repeats):
        (a, mine), (b, other) = timed(ours), timed(theirs)
        taken.append((a, b))
        worst = max(worst, float(np.abs(mine - other).max()))
    mine, other = zip(*taken)
    return worst, statistics.median(other) / statistics.median(mine), min(other) / min(mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a DeiT-Tiny checkpoint; default: the embedded model, of the same size")
    parser.add_argument("--images", type=int, default=1, help="of the packaged photographs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="metrics that begin like this")
    given = parser.parse_args()
    name = "deit_tiny_patch16_224" if given.weights else None
    model = vitreous.load(name, weights=given.weights, device=given.device)
    photos = sorted((Path(vitreous.__file__).parent / "assets" / "photos").glob("*.jpg"))
    setting = Setting(model, model.prepare([photos[i % len(photos)] for i in range(given.images)]))
    print(f"{model.name}, {given.images} images, {given.device}, {torch.get_num_threads()} threads\n")
    print("| metric | beside | largest difference | times as fast, median | fastest |\n|---|---|---|---|---|")
    for metric, (other, make) in PAIRS.items():
        if metric.startswith(given.only):
            try:
                with silent():
                    worst, median, fastest = compare(*make(setting), given.repeats)
            except ImportError as error:
                sys.exit(str(error))
            speed = f"{median:.1f} | {fastest:.1f}" if metric != "gini" else "runs no network |"
            print(f"| {metric} | {other} | {worst:.1e} | {speed} |", flush=True)


if __name__ == "__main__":
    main()
