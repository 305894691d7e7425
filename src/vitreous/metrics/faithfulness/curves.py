"""What the metrics of faithfulness share: orders of patches, patches hidden or taken out, curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vitreous._support.progress import steps as told
from vitreous.errors import Unsupported
from vitreous.metrics.case import Case
from vitreous.trace.perturb.drop_tokens import Undroppable, kept, refuse_dropping, scores_keeping
from vitreous.trace.perturb.fills import Fill, filled
from vitreous.trace.perturb.hide_patches import scores_hidden
from vitreous.trace.target import Target
from vitreous.types import Scores

Curve = Float[Tensor, "B T"]
Order = Int[Tensor, "B n"]  # numbers of patches
Share = Annotated[float, Field(gt=0, lt=1)]


def area(curve: Curve, at: Sequence[float]) -> Scores:
    """The area under a curve, over its width: a mean height."""
    x = torch.tensor(list(at), dtype=curve.dtype, device=curve.device)
    return torch.trapezoid(curve, x) / (x[-1] - x[0])


def least_first(case: Case) -> Order:
    """Patches, the least relevant first; of equals, the first."""
    return case.patches.flatten(1).argsort(dim=1, stable=True)


# ------------------------------------------------------------------------------------------------------------- hiding


def counts_of(patches: int, steps: int | None) -> list[int]:
    """How many patches at each point, from none to all; None: one by one."""
    steps = min(steps or patches, patches)
    return [patches * step // steps for step in range(steps + 1)]


def first(order: Order, counts: Sequence[int]) -> Bool[Tensor, "B T n"]:
    """Which patches are the first so many of an order."""
    return order.argsort(1)[:, None] < torch.tensor(list(counts), device=order.device)[:, None]


def hide(case: Case, target: Target, hidden: Bool[Tensor, "B T n"], fill: Fill, what: str) -> Curve:
    """The score of each image with each set of patches hidden."""
    count, sets, _ = hidden.shape
    rows = [image for image in range(count) for _ in range(sets)]
    variants = hidden.reshape(count * sets, *case.trace.layout.grid)
    return scores_hidden(case.trace, target, rows, variants, filled(case.trace, fill), what).view(count, sets)


# ---------------------------------------------------------------------------------------------------------- taking out


def take_out(case: Case, orders: Sequence[Order], steps: int, what: str, remedy: str) -> Float[Tensor, "O B T"]:
    """p(target) after the first ⌊n·s⌋ tokens of each order are removed, s = 0, 1/T … 1 − 1/T; all orders at once."""
    trace, target, ranked = case.trace, case.graded, torch.cat(list(orders))
    try:
        refuse_dropping(trace)
    except Undroppable as error:
        raise Unsupported(f"{what} takes tokens out of the sequence, and {error.reason}; use {remedy}") from None
    rows, patches = list(range(len(trace))) * len(orders), ranked.shape[1]
    points = [
        scores_keeping(trace, target, rows, kept(trace, ranked[:, patches * step // steps :]))
        for step in told(range(steps), steps, what)
    ]
    return torch.stack(points, 1).view(len(orders), len(trace), steps)
