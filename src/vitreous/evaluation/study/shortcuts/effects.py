"""`study shortcuts`, second phase: what the clusters of the first do to every image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitreous.errors import InputError, OptionError, Unsupported
from vitreous.evaluation.study.findings import Findings
from vitreous.evaluation.study.kind import Kind, Outcome, Rows, Scene
from vitreous.evaluation.study.shortcuts.cluster import assigned, unit
from vitreous.evaluation.study.shortcuts.design import SHEET, unpack
from vitreous.evaluation.study.shortcuts.parts import features_of
from vitreous.evaluation.study.shortcuts.perturb import inserted, mask_of, unchanged, without
from vitreous.metrics.case import Case
from vitreous.registry import METRICS
from vitreous.trace.target import Target

if TYPE_CHECKING:
    import pyarrow

REMOVAL = ("removed", "tokens", "p_without", "hit_without", "p_random", "hit_random")
INSERTION = ("inserted", "p_before", "p_cue", "best_cue", "p_ordinary", "best_ordinary", "p_chance")
WHOLE = ("removed", "tokens", "inserted", "best_cue", "best_ordinary", "occurs", "patches")  # numbers that are integers
Columns = dict[str, list[list[Any]]]


@dataclass(frozen=True)
class Effects(Kind):
    """Of each image: which clusters occur in it, its class without the tokens of each cluster of its own class, and
    its class with the patches of other classes' clusters."""

    name = "effects"
    summary = "What the clusters of a study of shortcuts do: removed from their own images, inserted into others."
    masked = True
    pooled = True
    single = True
    designs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def make(cls, *given: Any) -> Effects:
        raise OptionError("effects is the second phase of the study shortcuts, and is not run by itself")

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        return {"effects": {}}

    @cached_property
    def plans(self) -> dict[str, Plan]:
        return {name: Plan(told) for name, told in self.designs.items()}

    def columns(self) -> dict[str, pyarrow.DataType]:
        import pyarrow as pa

        lists = {name: pa.list_(pa.int32() if name in WHOLE else pa.float64()) for name in (*REMOVAL, *INSERTION)}
        occurs = {name: pa.list_(pa.int32()) for name in ("occurs", "patches")}
        return {**occurs, **lists, "a_tsi": pa.float64(), "m_tsi": pa.float64()}

    def shown_images(self, model: str, count: int) -> Collection[int]:
        """The images of the contact sheets."""
        clusters = self.designs[model]["clusters"]
        return {number for cluster in clusters for number in cluster["members"][:SHEET]}

    def findings(self, study: Rows) -> Findings:
        return Findings("The second phase of the study shortcuts.")

    def work(self, scene: Scene) -> dict[str, Outcome]:
        plan = self.plans[scene.model]
        with torch.inference_mode(False), torch.autocast(scene.trace.images.device.type, enabled=False):
            return {"effects": Outcome(found_in(scene, plan))}


@dataclass(frozen=True, eq=False)
class Plan:
    """The design of one model, ready for use."""

    told: dict[str, Any]

    @cached_property
    def mean(self) -> np.ndarray:
        return unpack(self.told["mean"])

    @cached_property
    def by_class(self) -> dict[int, tuple[list[int], np.ndarray, np.ndarray]]:
        """The clusters of each class: their numbers, centres and radii."""
        found = dict[int, list[dict[str, Any]]]()
        for one in self.told["clusters"]:
            found.setdefault(one["class"], []).append(one)
        return {
            group: (
                [one["cluster"] for one in some],
                np.stack([unpack(one["centre"]) for one in some]),
                np.array([one["radius"] for one in some]),
            )
            for group, some in found.items()
        }

    @cached_property
    def guests(self) -> dict[int, list[list[Any]]]:
        """What is inserted into each image."""
        found = defaultdict[int, list[list[Any]]](list)
        for pair in self.told["pairs"]:
            found[pair[0]].append(pair)
        return found

    @cached_property
    def indexed(self) -> set[int]:
        return {number for one in self.told["clusters"] for number in one["indexed"]}


def found_in(scene: Scene, plan: Plan) -> dict[str, Sequence[Any]]:
    """All columns of a batch."""
    count = len(scene.trace)
    columns: Columns = {name: [[] for _ in range(count)] for name in ("occurs", "patches", *REMOVAL, *INSERTION)}
    if plan.told["clusters"]:
        places = clusters_in(scene, plan)  # by image, then by cluster
        for i, held in enumerate(places):
            columns["occurs"][i] = list(held)
            columns["patches"][i] = [int(mask.sum()) for mask in held.values()]
        remove(scene, plan, places, columns)
        insert(scene, plan, columns)
    return {**columns, **indices(scene, plan)}


def clusters_in(scene: Scene, plan: Plan) -> list[dict[int, np.ndarray]]:
    """The clusters of all classes that occur among the patches of each image, with those patches."""
    with torch.no_grad():
        features = features_of(scene.trace, plan.told["layer"]).cpu().numpy()
    units = unit(features, plan.mean)  # [B P D]
    found: list[dict[int, np.ndarray]] = [{} for _ in units]
    for numbers, centres, radii in plan.by_class.values():
        which = assigned(units, centres, radii)
        for i, row in enumerate(which):
            for place in np.unique(row[row >= 0]):
                found[i][numbers[place]] = row == place
    return found


def remove(scene: Scene, plan: Plan, places: list[dict[int, np.ndarray]], columns: Columns) -> None:
    """Take the tokens of each cluster of its class out of an image, and as many random others."""
    assert scene.target is not None
    rows, gone, chance, clusters, asked = list[int](), [], [], list[int](), list[int]()
    classes = classes_of(scene.target, len(scene.trace))
    for i, held in enumerate(places):
        own = plan.by_class.get(classes[i])
        for cluster in () if own is None else own[0]:
            mask = held.get(cluster)
            if mask is None or mask.all():
                continue
            rest, size = np.flatnonzero(~mask), int(mask.sum())
            draw = np.random.default_rng([7, scene.numbers[i], cluster])
            rows.append(i)
            clusters.append(cluster)
            asked.append(classes[i])
            gone.append(mask)
            chance.append(mask_of(draw.permutation(rest)[:size], len(mask)))
    if not rows:
        return
    both = without(scene.trace, rows * 2, np.stack([*gone, *chance]), asked * 2)
    half = len(rows)
    for n, i in enumerate(rows):
        values = (
            clusters[n],
            int(gone[n].sum()),
            both.probability[n],
            float(both.best[n] == asked[n]),
            both.probability[half + n] if chance[n].sum() == gone[n].sum() else np.nan,
            float(both.best[half + n] == asked[n]) if chance[n].sum() == gone[n].sum() else np.nan,
        )
        for name, value in zip(REMOVAL, values):
            columns[name][i].append(value)


def classes_of(target: Target, count: int) -> list[int]:
    """The class of each image; −1 if the target is none."""
    words = [str(target.of_image(i)) for i in range(count)]
    return [int(word) if word.isdigit() else -1 for word in words]


def insert(scene: Scene, plan: Plan, columns: Columns) -> None:
    """Put patches of other classes' clusters into an image, ordinary parts of that class, and random patches."""
    trace, patches = scene.trace, scene.trace.layout.patches
    asked = [(i, pair) for i, number in enumerate(scene.numbers) for pair in plan.guests.get(number, ())]
    given = read_donors(scene, {n for _, pair in asked for n in (pair[2], pair[4])})
    asked = [(i, pair) for i, pair in asked if pair[2] in given and pair[4] in given]
    if not asked:
        return
    groups = {one["cluster"]: one["class"] for one in plan.told["clusters"]}
    classes = [groups[pair[1]] for _, pair in asked]
    rows = [i for i, _ in asked]
    drawn = [np.random.default_rng(pair[6]).permutation(patches) for _, pair in asked]
    chance = [mask_of(some[: len(pair[3])], patches) for some, (_, pair) in zip(drawn, asked)]
    cue = [mask_of(pair[3], patches) for _, pair in asked]
    ordinary = [mask_of(as_many(pair, some), patches) for some, (_, pair) in zip(drawn, asked)]
    before = unchanged(trace, rows, classes).probability
    donors = [given[pair[2]] for _, pair in asked]
    others = [given[pair[4]] for _, pair in asked]
    masks = np.stack([*cue, *ordinary, *chance])
    found = inserted(trace, rows * 3, [*donors, *others, *donors], masks, classes * 3)
    p, best = found.probability.reshape(3, -1), found.best.reshape(3, -1)
    for n, (i, pair) in enumerate(asked):
        values = (pair[1], before[n], p[0, n], best[0, n], p[1, n], best[1, n], p[2, n])
        for name, value in zip(INSERTION, values):
            columns[name][i].append(value)


def as_many(pair: list[Any], drawn: np.ndarray) -> list[int]:
    """The ordinary parts, and random patches of the same image where these are fewer than the cue has."""
    cue, parts = pair[3], pair[5]
    more = [place for place in drawn.tolist() if place not in parts and (pair[2] != pair[4] or place not in cue)]
    return [*parts, *more[: len(cue) - len(parts)]]


def read_donors(scene: Scene, numbers: set[int]) -> dict[int, torch.Tensor]:
    """The images that patches are taken from; without those that can no longer be read or have another size."""
    found = {}
    for number in sorted(numbers):
        assert scene.pool is not None
        try:
            image = scene.pool.image(number)
        except InputError:
            continue
        if image.shape[1:] == scene.trace.images.shape[1:]:
            found[number] = image
    return found


def indices(scene: Scene, plan: Plan) -> dict[str, Sequence[Any]]:
    """A-TSI and M-TSI of the images that a cluster is judged by, where they have masks."""
    count = len(scene.trace)
    found: dict[str, list[float | None]] = {"a_tsi": [None] * count, "m_tsi": [None] * count}
    assert scene.target is not None
    for i, number in enumerate(scene.numbers):
        if number not in plan.indexed or scene.masks[i] is None:
            continue
        trace = scene.trace.only(i)
        case = Case(trace, torch.zeros(1, *trace.layout.grid), scene.target.of_image(i), masks=[scene.masks[i]])
        try:
            for name, pool in (("a_tsi", "mean"), ("m_tsi", "max")):
                measured = METRICS["token_shortcut"].run(case, pool=pool, cover=0.5, of="probability")
                found[name][i] = float(measured.value[0])
        except Unsupported:
            continue
    return {**found}
