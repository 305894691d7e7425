"""The study `ablate`: what each attention head, MLP or layer is worth on a data set; stored as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from vitreous.attribute import attribute
from vitreous.errors import InputError, OptionError, VitreousError, one_of
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene
from vitreous.inspect.ablate.blocks import KINDS, find_places
from vitreous.inspect.ablate.effects import Effects, measure_effects
from vitreous.inspect.ablate.findings import ablate_findings
from vitreous.inspect.ablate.places import Heads, Places, also
from vitreous.inspect.ablate.sources import BY, Source, mean_values, readable, values_of
from vitreous.metrics.pool import Pool
from vitreous.models.model import Model
from vitreous.models.survey_run import noise_images
from vitreous.registry import Method
from vitreous.trace.apply import class_methods, why_not
from vitreous.trace.last_block import narrowing
from vitreous.trace.run import Run
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images

if TYPE_CHECKING:
    import pyarrow

NUMBERS = ("score", "log_probability", "answer")  # of a network
_MEANS: WeakKeyDictionary[Ablate, dict[str, list[Tensor]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Ablate(Kind):
    """The target's score, its probability and the answer without each part; beside them, their prediction."""

    name = "ablate"
    summary = "What a model loses without each attention head, MLP or layer: truly run, and predicted."
    shard = 32
    what: str = "heads"
    by: str = "zero"
    control: bool = True
    maps: bool = False
    points: int = 1
    seed: int = 0

    @classmethod
    def make(cls, options: Mapping[str, Any]) -> Ablate:
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise OptionError(f"the study ablate has no option {name!r}; it has {', '.join(sorted(known))}")
        made = cls(**options)
        for value, choices in ((made.what, KINDS), (made.by, BY)):
            if value not in choices:
                raise OptionError(f"{value!r} cannot be ablated, or not so; choose {one_of(choices)}")
        if made.points < 0:
            raise OptionError(f"points={made.points}: give the number of gradients to average, 0 for none")
        return made

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.by != "zero"

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return {"ablate": self.options}

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        one, many = pa.float64(), pa.list_(pa.float64())
        found: dict[str, pyarrow.DataType] = dict.fromkeys((*NUMBERS, "unchanged"), one)
        found |= {f"{name}_without": many for name in NUMBERS}
        found |= {f"{name}_control": many for name in NUMBERS}
        found |= {f"{name}_{ending}": many for name in NUMBERS[:2] for ending in ("predicted", "averaged")}
        return found | {"map_correlation": many, "map_distance": many}

    def check(self, model: Model) -> list[str]:
        trace = Trace(model, noise_images(model, model.size)[:1], model.arguments.sample(None))
        places = find_places(self.what, trace)
        notes = list(places.notes)
        if isinstance(places, Heads) and places.mixed:
            notes.append(f"{model.name} mixes its heads before the values; a head is what multiplies the values of one")
        if not model.has_gradients:
            notes.append(f"{model.name} has int8 weights, which pass no gradient on: nothing is predicted")
        if self.maps:
            notes.append(f"maps are those of {method_of(trace).name}")
        return notes

    def work(self, scene: Scene) -> dict[str, Outcome]:
        assert scene.target is not None
        trace = scene.trace
        device = trace.images.device.type
        with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
            places = find_places(self.what, trace)
            source = self.source(scene, places)
            asked: dict[str, Any] = {"control": self.control, "predict": True, "steps": self.points, "seed": self.seed}
            found = measure_effects(places, trace, scene.target, source, **asked)
            changes = map_changes(places, trace, scene.target, source) if self.maps else None
        return {"ablate": Outcome(values_in(found, changes), told={"parts": list(places.parts)})}

    def source(self, scene: Scene, places: Places) -> Source:
        """What takes the place of the values of a batch."""
        if self.by == "zero":
            return Source()
        pool = scene.pool
        assert pool is not None
        if self.by == "mean":
            kept = _MEANS.setdefault(self, {})
            if pool.model.name not in kept:
                kept[pool.model.name] = mean_values(places, traces_of(pool, len(scene.trace)))
            return Source(kept[pool.model.name])
        others = [readable(number, pool.count, self.seed, pool.image) for number in scene.numbers]
        return Source(values_of(places, together(pool, others)))

    def findings(self, study: Rows) -> Findings:
        return ablate_findings(self, study)


def traces_of(pool: Pool, batch: int) -> Iterator[Trace]:
    """All images that can be read, a few at a time."""
    waiting: list[tuple[int, Images]] = []
    for number in range(pool.count):
        try:
            waiting.append((number, pool.image(number)))
        except InputError:
            continue  # it has a row of its own, with this error
        if len(waiting) == batch:
            yield together(pool, waiting)
            waiting = []
    if waiting:
        yield together(pool, waiting)


def together(pool: Pool, images: Sequence[tuple[int, Images]]) -> Trace:
    """A trace of some images of a data set, each with the inputs that travel with it."""
    given = [pool.given(number) for number, _ in images]
    known = [one for one in given if one is not None]
    inputs = {name: np.concatenate([one[name] for one in known]) for name in known[0]} if known else None
    return Trace(pool.model, torch.cat([image for _, image in images]), inputs)


def values_in(found: Effects, changes: tuple[np.ndarray, np.ndarray] | None) -> dict[str, Any]:
    """By column, one for each image."""
    values: dict[str, Any] = {"unchanged": list(found.unchanged)}
    for i, name in enumerate(NUMBERS):
        values[name] = list(found.whole[:, i])
        values[f"{name}_without"] = list(found.true[:, :, i])
        if found.control is not None:
            values[f"{name}_control"] = list(found.control[:, :, i])
    for ending, both in (("predicted", found.predicted), ("averaged", found.averaged)):
        if both is not None:
            values |= {f"{name}_{ending}": list(one) for name, one in zip(NUMBERS, both)}
    if changes is not None:
        values |= {"map_correlation": list(changes[0]), "map_distance": list(changes[1])}
    return values


# ----------------------------------------------------------------------------------------------------------------- maps


def method_of(trace: Trace) -> Method:
    """The default class-specific method of a model."""
    tried = class_methods()
    for one in tried:
        if why_not(trace.layout, trace.model.name, one) is None:
            return one
    names = one_of([one.name for one in tried])
    raise OptionError(f"{trace.model.name} has no class-specific map by {names}; leave --maps out")


def map_changes(places: Places, trace: Trace, target: Target, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """The rank correlation of the map without each part and that of the whole network, and their distance."""
    declared = method_of(trace)
    narrowing(trace)  # found out about the whole network, not about one without a part
    whole = attribute(trace, declared, target, declared.check({}), strict=False).map.flatten(1).double().cpu().numpy()
    shape = len(trace), len(places.all)
    alike, away = np.full(shape, np.nan), np.full(shape, np.nan)
    for i, (layer, part) in enumerate(places.all):
        try:
            own = without(places, trace, source, {(layer, part)})
            made = attribute(own, declared, target, declared.check({}), strict=False).map.flatten(1)
        except VitreousError:
            continue
        other = made.double().cpu().numpy()
        away[:, i] = np.linalg.norm(other - whole, axis=1) / np.maximum(np.linalg.norm(whole, axis=1), 1e-300)
        alike[:, i] = [correlated(a, b) for a, b in zip(whole, other)]
    return alike, away


def correlated(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation; NaN where a map is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(stats.spearmanr(one, other).statistic)


def without(places: Places, trace: Trace, source: Source, gone: set[tuple[int, int]]) -> Trace:
    """A trace of the same images in which every run is one without some parts."""

    def edit(layer: int, values: Tensor) -> Tensor | None:
        mine = sorted(part for number, part in gone if number == layer)
        if not mine:
            return None
        other = source.of(layer, values)
        return torch.cat([(other if part in mine else values)[:, part, None] for part in range(values.shape[1])], 1)

    def surgery(how: Run) -> Run:
        """The parts are replaced first, so that other hooks see what the network continues with."""
        return also(places.edited(how.inside(nullcontext), edit, len(trace)), how.within)

    own = trace.like(trace.images)
    own.layout, own.crops = trace.layout, trace.crops
    own.surgery = surgery
    own.whole()
    return own
