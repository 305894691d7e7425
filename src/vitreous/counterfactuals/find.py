"""`counterfactual`: the smallest set of patches, as far as it can be found, whose change turns a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vitreous.api import Trace, explain
from vitreous.attribution import Attribution
from vitreous.counterfactuals.aim import Aim, aim
from vitreous.counterfactuals.change import PLACES, Change, Matches, Sets, exchange, matched, removal
from vitreous.counterfactuals.result import Counterfactual, Course, Named
from vitreous.counterfactuals.search import Reached, Search, as_sets, first_turn, prefixes
from vitreous.counterfactuals.shown import after
from vitreous.errors import EmptyMap, InputError, OptionError, Unsupported, one_of
from vitreous.metrics.case import Case
from vitreous.registry import ConfiguredMethod
from vitreous.trace import trace as engine
from vitreous.trace.apply import as_images, as_model, of_model
from vitreous.trace.views import Views
from vitreous.types import Map

METHOD, INSTEAD = "token_ablation", "occlusion"  # by default, and where tokens cannot be removed
POOL = 24  # patches that each step of the growth tries
PROOF = 4096  # runs, at most, of an exhaustive search
WHAT = "counterfactual"
SEARCHES = ("map", "greedy")


def counterfactual(
    model: Any,
    image: Any,
    to: Any = None,
    *,
    from_: Any = None,
    other: Any = None,
    places: str = "same",
    method: str | ConfiguredMethod | None = None,
    search: str = "greedy",
    pool: int = POOL,
    proof: int = PROOF,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Counterfactual:
    """Find the smallest set of patches whose removal turns a model's decision, and certify it by running it.

    `model`, `image` and `inputs`: as for `explain`; one image. `to`: the wanted class, by number or name; None: the
    second best class of the image; "any": any other. `from_`: the class that must be decided for now. `other`: a second
    image; patches are then exchanged with its patches at the same places or, with `places="matched"`, with those of the
    most similar features. `method` and `options`: the contrast map that gives the order of patches (from − to); None:
    token_ablation, or occlusion where tokens cannot be removed. `search`: "map" takes the shortest prefix of that
    order; "greedy" also grows a set by the true effect of each patch, of the `pool` most promising ones at each step;
    both are pruned. `proof`: how many runs an exhaustive search of all smaller sets may take.
    """
    check(search, pool, proof, places, other)
    trace, views = one_image(model, image, inputs)
    aimed = aim(trace, to, from_)
    beside, name = (None, None) if other is None else named_image(trace.model, other, inputs)
    matches = matched(trace, beside) if beside is not None and places == "matched" else None
    change = removal(trace) if beside is None else exchange(trace, beside.images, matches)
    task = Task(trace, aimed, change)
    found, order = ordered(task, method, options, beside, matches)
    every = prefixes(order, change.most)
    outputs = change.outputs(task.sets(every), WHAT)
    start = first_turn(every, task.search.note(every, aimed.margins(outputs).tolist()))
    reached, bound = smallest(task.search, start, search, pool, proof)
    settings = {"search": search, "pool": pool, "proof": proof, **({} if other is None else {"places": places})}
    return told(
        task, reached, bound, outputs, start, found if views is None else replace(found, views=views), settings, name
    )


def check(search: str, pool: int, proof: int, places: str, other: Any) -> None:
    """Raise if an option has no such value."""
    for name, given, known in (("search", search, SEARCHES), ("places", places, PLACES)):
        if given not in known:
            raise OptionError(f"{name}={given!r}: choose {one_of(list(known))}")
    if pool < 1 or proof < 0:
        raise OptionError(f"pool={pool}, proof={proof}: give a pool of at least 1 patch and a proof of at least 0 runs")
    if places != "same" and other is None:
        raise OptionError(f"places={places} needs a second image: other=… (--with)")


def one_image(model: Any, image: Any, inputs: Mapping[str, Any] | None) -> tuple[engine.Trace, Views | None]:
    """A trace of one image."""
    if isinstance(image, engine.Trace):
        trace, views = of_model(image, model), None
    else:
        wrapped = as_model(model)
        listed = as_images(image, wrapped.channels, wrapped.frames)
        views = Views.of(listed, wrapped)
        trace = Trace(wrapped, listed, inputs)
    if len(trace) != 1:
        raise InputError(f"a counterfactual is of one image, not of {len(trace)}; ask for each")
    return trace, views


def named_image(model: Any, image: Any, inputs: Mapping[str, Any] | None) -> tuple[engine.Trace, str]:
    trace, views = one_image(model, image, inputs)
    return trace, "image 0" if views is None else views.name(0)


@dataclass(eq=False)
class Task:
    """One image, the decision that is wanted, and what is done with its patches."""

    trace: engine.Trace
    aim: Aim
    change: Change

    def sets(self, listed: Sequence[Sequence[int]]) -> Sets:
        return as_sets(listed, self.trace.layout.patches, self.trace.images.device)

    @cached_property
    def search(self) -> Search:
        def margins(sets: Sets) -> Tensor:
            return self.aim.margins(self.change.outputs(sets, WHAT))

        return Search(margins, self.trace.layout.patches, self.change.most, self.trace.images.device)


# --------------------------------------------------------------------------------------------------------- contrast map


def ordered(
    task: Task,
    method: str | ConfiguredMethod | None,
    options: Mapping[str, Any],
    beside: engine.Trace | None,
    matches: Matches | None,
) -> tuple[Attribution, list[int]]:
    """The contrast map, and all patches, those that speak most for the present decision first.

    Where patches are exchanged: those first that also speak most for the wanted one in the other image.
    """
    if method is None and options:
        raise OptionError(f"name the method that takes {', '.join(options)}: method=…")
    found = contrast(task, method, options)
    values = patches(task, found.map)
    if beside is not None:
        there = evidence(Task(beside, task.aim, task.change), method or found.method, options)
        values = values - (there if matches is None else there[matches])
    return found, values.argsort(descending=True, stable=True).tolist()


def contrast(task: Task, method: str | ConfiguredMethod | None, options: Mapping[str, Any]) -> Attribution:
    """The map of what speaks for the present decision rather than the wanted one."""
    target = task.aim.contrast
    if method is not None:
        return explain(task.trace.model, task.trace, method, target, **options)
    try:
        return explain(task.trace.model, task.trace, METHOD, target)
    except (Unsupported, EmptyMap):
        return explain(task.trace.model, task.trace, INSTEAD, target)


def evidence(task: Task, method: str | ConfiguredMethod, options: Mapping[str, Any]) -> Tensor:
    """The same for each patch of the other image; nothing where its map is empty."""
    try:
        return patches(task, contrast(task, method, options).map)
    except EmptyMap:
        return torch.zeros(task.trace.layout.patches, dtype=torch.float64)


def patches(task: Task, map: Map) -> Tensor:
    """One value for each patch, row by row."""
    return Case(task.trace, map, task.aim.contrast).patches[0].flatten().double().cpu().nan_to_num(0)


# --------------------------------------------------------------------------------------------------------------- search


def smallest(search: Search, start: Reached, how: str, pool: int, proof: int) -> tuple[Reached, int]:
    """The smallest set that is found, and the least size that is not excluded."""
    best = search.pruned(start)
    if how == "greedy":
        most = len(best.patches) - 1 if best.turns else search.most
        grown = search.grown(pool, most) if most else best
        best = better(best, search.pruned(grown))
    shown = search.proved(len(best.patches) if best.turns else search.most + 1, proof)
    return (best if shown.found is None else shown.found), shown.bound


def better(one: Reached, other: Reached) -> Reached:
    """The smaller of two sets that turn the decision, else the nearer one."""
    if one.turns and other.turns:
        return other if (len(other.patches), -other.margin) < (len(one.patches), -one.margin) else one
    return other if other.margin > one.margin else one


# --------------------------------------------------------------------------------------------------------------- result


def told(
    task: Task,
    reached: Reached,
    bound: int,
    outputs: Tensor,
    start: Reached,
    found: Attribution,
    settings: Mapping[str, Any],
    other: str | None,
) -> Counterfactual:
    """The result, after the set was run alone and again without each of its patches."""
    trace, aimed, change = task.trace, task.aim, task.change
    final = change.outputs(task.sets([reached.patches]))
    certified = bool(aimed.margins(final) > 0)
    singles = [[p for p in reached.patches if p != patch] for patch in reached.patches]
    minimal = certified and not any(margin > 0 for margin in task.search.measure(singles))
    along = change.outputs(task.sets(prefixes(reached.patches, len(reached.patches))))
    before, model = trace.output, trace.model
    shares = model.meaning.probabilities(torch.cat([before, final]))

    def named(index: int) -> Named:
        return Named(index, model.label(index), float(shares[0, index]), float(shares[1, index]))

    return Counterfactual(
        source=named(aimed.source),
        to=named(int(aimed.wanted(final)[0])),
        decision=named(int(final[0].argmax())),
        patches=tuple(reached.patches),
        grid=trace.layout.grid,
        way=change.way,
        why=change.why,
        certified=certified,
        minimal=minimal,
        bound=bound,
        most=change.most,
        passes=change.passes,
        path=Course(*map(tuple, aimed.probabilities(along))),
        curve=Course(*map(tuple, aimed.probabilities(outputs))),
        first=len(start.patches) if start.turns else None,
        map=found,
        options=settings,
        shown=after(trace, change, task.sets([reached.patches])),
        other=other,
    )
