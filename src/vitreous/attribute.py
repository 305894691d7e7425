"""Make an attribution: one method on one trace, for one or more targets."""

from __future__ import annotations

from typing import Any

import torch

from vitreous.attribution import Attribution
from vitreous.models.origin import Origin
from vitreous.registry import Method
from vitreous.trace.apply import choose, computed, is_aimed, read_by, refuse, refuse_empty
from vitreous.trace.detection import Detected, detected_shares
from vitreous.trace.region import Placed, placed_shares
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views
from vitreous.types import Output


def attribute(
    trace: Trace,
    declared: Method,
    target: Any,
    values: dict[str, Any],
    views: Views | None = None,
    *,
    strict: bool = True,
) -> Attribution:
    """Run one method on one trace; `values` are validated options."""
    return attribute_all(trace, declared, [target], values, views, strict=strict)[0]


def attribute_all(
    trace: Trace,
    declared: Method,
    targets: list[Any],
    values: dict[str, Any],
    views: Views | None = None,
    *,
    strict: bool = True,
) -> list[Attribution]:
    """Run one method on one trace for each target; a method that does not depend on a target runs once.

    `strict`: raise if the map of an image is zero everywhere or not finite.
    """
    own = [read_by(trace, target) for target in targets]
    if any(one is not trace for one, _ in own):
        return [attribute_all(one, declared, [target], values, views, strict=strict)[0] for one, target in own]
    targets = [target for _, target in own]
    refuse(trace, declared)
    chosen = [choose(trace, target, declared) for target in targets]
    is_of_target = is_aimed(trace.model, declared)
    results, output = computed(trace, declared, tuple(chosen if is_of_target else chosen[:1]), values)
    output = trace.output if output is None and is_of_target else output
    views = views or Views.of(trace.images, trace.model)
    for target, noted in zip(chosen, results) if strict else ():
        fixed = target if output is None else target.fix(output)
        refuse_empty(trace, declared, fixed, noted.map, views)
    made_by = Origin.of(trace.model, trace.extent)
    return [
        Attribution(
            map=noted.map,
            method=declared.name,
            options=values,
            targets=told_targets(target, output, len(trace)),
            **told_shares(target, output, trace),
            model=trace.model.name,
            made_by=made_by,
            inputs=trace.inputs.stamps(),
            signed=declared.is_signed(values),
            notes=noted.notes,
            views=views,
            box=trace.layout.box(trace.size) if tuple(noted.map.shape[1:]) == trace.layout.cells else None,
            times=trace.layout.times if tuple(noted.map.shape[1:]) == trace.layout.cells else (),
        )
        for target, noted in zip(chosen, results if is_of_target else results * len(chosen))
    ]


def told_targets(target: Target, output: Output | None, count: int) -> tuple[str | None, ...]:
    """The target of each image as a string that `parse` reads; None if the method does not depend on a target."""
    fixed = None if output is None else target.fix(output)
    return tuple(None if fixed is None else str(fixed.of_image(index)) for index in range(count))


def told_shares(target: Target, output: Output | None, trace: Trace) -> dict[str, Any]:
    """The name of each image's target, and its probability if it is a class."""
    if output is None:
        return {}
    fixed, model = target.fix(output), trace.model
    each = [fixed.of_image(index).single() for index in range(len(trace))]
    if all(isinstance(one, Placed) for one in each):
        return placed_shares([one for one in each if isinstance(one, Placed)], output, model)
    if all(isinstance(one, Detected) for one in each):
        return detected_shares([one for one in each if isinstance(one, Detected)], output, model)
    numbers = [number for one in each for number in one.class_numbers(1) or ()]
    if len(numbers) < len(each) or not trace.classifies:
        return {"labels": tuple(one.title(model, output[i : i + 1], 0) for i, one in enumerate(each))}
    chosen = torch.tensor(numbers, device=output.device)[:, None]
    shares = model.meaning.probabilities(output.detach().float()).gather(1, chosen)[:, 0].tolist()
    return {"labels": tuple(model.label(number) for number in numbers), "probabilities": tuple(shares)}
