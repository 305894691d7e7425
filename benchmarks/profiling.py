"""Where the time of a method goes, and what it keeps in memory."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from counting import flops, peak_memory
from torch.profiler import ProfilerActivity, profile

import vitreous

Works = dict[str, Callable[[], Any]]
REST, PYTHON = "norms, activations, copies", "Python"
PARTS = {  # beginnings of the names of operations
    "attention, backward": ("_scaled_dot_product_flash_attention_for_cpu_backward",),
    "attention": ("_scaled_dot_product",),
    "products, backward": ("mm", "convolution_backward"),
    "products": ("addmm", "convolution", "mkldnn_convolution", "_slow_conv2d"),
    "sums over A": ("bmm", "baddbmm", "_softmax"),
}
ORDER = ("products", "attention", "products, backward", "attention, backward", "sums over A", REST, PYTHON)
FLOORS = {  # forwards, by operations: see README.md
    "attention, all layers": 0.92,
    "rollout": 0.92,
    "cdam": 0.92,
    "gradcam": 0.92,
    "gae": 1.91,
    "grad_rollout": 1.91,
    "attn_lrp": 2.0,
    "transformer_attribution": 4.5,
    "transformer_attribution, single": 4.5,
}


def profiled(works: Works, forward: Callable[[], object], rounds: int) -> str:
    """Markdown: each method in forwards, and these forwards by what they are spent on."""
    head = "| | forwards | " + " | ".join(ORDER) + " | counted | floor |"
    lines = [head, "|---" * (len(ORDER) + 4) + "|"]
    one = flops(forward)
    for name, work in {"plain forward": forward, **works}.items():
        ratio = forwards(work, forward, rounds)
        parts = shares(work, max(1, rounds // 3))
        cells = [f"{ratio * parts[part]:.2f}" for part in ORDER]
        floor = f"{FLOORS[name]:.2f}" if name in FLOORS else ""
        lines.append(f"| {name} | {ratio:.2f} | {' | '.join(cells)} | {flops(work) / one:.2f} | {floor} |")
    return "\n".join(lines)


def forwards(work: Callable[[], object], forward: Callable[[], object], rounds: int) -> float:
    """The median over rounds of one run beside a plain forward before and after it."""
    work()
    ratios = []
    for _ in range(rounds):
        before, taken, after = (seconds(one) for one in (forward, work, forward))
        ratios.append(2 * taken / (before + after))
    return statistics.median(ratios)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def shares(work: Callable[[], object], runs: int) -> Counter[str]:
    """How the time is spent: in operations by their kind, and between them (which the profiler makes longer)."""
    found: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        taken = sum(seconds(work) for _ in range(runs))
    for event in seen.key_averages():
        found[part_of(event.key.removeprefix("aten::"))] += event.self_cpu_time_total / 1e6 / taken
    found[PYTHON] = 1 - sum(found.values())
    return found


def part_of(operation: str) -> str:
    for part, names in PARTS.items():
        if operation.startswith(names):
            return part
    return REST


def kept(device: str) -> str:
    """Markdown: what gae keeps of a run, by the number of tokens: it grows with L·N·D, not with L·H·N²."""
    lines = ["| tokens | kept | kept per token | all A and ∇A would be |", "|---|---|---|---|"]
    for side in (14, 30, 60):
        model = vitreous.load("deit_tiny_patch16_224", weights="random", img_size=side * 16, device=device)
        held: dict[int, int] = {}

        def note(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {p.untyped_storage().data_ptr() for p in model.net.parameters()}
        trace = vitreous.Trace(model, torch.randn(1, 3, side * 16, side * 16, device=device))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            trace.followed(seen=False)  # the run that gae's backward reads
        total = sum(size for place, size in held.items() if place not in own)
        tokens = side * side + 1
        quadratic = 2 * 12 * 3 * tokens**2 * 4
        lines.append(
            f"| {tokens} | {total / 2**20:.0f} MiB | {total / tokens / 2**10:.0f} KiB | {quadratic / 2**20:.0f} MiB |"
        )
    return "\n".join(lines)


def streamed() -> str:
    """Markdown: the most memory on a GPU that methods of attention take for 100×100 patches of a ViT-S."""
    lines = [
        "| 10001 tokens, ViT-S | precision | peak | with weights and image | A and ∇A of one layer |",
        "|---" * 5 + "|",
    ]
    for dtype in ("bfloat16", "float32"):
        model = vitreous.load("vit_small_patch16_224", weights="random", img_size=1600, device="cuda", dtype=dtype)
        image = torch.randn(1, 3, 1600, 1600, device="cuda", dtype=model.dtype)
        one = 2 * 6 * 10001**2 * image.element_size()
        for method in ("attention", "rollout", "gae", "grad_rollout"):
            vitreous.explain(model, image, method, 0)  # what is found out once for a model
            before = torch.cuda.memory_allocated()
            with peak_memory("cuda") as peak:
                vitreous.explain(model, image, method, 0)
            cells = " | ".join(f"{size / 10**9:.2f} GB" for size in (peak.bytes, peak.bytes + before, one))
            lines.append(f"| {method} | {dtype} | {cells} |")
    return "\n".join(lines)
