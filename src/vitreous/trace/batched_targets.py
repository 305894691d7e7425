"""Several targets at once: one forward pass and one backward pass for all of them.

    gₖ = ∂yₖ/∂(output, embedding)     where the backward pass of target k begins; needs the output only
    vmap of the method over g         every gradient that it computes is a product of all gₖ with one Jacobian

The forward pass is run beforehand, outside `torch.vmap`: the method is started once with a target that stops it when it
asks for the score.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.trace.big import is_big
from vitreous.trace.run import gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Output, Scores

ROWS = {"cpu": 6, "cuda": 256}  # images × targets per batch; more would overflow a CPU's caches
LOOPS = "There is a performance drop because we have not yet implemented the batching rule"  # fused attention

Run = Callable[[Target], Any]  # a method on one trace


class Reached(BaseException):
    """Raised when a method has finished its forward pass and asks for the score."""

    def __init__(self, output: Output, embedding: Tensor) -> None:
        self.ends = output, embedding


class Stop(Target):
    """A target that stops the method when it asks for the score."""

    def __call__(self, output: Output, embedding: Tensor) -> NoReturn:
        raise Reached(output, embedding)


@dataclass(frozen=True, eq=False)
class Along(Target):
    """A score with a prescribed gradient; its value has no meaning."""

    starts: tuple[Tensor, ...]  # ∂y/∂output, ∂y/∂embedding

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return begun(output, self.starts[0]) + begun(embedding, self.starts[1])


def begun(end: Tensor, start: Tensor) -> Scores:
    """One number per image whose gradient is `start`."""
    copy = end.clone()
    if copy.requires_grad:
        copy.register_hook(lambda _: start)  # type: ignore[no-untyped-call]
    return copy.flatten(1).sum(1)


def beginning(target: Target, output: Output, embedding: Tensor) -> tuple[Tensor, ...]:
    """∂y/∂output and ∂y/∂embedding, each with the other held constant."""
    ends = [end.detach().requires_grad_() for end in (output, embedding)]
    with torch.enable_grad():
        return gradients(target(*ends), ends)


def targets_at_once(trace: Trace) -> int:
    """The number of targets that share one backward pass; of a big model, blocks are run again for each."""
    device = trace.images.device
    if is_big(trace):
        return 1
    return max(1, batch_size(trace.layout.footprint[1], device, ROWS.get(device.type, ROWS["cpu"])) // len(trace))


def maps_of(run: Run, targets: Sequence[Target], size: int) -> list[Any]:
    """The result of a method for each target, computed for about `size` targets at a time."""
    if min(size, len(targets)) == 1:
        return one_by_one(run, targets)
    try:
        run(Stop())
    except Reached as reached:
        starts = [beginning(target, *reached.ends) for target in targets]
    stacked = [torch.stack(parts) for parts in zip(*starts)]  # [K B C], [K B D]

    def back(part: slice) -> Tensor:
        made: Tensor = torch.vmap(lambda *given: run(Along(given)))(*(start[part] for start in stacked))
        return made

    parts = -(-len(targets) // size)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOOPS)
            return list(torch.cat(in_batches(back, len(targets), -(-len(targets) // parts))))
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        return one_by_one(run, targets)  # the model calls a function that vmap cannot differentiate


def one_by_one(run: Run, targets: Sequence[Target]) -> list[Any]:
    return [run(target) for target in targets]
