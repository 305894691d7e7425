from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitreous.errors import ModelError, Unsupported
from vitreous.metrics.case import Case, Measured, NoTarget
from vitreous.metrics.correlation import rank_correlation
from vitreous.metrics.sanity.copies import copy_of
from vitreous.metrics.sanity.rewriting import Norm, Rewriting, norms_of, restore
from vitreous.models.inputs import Inputs
from vitreous.models.model import Model
from vitreous.registry import metric
from vitreous.trace.batched_targets import beginning
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map, Scores

NEEDS = {
    "both": "that linear layers alone read",
    "shift": "with a shift that linear layers with biases alone read (or try kind=gain)",
    "gain": "with a gain that linear layers alone read",
}
EQUAL = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest output: a difference by rounding


@metric(better="lower", cite="kindermans2019unreliability", again=True)
def reparametrisation(
    case: Case,
    *,
    kind: Annotated[
        Literal["both", "shift", "gain"], Field(description="what moves from norms into the linear layers behind them")
    ] = "both",
    compare: Annotated[
        Literal["order", "values"], Field(description="the order of the values, or the values themselves")
    ] = "order",
    scale: Annotated[
        float, Field(gt=0, le=8, description="how much moves: shifts in units of the gain, gains in powers of two")
    ] = 1.0,
    seed: Annotated[int, Field(ge=0, description="another seed moves otherwise")] = 0,
) -> Measured:
    """How much a map changes when the same network is written differently; use it to find maps that explain how a
    network is written.

    1 − ρ(s, s′) with Spearman's ρ (order: 0 the same, 1 unrelated, 2 reversed), or ‖s − s′‖ / ‖s‖ (values); s′ = the
    map of a copy in which every norm T = g ⊙ x̂ + b that only linear layers W·T + a read is written with b − c and
    a + W·c (shift), and with g ⊙ r, b ⊙ r and W·diag(1/r) (gain)
    """
    trace, model = case.trace, case.trace.model
    target = case.target.for_any_model()
    twin, before, images = copy_of(model), case.map, trace.images
    if model.dtype not in EQUAL or trace.autocast:  # rounding alone would change the map
        images, before = images.float(), in_single(twin, images.float(), case, target)
    rewrite(twin, images, target, Rewriting(kind, scale, seed), trace.inputs)
    after = case.again(Trace(twin, images, trace.inputs), target)
    return Measured((by_order if compare == "order" else by_values)(before, after))


def by_order(one: Map, other: Map) -> Scores:
    """1 − ρ, image by image."""
    return 1 - rank_correlation(one, other)


def by_values(one: Map, other: Map) -> Scores:
    """‖s − s′‖ / ‖s‖, image by image; NaN for a map of zeros."""
    a, b = (each.detach().cpu().double().flatten(1) for each in (one, other))
    change: Tensor = (a - b).norm(dim=1) / a.norm(dim=1)
    return change.to(one)


def in_single(twin: Model, images: Images, case: Case, target: Target) -> Map:
    """The map of the copy, turned into single precision."""
    twin.module.float()
    try:
        return case.again(Trace(twin, images, case.trace.inputs), target)
    except ModelError as error:
        raise Unsupported(
            f"reparametrisation needs {twin.name} in single precision, in which it does not run; give it in float32"
        ) from error


def rewrite(model: Model, images: Images, target: Target, how: Rewriting, inputs: Inputs | None = None) -> list[Norm]:
    """Write norms of a network differently, in place; those with which neither the output nor the score changes."""
    norms = [
        norm for norm in norms_of(model, images[:1], None if inputs is None else inputs.rows([0])) if how.can(norm)
    ]
    expected = ends(model, images, target, inputs)
    old = [how.apply(model.module, norm) for norm in norms]
    if norms and not same(ends(model, images, target, inputs), expected):
        for values in reversed(old):
            restore(model.module, values)
        norms = [norm for norm in norms if keeps(model, images, target, how, norm, expected, inputs)]
    if not norms:
        raise Unsupported(f"reparametrisation needs a norm {NEEDS[how.kind]}; {model.name} has none")
    model.facts.forget()  # its weights have changed
    return norms


def keeps(
    model: Model,
    images: Images,
    target: Target,
    how: Rewriting,
    norm: Norm,
    expected: list[Tensor],
    inputs: Inputs | None,
) -> bool:
    """Rewrite one norm; undone if the output changes."""
    values = how.apply(model.module, norm)
    if same(ends(model, images, target, inputs), expected):
        return True
    restore(model.module, values)
    return False


def ends(model: Model, images: Images, target: Target, inputs: Inputs | None) -> list[Tensor]:
    """The output, and the embedding before the classifier if the target reads it."""
    record = Trace(model, images, inputs).plain()
    found = [record.output.detach()]
    if not isinstance(target, NoTarget) and beginning(target, record.output, record.embedding)[1].any():
        found.append(record.embedding.detach())
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether they differ by rounding only."""
    return all(
        (one - other).abs().max() <= EQUAL.get(other.dtype, 1e-4) * other.abs().max()
        for one, other in zip(ours, theirs)
    )
