"""Peak memory of every method on big models, beside one plain forward and backward pass with activation checkpointing.

python benchmarks/big.py                                    three models in bfloat16, as if the GPU had 24 GiB
python benchmarks/big.py --models vit_large_patch16_384 --methods gae,rollout --seconds 60
python benchmarks/big.py --device cpu --width 128 --memory 1MB --methods rollout,gae,libra_fullgrad,attn_lrp

On a CPU (`--device cpu`) peaks are the bytes that torch holds, and there is no limit. The networks have random weights
and get one image. The pass that everything is compared with is timm's own: gradients of the pixels, weights frozen,
`set_grad_checkpointing`. Ratios are given without the weights, which are there before any method runs, and with them.
A method that is still running after `--seconds` is stopped; its peak so far counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from counting import peak_memory
from torch import Tensor, nn

import vitreous
from vitreous._support.memory import out_of_memory
from vitreous.errors import VitreousError
from vitreous.registry import METHODS

MODELS = "vit_large_patch16_384,vit_giant_patch14_224,vit_giant_patch14_dinov2"
NAMED = ("rollout", "gae", "libra_fullgrad", "attn_lrp")
MOST = 1.3  # times the peak of the plain pass, for these
MIB = 2**20


class Slow(BaseException):
    """Raised where a method has had its time."""


def main() -> None:
    given = parse()
    rows = []
    for name in given.models.split(","):
        rows += on_model(name, given)
        if given.json:
            Path(given.json).write_text(json.dumps(rows, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--methods", default=",".join((*NAMED, *(name for name in METHODS if name not in NAMED))))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, help="narrower tokens, with as wide heads: the same ratios in less time")
    parser.add_argument("--memory", help="vitreous.limit_memory: with 1MB, blocks of narrow models keep nothing, too")
    parser.add_argument("--gib", type=float, default=24.0, help="memory that the process may use on the GPU")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most that a method may take")
    parser.add_argument("--json", help="a file for the numbers")
    return parser.parse_args()


def on_model(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model, printed as they are made."""
    net, image = built(name, given.device, given.width)
    if given.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(given.gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    measured = partial(measured_on, given.device)
    weights = sum(t.nbytes for t in (*net.parameters(), *net.buffers()))
    measured(lambda: plain_pass(net, image), given.seconds)  # libraries allocate their workspaces
    plain = measured(lambda: plain_pass(net, image), given.seconds)
    print(f"\n## {name}, {tuple(image.shape[-2:])}, weights {weights / MIB:.0f} MiB\n", flush=True)
    print("| run | seconds | peak without weights, MiB | ratio | ratio with weights | |\n|---|---|---|---|---|---|")
    model = vitreous.Model(net)
    runs: dict[str, Callable[[], object]] = {
        "plain forward and backward, checkpointed": lambda: plain_pass(net, image),
        "plain forward and backward": lambda: plain_pass(net, image, checkpointed=False),
        "plain forward": lambda: forward(net, image),
        "layout run": lambda: vitreous.Trace(model, image),
        **{method: explaining(model, image, method, given.memory) for method in given.methods.split(",")},
    }
    rows = []
    for run, call in runs.items():
        most = given.seconds if run in METHODS else 600.0
        rows.append({"model": name, "run": run, "weights": weights, **measured(call, most)})
        show(rows[-1], plain["peak"])
    return rows


def show(row: dict[str, Any], plain: int) -> None:
    ratio, whole = row["peak"] / plain, (row["peak"] + row["weights"]) / (plain + row["weights"])
    over = row["run"] in NAMED and ratio > MOST
    said = row["said"] or (f"above {MOST}" if over else "")
    numbers = f"{row['seconds']:.2f} | {row['peak'] / MIB:.0f} | {ratio:.2f} | {whole:.2f}"
    print(f"| {row['run']} | {numbers} | {said} |", flush=True)


# ------------------------------------------------------------------------------------------------------- what is run


def built(name: str, device: str, width: int | None) -> tuple[nn.Module, Tensor]:
    """A network with random weights in bfloat16, made on the device, and an image for it."""
    torch.manual_seed(0)
    with torch.device("meta"):
        usual = timm.create_model(name)
    heads = usual.blocks[0].attn.num_heads
    narrow = {} if width is None else {"embed_dim": width, "num_heads": width * heads // usual.embed_dim}
    with torch.device(device):
        net = timm.create_model(name, num_classes=1000, **narrow)
    net = net.eval().requires_grad_(False).to(torch.bfloat16)
    size = net.pretrained_cfg["input_size"]
    return net, torch.randn(1, *size, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)


@torch.no_grad()
def forward(net: nn.Module, image: Tensor) -> None:
    net(image)


def plain_pass(net: Any, image: Tensor, checkpointed: bool = True) -> None:
    net.set_grad_checkpointing(checkpointed)
    try:
        leaf = image.clone().requires_grad_()
        torch.autograd.grad(net(leaf).amax(), leaf)
    finally:
        net.set_grad_checkpointing(False)


def explaining(model: vitreous.Model, image: Tensor, method: str, limit: str | None) -> Callable[[], object]:
    def call() -> object:
        with warnings.catch_warnings(), vitreous.limit_memory(limit):
            warnings.simplefilter("ignore")
            return vitreous.explain(model, image, method=method)

    return call


# ------------------------------------------------------------------------------------------------------- measurement


def measured_on(device: str, call: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Seconds, the peak of the memory above what was there before, and what went wrong."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    said, begun = "", time.perf_counter()
    with peak_memory(device) as peak:
        try:
            with limited(seconds):
                call()
        except Slow:
            said = f"stopped after {seconds:.0f} s"
        except (VitreousError, RuntimeError) as error:
            said = "OUT OF MEMORY" if out_of_memory(error) else f"{type(error).__name__}: {str(error)[:90]}"
    return {"seconds": time.perf_counter() - begun, "peak": peak.bytes, "said": said}


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `Slow` in what runs longer."""

    def ring(*_: Any) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
