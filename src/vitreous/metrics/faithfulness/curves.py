"""What the metrics of faithfulness share: orders of patches, patches hidden or taken out, curves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from vitreous._support.progress import steps as told
from vitreous.capture.attention import widen
from vitreous.errors import Unsupported
from vitreous.metrics.case import Case
from vitreous.models.output import Of
from vitreous.trace.perturb.drop_tokens import (
    Source,
    Undroppable,
    all_entering,
    ends_keeping,
    refuse_dropping,
    scores_keeping,
)
from vitreous.trace.perturb.dropped_runs import kept
from vitreous.trace.perturb.fills import Fill, filled
from vitreous.trace.perturb.hide_patches import scores_hidden
from vitreous.trace.perturb.variant_scores import has_room
from vitreous.trace.target import Target
from vitreous.types import Scores

Curve = Float[Tensor, "B T"]
Order = Int[Tensor, "B n"]  # numbers of patches
Way = Literal["most", "least"]  # which patches come first
Share = Annotated[float, Field(gt=0, lt=1)]
Scale = Annotated[
    Of, Field(description="what is read: the class's probability, its logit, or the target's own score, as explained")
]


def area(curve: Curve, at: Sequence[float]) -> Scores:
    """The area under a curve, over its width: a mean height."""
    x = torch.tensor(list(at), dtype=curve.dtype, device=curve.device)
    return torch.trapezoid(curve, x) / (x[-1] - x[0])


def least_first(case: Case) -> Order:
    """Patches, the least relevant first; of equals, the first."""
    return case.patches.flatten(1).argsort(dim=1, stable=True)


def ordered(case: Case, way: Way) -> Order:
    return case.order if way == "most" else least_first(case)


# ------------------------------------------------------------------------------------------------------------- hiding


def counts_of(patches: int, steps: int | None) -> list[int]:
    """How many patches at each point, from none to all; None: one by one."""
    steps = min(steps or patches, patches)
    return [patches * step // steps for step in range(steps + 1)]


def first(order: Order, counts: Sequence[int]) -> Bool[Tensor, "B T n"]:
    """Which patches are the first so many of an order."""
    return order.argsort(1)[:, None] < torch.tensor(list(counts), device=order.device)[:, None]


def hide(case: Case, of: Of, hidden: Bool[Tensor, "B T n"], fill: Fill, what: str, *which: Hashable) -> Curve:
    """The score of each image with each set of patches hidden.

    `what` and `which` tell these sets from others of the same maps: the outputs are kept for another `of`.
    """
    count, sets, _ = hidden.shape
    rows = [image for image in range(count) for _ in range(sets)]
    variants = hidden.reshape(count * sets, *case.trace.layout.cells)
    target, cover, key = case.scored(of), filled(case.trace, fill), (what, fill, *which)
    return scores_hidden(case.trace, target, rows, variants, cover, what, key, case.ends).view(count, sets)


# ---------------------------------------------------------------------------------------------------------- taking out


def take_out(case: Case, ways: Sequence[Way], of: Of, steps: int, what: str, remedy: str) -> Float[Tensor, "O B T"]:
    """y(target) after the first ⌊n·s⌋ tokens of each order are removed, s = 0, 1/T … 1 − 1/T; all orders at once."""
    try:
        refuse_dropping(case.trace)
    except Undroppable as error:
        raise Unsupported(f"{what} takes tokens out of the sequence, and {error.reason}; use {remedy}") from None
    target, orders = case.scored(of), {way: ordered(case, way) for way in ways}
    patches = case.trace.layout.patches
    entering = all_entering(case.trace)
    counts = [patches * step // steps for step in range(steps)]
    points = [without(case, target, orders, count, entering) for count in told(counts, steps, what)]
    return torch.stack(points, 2)


def without(
    case: Case, target: Target, orders: Mapping[Way, Order], count: int, entering: Source
) -> Float[Tensor, "O B"]:
    """The scores without the first `count` tokens of each order; the outputs are kept for other metrics."""
    trace, ends = case.trace, case.ends
    new = [way for way in orders if ("without", way, count) not in ends]
    rows = list(range(len(trace)))
    if new:
        keep = torch.cat([kept(trace, orders[way][:, count:]) for way in new])
        if len(new) == len(orders) and not has_room(trace, len(keep), ends):
            return scores_keeping(trace, target, rows * len(new), keep, entering=entering).view(len(new), -1)
        made = [end.chunk(len(new)) for end in ends_keeping(trace, rows * len(new), keep, entering)]
        ends.update({("without", way, count): (output, embedding) for way, output, embedding in zip(new, *made)})
    return torch.stack([widen(target.of_rows(rows)(*ends["without", way, count])) for way in orders])
