"""What runs many variants of an image: its cost, where the time goes, and what could fill a GPU better.

    python benchmarks/variants.py                                        # ViT-B/16, bfloat16, on a GPU
    python benchmarks/variants.py --model deit_tiny_patch16_224 --size 96 --dtype float32 --batch 2 --device cpu

Everything is in forwards: of an image, in a plain forward pass of a batch (64 images). *busy*: the time that the GPU
itself works; where it is much less than *forwards*, the GPU waits for Python. *kernels*: that time by what it is spent
on. The last two tables show what other batches and other attention kernels would change; nothing is switched on here.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from counting import flops
from metrics import Setting
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import vitreous
from vitreous._support import memory

Work = Callable[[], object]
KINDS = {  # parts of the names of kernels and operations; the first that fits
    "attention": ("flash", "fmha", "attention", "scaled_dot_product"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "mm", "convolution"),
    "norms": ("layer_norm", "LayerNorm"),
    "activations": ("gelu", "Gelu", "GELU"),
    "additions": ("add", "Add"),
    "copies": ("copy", "Copy", "Memcpy", "gather", "index", "cat", "Cat", "fill", "Memset"),
}
SIZES = (8, 16, 28, 56, 64, 98, 128, 196, 256, 512, 1024)
AT_ONCE = (14, 28, 56, 98, 196, 256)
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


class Bench:
    """One model and one batch; the unit is the share of an image in a plain forward pass of that batch."""

    def __init__(self, given: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, self.rounds = given.device, given.rounds
        size = {"img_size": given.size} if given.size else {}
        self.model = vitreous.load(given.model, "random", given.device, dtype=given.dtype, **size)
        noise = torch.randn(given.batch, 3, *self.model.size, generator=torch.Generator().manual_seed(0))
        self.images = noise.to(self.model.device, self.model.dtype)
        self.one, self.all = Setting(self.model, self.images[:1]), Setting(self.model, self.images)
        self.patches = self.model.layout.patches
        self.unit = min(self.seconds(self.forward) for _ in range(5)) / given.batch
        self.operations = flops(self.forward) / given.batch

    def forward(self, images: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model.net(self.images if images is None else images)
        return found

    def seconds(self, work: Work) -> float:
        """The fastest of some runs, after two that choose kernels."""
        taken = []
        for _ in range(2 + self.rounds):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - start)
        return min(taken[2:])

    def forwards(self, work: Work, count: int = 1) -> float:
        """The same beside the fastest plain forward pass so far."""
        self.unit = min(self.unit, self.seconds(self.forward) / len(self.images))
        return self.seconds(work) / self.unit / count

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def works(self) -> dict[str, tuple[Work, int]]:
        """What is measured, and on how many images."""
        one, everything, count = self.one, self.all, len(self.images)
        return {
            "token_ablation": (partial(explain, one, "token_ablation"), 1),
            "occlusion, zeros": (partial(explain, one, "occlusion", fill="zero"), 1),
            "deletion, patch by patch": (partial(one.ours, "deletion", steps=None, fill="zero"), 1),
            "deletion": (partial(one.ours, "deletion"), 1),
            "token_deletion, patch by patch": (partial(one.ours, "token_deletion", steps=self.patches), 1),
            "token_deletion": (partial(one.ours, "token_deletion"), 1),
            f"deletion, {count} images": (partial(everything.ours, "deletion"), count),
            f"token_deletion, {count} images": (partial(everything.ours, "token_deletion"), count),
        }

    # -------------------------------------------------------------------------------------------------------- tables

    def costs(self) -> Iterator[str]:
        """Every work: time, the GPU's own time, and operations."""
        yield "| | forwards | busy | counted |\n|---|---|---|---|"
        for name, (work, count) in self.works().items():
            with replayed(self.device, name == "token_ablation"):
                taken = self.forwards(work, count)
            busy = sum(self.kernels(work).values()) / self.unit / count
            yield f"| {name} | {taken:.1f} | {busy:.1f} | {flops(work) / self.operations / count:.1f} |"

    def shares(self) -> Iterator[str]:
        """The time of kernels by their kind."""
        works = {"plain forward": (self.forward, len(self.images)), "token_ablation": self.works()["token_ablation"]}
        yield f"\n| kernels, in forwards | {' | '.join((*KINDS, 'others'))} |\n{'|---' * (len(KINDS) + 2)}|"
        for name, (work, count) in works.items():
            found = self.kernels(work)
            cells = [f"{found[kind] / self.unit / count:.2f}" for kind in (*KINDS, "others")]
            yield f"| {name} | {' | '.join(cells)} |"

    def kernels(self, work: Work) -> Counter[str]:
        """Seconds of kernels (on a CPU, of operations) by their kind."""
        cuda = self.device == "cuda"
        found: Counter[str] = Counter()
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            work()
            self.wait()
        for event in seen.key_averages():
            taken = event.self_device_time_total if cuda else event.self_cpu_time_total
            kind = next((kind for kind, names in KINDS.items() if any(one in event.key for one in names)), "others")
            found[kind] += taken / 1e6
        return found

    def batches(self) -> Iterator[str]:
        """The plain forward pass by its number of images, launched by Python and as a CUDA graph."""
        yield "\n| images | a forward of each | as a CUDA graph |\n|---|---|---|"
        for size in SIZES if self.device == "cuda" else SIZES[:1]:
            images = self.images[:1].expand(size, -1, -1, -1).contiguous()
            plain = self.forwards(partial(self.forward, images), size)
            graph = self.forwards(graphed(partial(self.forward, images)), size) if images.is_cuda else 0
            yield f"| {size} | {plain:.3f} | {f'{graph:.3f}' if graph else ''} |"

    def chances(self) -> Iterator[str]:
        """token_ablation with other numbers of variants at a time, and by other attention kernels."""
        yield "\n| token_ablation | forwards |\n|---|---|"
        work = partial(explain, self.one, "token_ablation")
        ways: dict[str, Callable[[], Any]] = {f"{size} at a time": partial(at_once, size) for size in AT_ONCE}
        if self.device == "cuda":
            ways |= {one.name.lower(): partial(sdpa_kernel, one) for one in BACKENDS}
        for name, way in ways.items():
            try:
                with way(), replayed(self.device, True):
                    yield f"| {name} | {self.forwards(work):.1f} |"
            except RuntimeError as error:
                yield f"| {name} | {str(error).splitlines()[0]} |"


def explain(given: Setting, method: str, **options: Any) -> torch.Tensor:
    return vitreous.explain(given.model, given.images, method, given.classes.tolist(), **options).map


def replayed(device: str, can: bool) -> Any:
    return vitreous.replay() if device == "cuda" and can else nullcontext()


@contextmanager
def at_once(size: int) -> Iterator[None]:
    """At most so many variants at a time."""
    before = dict(memory.MOST)
    memory.MOST.update(dict.fromkeys(before, size))
    try:
        yield
    finally:
        memory.MOST.update(before)


def graphed(work: Work) -> Work:
    """The same kernels, launched at once."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--size", type=int, help="the side of the images; default: the model's own")
    parser.add_argument("--batch", type=int, default=64, help="images of the forward pass that is the unit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    bench = Bench(given)
    print(f"{given.model}, {given.dtype}, {given.device}, torch {torch.__version__}, unit: batch {given.batch}\n")
    for table in (bench.costs, bench.shares, bench.batches, bench.chances):
        for line in table():
            print(line, flush=True)


if __name__ == "__main__":
    main()
