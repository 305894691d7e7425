"""Studies: images a second beside the bare method's own, and memory over the length of a study.

python benchmarks/study.py DATA                       ratio of `study cass` to the bare method, same machine, same run
python benchmarks/study.py DATA --memory              peak memory of 200 against 2,000 images
python benchmarks/study.py DATA --kind maps --methods attention --images 4000 --device cuda
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import vitreous
from vitreous.evaluation.study.kind import Kind, Scene
from vitreous.evaluation.study.run import make_kind
from vitreous.images.dataset import Data, read_data
from vitreous.models.model import Model
from vitreous.trace.apply import images_at_once
from vitreous.trace.target import Top
from vitreous.trace.trace import Trace


def main() -> None:
    given = parse()
    data = repeated(read_data(given.data), given.images)
    if given.memory:
        return memory(given)
    model = vitreous.load(given.model, given.weights, given.device)
    options: dict[str, Any] = {"cass": {"samples": given.samples}} if given.kind == "cass" else {}
    kind = make_kind(given.kind, given.methods, None, options, data, 0)
    if given.peak:
        study(given, data, model, kind, options)
        print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return None
    batch = given.batch or images_at_once(model)
    print(f"{model.name} on {model.device}, {torch.get_num_threads()} threads, {len(data)} images, batches of {batch}")
    bare(data, model, kind, batch, 2 * batch)  # warm
    rates: dict[str, list[float]] = {"bare": [], "study": []}
    for _ in range(given.repeats):
        rates["bare"].append(bare(data, model, kind, batch, max(batch, min(len(data), given.bare))))
        rates["study"].append(study(given, data, model, kind, options))
        print("  ".join(f"{name} {values[-1]:8.2f} images/s" for name, values in rates.items()), flush=True)
    ratios = [s / b for s, b in zip(rates["study"], rates["bare"])]
    print(f"{given.kind}: {statistics.median(ratios):.2f} of the bare method's rate (median of {len(ratios)})")
    return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--kind", default="cass")
    parser.add_argument("--methods")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--bare", type=int, default=64, help="images of the bare method")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--device")
    parser.add_argument("--decode", default="cpu", help="where JPEG files are decoded: cpu, gpu or auto")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", action="store_true", help="run once and print the peak memory, in MiB")
    return parser.parse_args()


def repeated(data: Data, images: int) -> Data:
    """As many pictures as asked for, each as often as needed."""
    from dataclasses import replace

    chosen = [data.samples[i % len(data)] for i in range(images)]
    return Data(data.source, tuple(replace(s, name=f"{i:06d}/{s.name}") for i, s in enumerate(chosen)))


def bare(data: Data, model: Model, kind: Kind, batch: int, images: int) -> float:
    """The method alone on tensors that are ready: nothing is read, nothing is written."""
    ready = [
        model.prepare([sample.image for sample in data.samples[start : start + batch]])
        for start in range(0, images, batch)
    ]
    begun = now(model)
    for each in ready:
        trace = Trace(model, each)
        trace.whole()
        target = Top(1).fix(trace.output) if kind.targeted else None
        kind.work(Scene(trace, target, [None] * len(each), [False] * len(each)))
    return sum(map(len, ready)) / (now(model) - begun)


def study(given: argparse.Namespace, data: Data, model: Model, kind: Kind, options: dict[str, Any]) -> float:
    """The whole study, from the first picture's file to the last row on disk."""
    folder = tempfile.mkdtemp()
    _ = model.layout
    begun = now(model)
    try:
        vitreous.run_study(
            given.kind,
            data,
            model,
            folder,
            methods=given.methods,
            options=options,
            target="top-1" if kind.targeted else None,
            batch=given.batch,
            workers=given.workers,
            decode=given.decode,
        )
        return len(data) / (now(model) - begun)
    finally:
        shutil.rmtree(folder)


def now(model: Model) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(given: argparse.Namespace) -> None:
    """Each length in a process of its own."""
    rest = ["--kind", given.kind, "--samples", str(given.samples), "--model", given.model, "--weights", given.weights]
    rest += ["--methods", given.methods] if given.methods else []
    for images in (200, 2000):
        command = [sys.executable, __file__, given.data, "--peak", "--images", str(images), *rest]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(f"{images:5d} images: peak {json.loads(told.splitlines()[-1])['peak']:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
