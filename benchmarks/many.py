"""One study of twelve methods and two targets beside the sum of single runs: passes, operations, time.

python benchmarks/many.py                                   counted passes and operations of one batch
python benchmarks/many.py --time --images 64                time of the maps, on tensors in memory
python benchmarks/many.py --study DATA --images 10000       time of whole studies, from files to rows on disk

Single runs are counted in two ways. "each target": one method and one target at a time; what does not depend on the
target runs once. "each method": one method at a time, with both targets, which share its forward pass.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from counting import Flops, counted_runs
from study import now, repeated

import vitreous
from vitreous.attribute import attribute_all
from vitreous.evaluation.study.kind import Scene
from vitreous.evaluation.study.maps import Maps
from vitreous.images.dataset import Data, read_data
from vitreous.models.model import Model
from vitreous.registry import METHODS
from vitreous.trace.apply import images_at_once
from vitreous.trace.target import Top
from vitreous.trace.trace import Trace
from vitreous.types import Images

CHOSEN = (
    *("attention", "rollout", "norm_attention"),  # look at attention, whatever the target
    *("gae", "grad_rollout", "cdam", "gradcam", "gradient", "input_x_gradient"),  # the model's own gradient
    *("attn_lrp", "libra_fullgrad", "legrad"),  # a graph of their own each
)
RANKS = (1, 2)  # the targets: the best and the second best class
Work = Callable[[], object]


def main() -> None:
    given = parse()
    model = vitreous.load(given.model, given.weights, given.device, given.dtype)
    methods = given.methods.split(",")
    images = given.images or (8 if model.device.type == "cpu" else 512)
    print(f"{model.name}, {given.dtype or 'float32'}, on {model.device}; {len(methods)} methods, {len(RANKS)} targets")
    if given.study:
        study(model, methods, repeated(read_data(given.study), images), given.workers, given.repeats)
    elif given.time:
        timed(model, methods, images, given.batch or images_at_once(model), given.repeats, given.each)
    else:
        counted(model, methods, given.batch or 2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--study", metavar="DATA")
    parser.add_argument("--each", action="store_true", help="also the time of each method")
    parser.add_argument("--images", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--methods", default=",".join(CHOSEN))
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", default="random")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------------- what is run


def together(model: Model, methods: Sequence[str], images: Images) -> list[dict[str, Any]]:
    """The maps of a batch as a study makes them."""
    kind = Maps.make(methods)
    trace = Trace(model, images)
    kind.begin(trace)
    nothing = [None] * len(images)
    scenes = [Scene(trace, Top(rank).fix(trace.output), nothing, [False] * len(images)) for rank in RANKS]
    made = kind.work_all(scenes)
    for name, outcome in (item for scene in made for item in scene.items()):
        if outcome.error is not None:
            raise RuntimeError(name) from outcome.error
    return [{name: outcome.map for name, outcome in scene.items()} for scene in made]


def single(model: Model, method: str, images: Images, ranks: Sequence[int]) -> object:
    """The maps of one method alone."""
    declared = METHODS[method]
    made = attribute_all(Trace(model, images), declared, [Top(rank) for rank in ranks], declared.check({}))
    return [one.map.cpu() for one in made]


def ranks_of(method: str) -> tuple[int, ...]:
    """The targets that a method depends on."""
    return RANKS if METHODS[method].targeted else RANKS[:1]


def each_target(model: Model, methods: Sequence[str], images: Images) -> None:
    for method in methods:
        for rank in ranks_of(method):
            single(model, method, images, [rank])


def each_method(model: Model, methods: Sequence[str], images: Images) -> None:
    for method in methods:
        single(model, method, images, ranks_of(method))


WAYS = {"together": together, "each target": each_target, "each method": each_method}


# ------------------------------------------------------------------------------------------------------------ counted


def counted(model: Model, methods: Sequence[str], count: int) -> None:
    images = torch.randn(count, 3, *model.size, device=model.device, dtype=model.dtype)
    together(model, methods, images)  # what is found out once for a model is no part of the cost
    forward = passes_of(lambda: model.run(images))[2]
    print("| | forward passes | backward passes | operations, in forward passes | share |\n|---|---|---|---|---|")
    found = {name: passes_of(lambda way=way: way(model, methods, images)) for name, way in WAYS.items()}  # type: ignore[misc]
    for name, (runs, backs, operations) in found.items():
        share = found["together"][2] / operations
        print(f"| {name} | {runs} | {backs} | {operations / forward:.2f} | {share:.2f} |", flush=True)


def passes_of(work: Work) -> tuple[int, int, int]:
    """Forward passes, backward passes and operations."""
    with counted_runs() as runs, counted_backwards() as backs, Flops() as counter:
        work()
    return len(runs), len(backs), counter.total


@contextmanager
def counted_backwards() -> Iterator[list[int]]:
    """The number of tensors that each backward pass asks for."""
    backs: list[int] = []
    grad = torch.autograd.grad

    def noted(outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        backs.append(len(inputs) if isinstance(inputs, list | tuple) else 1)
        return grad(outputs, inputs, *rest, **options)

    with mock.patch("torch.autograd.grad", noted):
        yield backs


# -------------------------------------------------------------------------------------------------------------- timed


def timed(model: Model, methods: Sequence[str], count: int, batch: int, repeats: int, each: bool) -> None:
    """In turns; the fastest of each."""
    batch = min(batch, count)
    ready = [
        torch.randn(batch, 3, *model.size, device=model.device, dtype=model.dtype) for _ in range(-(-count // batch))
    ]
    print(f"{len(ready) * batch} images in batches of {batch}, {torch.get_num_threads()} threads, {repeats} rounds")
    ways: dict[str, Callable[[Images], object]] = {
        name: (lambda part, way=way: way(model, methods, part))  # type: ignore[misc]
        for name, way in WAYS.items()
    }
    if each:
        ways |= {
            name: (lambda part, name=name: single(model, name, part, ranks_of(name)))  # type: ignore[misc]
            for name in methods
        }
    for way in ways.values():
        way(ready[0])  # warm
    best: dict[str, float] = {}
    for _ in range(repeats):
        for name, way in ways.items():
            best[name] = min(best.get(name, float("inf")), seconds(model, way, ready))
    plain = min(seconds(model, lambda part: plain_pass(model, part), ready) for _ in range(2 + repeats))
    for name, took in best.items():
        share = f"  together is {best['together'] / took:.2f} of it" if name in WAYS else ""
        print(f"{name:18s} {took:8.3f} s  {took / plain:6.2f} forward passes{share}", flush=True)


def plain_pass(model: Model, part: Images) -> object:
    with torch.no_grad(), model.still():
        return model.run(part)


def seconds(model: Model, way: Callable[[Images], object], ready: list[Images]) -> float:
    begun = now(model)
    for part in ready:
        way(part)
    return now(model) - begun


# ------------------------------------------------------------------------------------------------------ whole studies


def study(model: Model, methods: Sequence[str], data: Data, workers: int | None, repeats: int) -> None:
    """The time of the study of all, and the sum of those of each method and target alone."""
    print(f"{len(data)} images")
    asked = [f"top-{rank}" for rank in RANKS]
    for _ in range(repeats):
        whole = one_study(model, list(methods), asked, data, workers)
        print(f"together     {whole:8.2f} s  {len(data) / whole:7.0f} images/s", flush=True)
        total = 0.0
        for method in methods:
            took = [one_study(model, [method], asked[k : k + 1], data, workers) for k in range(len(ranks_of(method)))]
            print(f"  {method:18s} {'  '.join(f'{one:7.2f} s' for one in took)}", flush=True)
            total += sum(took)
        print(f"each target  {total:8.2f} s  together is {whole / total:.2f} of it", flush=True)


def one_study(model: Model, methods: list[str], asked: list[str], data: Data, workers: int | None) -> float:
    folder = tempfile.mkdtemp()
    _ = model.layout
    begun = time.perf_counter()
    try:
        vitreous.run_study("maps", data, model, folder, methods=methods, target=asked, workers=workers)
        return time.perf_counter() - begun
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
