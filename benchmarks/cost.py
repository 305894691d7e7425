"""The cost of every method in forward passes of the same batch, measured in one run.

    python benchmarks/cost.py [--weights FILE] [--batch 8] [--repeats 15] [--device cpu] [--methods cdam,gae] [--memory]
    python benchmarks/cost.py --batch 1 --repeats 3 --methods token_ablation,occlusion,value_zeroing --image photo.jpg

Plain forward and methods are interleaved, so that whatever else the machine does meets all of them alike; shown are the
ratio of the medians and of the fastest runs. Absolute times mean nothing on a shared machine and are not shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import vitreous

LIMITS = {"attention": 1.1, "rollout": 1.25, "cdam": 1.15, "gradcam": 1.15, "gae": 2.5, "grad_rollout": 2.5}
LIMITS |= {f"cdam, {k} targets": 1.15 + 0.1 * k for k in (2, 5)}
LIMITS_ALONE = {  # of methods that take one image at a time: in forwards of one image
    "token_ablation": 110,
    "occlusion": 110,
    "value_zeroing": 80,
    "value_zeroing, last layer": 1.5,
    "transformer_attribution": 14,
    "attn_lrp": 4,
    "vit_cx, a mask": 2.2,
}
SLOW = ("attention_flow", "rise", "optimus")  # minutes: only where they are asked for


def work(model: vitreous.Model, images: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is measured: one plain forward, every method, and several targets at once."""

    def forward() -> object:
        with torch.no_grad():
            return model.net(images)

    def explain(name: str, **options: Any) -> Callable[[], object]:
        return lambda: vitreous.explain(model, images, name, **options)

    def targets(count: int) -> Callable[[], object]:
        def run() -> object:
            trace = vitreous.Trace(model, images)
            return [vitreous.explain(model, trace, "cdam", target) for target in range(count)]

        return run

    jobs = {"forward": forward} | {name: explain(name) for name in vitreous.METHODS}
    jobs |= {f"cdam, {k} targets": targets(k) for k in (2, 5)}
    return jobs | {"value_zeroing, last layer": explain("value_zeroing", layer=-1)}


def measure(jobs: dict[str, Callable[[], object]], repeats: int, sync: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each job, interleaved; the first round warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            sync()
            start = time.perf_counter()
            job()
            sync()
            times[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in times.items()}


def table(times: dict[str, list[float]], limits: dict[str, float]) -> str:
    """Markdown: each job as forwards of the same batch."""
    plain = times["forward"]
    lines = ["| method | median | fastest | limit |", "|---|---|---|---|"]
    for name, taken in times.items():
        middle = statistics.median(taken) / statistics.median(plain)
        best = min(taken) / min(plain)
        limit = f"{limits[name]:.2f}" if name in limits else ""
        lines.append(f"| {name} | {middle:.2f} | {best:.2f} | {limit} |")
    return "\n".join(lines)


def memory(model: vitreous.Model) -> str:
    """What gae keeps of a run, by the number of tokens: it grows with L·N·D, not with L·H·N²."""
    lines = ["| tokens | kept | kept per token | all A and ∇A would be |", "|---|---|---|---|"]
    for side in (14, 30, 60):
        big = vitreous.load("deit_tiny_patch16_224", weights="random", img_size=side * 16, device=model.device)
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {p.untyped_storage().data_ptr() for p in big.net.parameters()}
        images = torch.randn(1, 3, side * 16, side * 16, device=model.device)
        trace = vitreous.Trace(big, images)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            trace.followed()  # the run that gae's backward reads
        total = sum(size for place, size in kept.items() if place not in own)
        tokens = side * side + 1
        quadratic = 2 * 12 * 3 * tokens**2 * 4
        lines.append(
            f"| {tokens} | {total / 2**20:.0f} MiB | {total / tokens / 2**10:.0f} KiB | {quadratic / 2**20:.0f} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a DeiT-Tiny checkpoint; default: the embedded model, of the same size")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", help="only these, separated by commas")
    parser.add_argument("--image", help="a picture to explain; default: noise")
    parser.add_argument("--memory", action="store_true", help="what gae keeps in memory at up to 60×60 patches")
    given = parser.parse_args()
    name = "deit_tiny_patch16_224" if given.weights else None
    model = vitreous.load(name, weights=given.weights, device=given.device)
    if given.memory:
        print(memory(model))
        return
    images = torch.randn(given.batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(given.device)
    if given.image:
        images = model.prepare([given.image] * given.batch)
    _ = model.layout  # the probe runs once for a model, not for a batch
    jobs = work(model, images)
    if given.methods:
        wanted = {"forward", *given.methods.split(",")}
        jobs = {name: job for name, job in jobs.items() if name.split(",")[0] in wanted}
    else:
        jobs = {name: job for name, job in jobs.items() if name not in SLOW}
    sync = torch.cuda.synchronize if given.device.startswith("cuda") else lambda: None
    print(f"{model.name}, batch {given.batch}, {given.device}, {torch.get_num_threads()} threads\n")
    times = measure(jobs, given.repeats, sync)
    if "vit_cx" in times:
        masks = sum(vitreous.explain(model, images, "vit_cx").notes["masks"])
        times["vit_cx, a mask"] = [taken * given.batch / masks for taken in times["vit_cx"]]
    print(table(times, LIMITS_ALONE if given.batch == 1 else LIMITS))


if __name__ == "__main__":
    main()
