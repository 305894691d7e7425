"""Methods × metrics on many images: what every map is worth, beside the controls that know nothing.

values [M K N]: methods, metrics, images; not a number where something could not be measured, and why
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import nn

from vitreous import pictures
from vitreous.api import as_model, attribute, choose, images_at_once
from vitreous.attribution import Attribution
from vitreous.dataset import Data, match_labels, read_data
from vitreous.errors import InputError, OptionError, TargetError, Unsupported, VitreousError, nearest, one_line
from vitreous.evaluation import Measured, make_case, measure, no_target
from vitreous.masks import Mask, read_mask
from vitreous.memory import in_batches, out_of_memory
from vitreous.model import Model
from vitreous.progress import steps
from vitreous.registry import METHODS, METRICS, Declared, Method, Metric
from vitreous.statistic import Moments, Summary, summarise
from vitreous.target import Class, Target, fix, of_image, title
from vitreous.trace import Trace

CONTROLS = ("random", "centre")
QUICK = ("attention", "rollout", "gae", "cdam", "legrad", "gradcam", "attn_lrp", "input_x_gradient")
USUAL = ("token_deletion", "deletion", "insertion", "sparsity")
USUAL_WITH_MASKS = ("pointing_game", "energy_in_mask")
DESCRIBING = frozenset({"complexity", "discrimination", "robustness", "sanity"})  # families that cannot tell right maps
PERMANENT = (Unsupported, TargetError, OptionError)  # the next batch would end the same way
TIMED = 3  # batches in which every method runs on a trace of its own, so that its cost can be told
EXAMPLES = 4  # images whose maps are shown
PHOTO = 224  # pixels of an example's longer side
BROKEN, NO_MASK, UNTOLD = "the map is not finite", "no mask", "the metric gives no number"

D = TypeVar("D", bound=Declared)
R = TypeVar("R")
Settings = Mapping[str, Mapping[str, Any]]
Batch = list[tuple[int, pictures.Picture]]
After = Callable[[list[int]], None]


@dataclass(frozen=True, eq=False)
class Asked(Generic[D]):
    """A method or a metric, with all its options."""

    declared: D
    values: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be measured, and how."""

    methods: dict[str, Asked[Method]]
    metrics: dict[str, Asked[Metric]]
    target: Any = None  # None: the label where it is known, else the best class
    seed: int = 0
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Example:
    """One image with every method's map of it."""

    name: str
    photo: Image.Image
    target: str
    maps: dict[str, Attribution] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """Of one image."""

    seconds: float
    ratio: float  # to a plain forward pass, measured in the same run


@dataclass(frozen=True, eq=False)
class Scene:
    """One batch: its images, what is explained in them, where the object is."""

    numbers: list[int]
    trace: Trace
    target: Target
    masks: list[Mask | None]
    timed: bool  # does each method run on a trace of its own?


@dataclass(eq=False)
class Found:
    """What one method gave on one batch."""

    values: np.ndarray  # [K b]
    made: Attribution | None = None
    seconds: float = float("nan")  # of an image
    curves: dict[str, Measured] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # by metric; "": the method itself
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)  # metric and place in the batch


def run_leaderboard(
    model: Model | nn.Module | str | None,
    data: str | Path | Sequence[str | Path] | Data,
    methods: str | Sequence[str] | None = None,
    metrics: str | Sequence[str] | None = None,
    *,
    masks: str | Path | None = None,
    target: Any = None,
    options: Settings | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Leaderboard:
    """Measure methods on a data set; `.save(folder)` writes the tables and the report.

    `data`: a folder, a folder of class folders, a CSV or files. `methods`, `metrics`: names, "all", or a family of
    metrics; None: a quick choice. `target`: "label", "top-1" or what `explain` takes; None: the label where it is
    known, else top-1. `options`: {"rollout": {"discard": 0.9}, "deletion": {"steps": 20}}. `limit`: only the first so
    many pictures; `sample`: so many by chance.
    """
    found = (data if isinstance(data, Data) else read_data(data, masks)).take(limit, sample, seed)
    plan = make_plan(methods, metrics, options or {}, found, target, seed)
    board = Leaderboard(as_model(model), found, plan)
    board.run()
    return board


# ------------------------------------------------------------------------------------------------------------ planning


def make_plan(
    methods: str | Sequence[str] | None,
    metrics: str | Sequence[str] | None,
    options: Settings,
    data: Data,
    target: Any = None,
    seed: int = 0,
) -> Plan:
    """What is asked for, checked before anything runs; the controls are always there."""
    if not len(data):
        raise InputError(f"{data.source}: no picture is left to measure")
    if target == "label" and all(sample.label is None for sample in data.samples):
        raise TargetError(f"{data.source}: has no labels; give class folders, a CSV with a label column, or top-1")
    chosen = pick_methods(methods)
    measured, notes = pick_metrics(metrics, data.masked)
    known = {*chosen, *(one.name for one in measured)}
    for name in options:
        if name not in known:
            raise OptionError(f"options for {name}: it is not among the methods and metrics asked for")
    return Plan(
        {name: Asked(METHODS[name], METHODS[name].check(options.get(name, {}))) for name in chosen},
        {one.name: Asked(one, one.check(options.get(one.name, {}))) for one in sorted(measured, key=describes)},
        target,
        seed,
        notes,
    )


def describes(one: Metric) -> bool:
    """Does it describe a map, rather than tell whether it is right?"""
    return one.family in DESCRIBING


def pick_methods(given: str | Sequence[str] | None) -> list[str]:
    """Names, once each; the controls come first."""
    words = [name for name in QUICK if name in METHODS] if given is None else listed(given)
    if words == ["all"]:
        words = list(METHODS)
    return list(dict.fromkeys([*CONTROLS, *(METHODS[name].name for name in words)]))


def pick_metrics(given: str | Sequence[str] | None, masked: bool) -> tuple[list[Metric], tuple[str, ...]]:
    """Metrics by name or family; those that need masks only where there are some, unless they are named."""
    if given is None:
        usual = (*USUAL, *USUAL_WITH_MASKS) if masked else USUAL
        return [METRICS[name] for name in usual if name in METRICS], ()
    chosen: dict[str, Metric] = {}
    without: list[str] = []
    families = {one.family for one in METRICS.values()}
    for word in listed(given):
        if word not in METRICS and word not in (*families, "all"):
            raise OptionError(f"unknown metric {word!r}{nearest(word, [*METRICS, *families, 'all'])}")
        several = word not in METRICS
        for one in [m for m in METRICS.values() if word in (m.name, "all") or (several and word == m.family)]:
            if one.masks and not masked and not several:
                raise InputError(f"{one.name} needs to know where the object is: give masks, or a CSV with mask or box")
            if one.masks and not masked:
                without.append(one.name)
            else:
                chosen[one.name] = one
    if not chosen:
        raise InputError(f"{', '.join(without)}: all need masks; give masks, or a CSV with mask or box")
    note = f"without {', '.join(dict.fromkeys(without))}: no picture has a mask"
    return list(chosen.values()), (note,) if without else ()


def listed(given: str | Sequence[str]) -> list[str]:
    words = given.split(",") if isinstance(given, str) else given
    found = [word.strip().replace("-", "_") for word in words if word.strip()]
    if not found:
        raise OptionError("name at least one method and one metric; see: vitreous methods, vitreous metrics")
    return found


# ------------------------------------------------------------------------------------------------------------- running


class Leaderboard:
    """The values of every method, metric and image, filled as the run goes; whatever fails leaves its reason."""

    def __init__(self, model: Model, data: Data, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.data = match_labels(data, model)
        self.methods, self.metrics = list(plan.methods), list(plan.metrics)
        self.values = np.full((len(self.methods), len(self.metrics), len(data)), np.nan)
        self.seconds = np.full((len(self.methods), len(data)), np.nan)
        self.measured = np.zeros((len(self.methods), len(data)), dtype=bool)
        self.targets: dict[int, str] = {}
        self.best: dict[int, int] = {}  # the model's own classes
        self.skipped: dict[int, str] = {}  # pictures that cannot be used
        self.lost_masks: dict[int, str] = {}
        self.refused: dict[tuple[str, str], str] = {}  # method and metric ("": any) that cannot work here
        self.reasons: dict[tuple[int, int, int], str] = {}  # method, metric and image without a value
        self.curves: dict[tuple[str, str], Moments] = {}
        self.examples: dict[int, Example] = {}
        self._forward: list[float] = []
        self._shown = {round(i) for i in np.linspace(0, len(data) - 1, min(EXAMPLES, len(data)))}

    @property
    def done(self) -> np.ndarray:
        """The images of which something is measured, [N]."""
        return np.asarray(self.measured.any(0))

    @property
    def finished(self) -> bool:
        """Is everything measured that can be?"""
        readable = [number for number in range(len(self.data)) if number not in self.skipped]
        return bool(self.measured[:, readable].all())

    def run(self, after: After | None = None) -> None:
        """Measure everything; `after` each method and batch it is told of which images there is more."""
        size = min(images_at_once(self.model), len(self.data))
        starts = range(0, len(self.data), size)
        groups = [list(range(start, min(start + size, len(self.data)))) for start in starts]
        for group in steps(groups, len(self.data), "images", len):
            batch = self._read(group)
            if batch:
                self._measure(batch, after)

    def _read(self, group: list[int]) -> Batch:
        batch: Batch = []
        for number in group:
            try:
                batch.append((number, pictures.open_file(self.data.samples[number].image)))
            except InputError as error:
                self.skipped[number] = str(error)
        return batch

    def _measure(self, batch: Batch, after: After | None) -> None:
        """One batch, in smaller parts where memory is short; one that fails altogether is skipped."""
        try:
            in_batches(lambda part: self._on_part(batch[part], after), len(batch), len(batch))
        except TargetError:
            raise
        except Exception as error:
            if not self.measured.any() and not isinstance(error, InputError):
                raise  # the first batch: nothing is lost, and the next would fail as well
            self.skipped.update({number: explained(error) for number, _ in batch})

    def _on_part(self, batch: Batch, after: After | None) -> None:
        """Method by method; what an attempt with too little memory has finished stays."""
        scene = self._scene(batch)
        for m in steps(range(len(self.methods)), len(self.methods), "methods"):
            if self.measured[m, scene.numbers].all():
                continue
            if (self.methods[m], "") not in self.refused:
                self._take(scene, m, self._one_method(scene, m))
            self.measured[m, scene.numbers] = True
            if after is not None:
                after(scene.numbers)

    def _scene(self, batch: Batch) -> Scene:
        numbers, opened = [number for number, _ in batch], [picture for _, picture in batch]
        trace = Trace(self.model, [picture.image for picture in opened])
        trace.record(whole=True)
        target = self._target(trace, numbers)
        timed = len(self._forward) < TIMED
        if timed:
            self._forward.append(forward_seconds(trace) / len(numbers))
        self.best.update(zip(numbers, trace.output.argmax(1).tolist()))
        for i, number in enumerate(numbers):
            own = of_image(target, i)
            self.targets[number] = str(own)
            if number in self._shown and number not in self.examples:
                photo = shrunk(self.model.preprocess.view(opened[i].image))
                said = title(own, self.model, trace.output[i : i + 1], 0)
                self.examples[number] = Example(self.data.samples[number].name, photo, said)
        return Scene(numbers, trace, target, self._masks(trace, numbers, opened), timed)

    def _target(self, trace: Trace, numbers: list[int]) -> Target:
        """What is explained in each image, fixed."""
        if self.plan.target not in (None, "label"):
            return fix(choose(trace, self.plan.target, METHODS["gradient"]), trace.output)
        if not trace.classifies:
            raise no_target(trace)
        labels = [self.data.samples[number].label for number in numbers]
        best = trace.output.argmax(1).tolist()
        return Class(tuple(label if isinstance(label, int) else top for label, top in zip(labels, best)))

    def _masks(self, trace: Trace, numbers: list[int], opened: list[pictures.Picture]) -> list[Mask | None]:
        masks: list[Mask | None] = []
        for number, picture in zip(numbers, opened):
            try:
                mask = read_mask(self.data.samples[number].mask, picture, self.model.preprocess, trace.size)
                if mask is not None and not mask.any():
                    raise InputError("it marks nothing that the model sees")
            except InputError as error:
                self.lost_masks[number] = str(error)
                mask = None
            masks.append(mask)
        return masks

    def _one_method(self, scene: Scene, m: int) -> Found:
        """One method's maps for a batch, and every metric of them."""
        name, asked = self.methods[m], self.plan.methods[self.methods[m]]
        found = Found(np.full((len(self.metrics), len(scene.numbers)), np.nan))
        own = Trace(self.model, scene.trace.images) if scene.timed else scene.trace
        begun = now(own)
        try:
            target = scene.target if asked.declared.targeted else None
            found.made = attribute(own, asked.declared, target, asked.values)
        except Exception as error:
            self._failed(found, error, None)
            return found
        if scene.timed:
            found.seconds = (now(own) - begun) / len(own)
        for k, metric in enumerate(self.metrics):
            if (name, metric) not in self.refused:
                try:
                    self._one_metric(scene, found, asked, k)
                except Exception as error:
                    self._failed(found, error, k)
        return found

    def _one_metric(self, scene: Scene, found: Found, asked: Asked[Method], k: int) -> None:
        assert found.made is not None
        wanted, maps = self.plan.metrics[self.metrics[k]], found.made.map
        unmasked = [wanted.declared.masks and mask is None for mask in scene.masks]
        if not all(unmasked):
            case = make_case(scene.trace, asked.declared, asked.values, scene.target, maps, scene.masks)
            measured = measure(wanted.declared, case, wanted.values)
            found.values[k] = measured.value.double().numpy()
            if measured.curve is not None and measured.at is not None:
                found.curves[self.metrics[k]] = measured
        for i in np.flatnonzero(np.isnan(found.values[k])).tolist():
            broken = not maps[i].isfinite().all()
            found.reasons[k, i] = NO_MASK if unmasked[i] else BROKEN if broken else UNTOLD

    def _failed(self, found: Found, error: Exception, k: int | None) -> None:
        """A method (or a metric of it) that fails: for good, or for this batch; too little memory halves the batch."""
        count = found.values.shape[1]
        if out_of_memory(error) and count > 1:
            raise error
        said = explained(error)
        if isinstance(error, PERMANENT):
            found.refused["" if k is None else self.metrics[k]] = said
            return
        for which in range(len(self.metrics)) if k is None else [k]:
            found.reasons.update({(which, i): said for i in range(count)})

    def _take(self, scene: Scene, m: int, found: Found) -> None:
        """Keep what a method gave."""
        name, numbers = self.methods[m], scene.numbers
        self.values[m][:, numbers] = found.values
        self.seconds[m, numbers] = found.seconds
        self.refused.update({(name, metric): said for metric, said in found.refused.items()})
        self.reasons.update({(m, k, numbers[i]): said for (k, i), said in found.reasons.items()})
        for metric, measured in found.curves.items():
            assert measured.curve is not None and measured.at is not None
            kept = self.curves.setdefault((name, metric), Moments(measured.at))
            if len(kept.at) == measured.curve.shape[1]:
                kept.add(measured.curve.numpy())
        for i, number in enumerate(numbers):
            if number in self.examples and found.made is not None:
                small = found.made.map[i : i + 1].cpu().clone()
                self.examples[number].maps[name] = replace(found.made[i], map=small, views=None)

    # ------------------------------------------------------------------------------------------------ what it tells

    def summary(self) -> Summary:
        """Means, intervals, ranks and verdicts of what is done."""
        asked = list(self.plan.metrics.values())
        return summarise(
            self.values[:, :, self.done],
            self.methods,
            self.metrics,
            [one.declared.direction(one.values) for one in asked],
            judged=[not describes(one.declared) for one in asked],
            seed=self.plan.seed,
        )

    def costs(self) -> dict[str, Cost]:
        """Of the methods that ran on a trace of their own; the quickest batch counts, the others were disturbed."""
        quickest = min(self._forward, default=float("nan"))
        found: dict[str, Cost] = {}
        for name, seconds in zip(self.methods, self.seconds):
            if np.isfinite(seconds).any():
                least = float(np.nanmin(seconds))
                found[name] = Cost(least, least / quickest)
        return found

    @property
    def forward(self) -> float:
        """Seconds of a plain forward pass of one image."""
        return min(self._forward, default=float("nan"))

    @property
    def accuracy(self) -> float | None:
        """The share of labelled images whose label is the model's best class."""
        known = [(self.data.samples[n].label, top) for n, top in self.best.items()]
        right = [label == top for label, top in known if label is not None]
        return sum(right) / len(right) if right else None

    def why(self, m: int, k: int, number: int) -> str | None:
        """Why there is no value."""
        if number in self.skipped:
            return self.skipped[number]
        method, metric = self.methods[m], self.metrics[k]
        refused = self.refused.get((method, ""), self.refused.get((method, metric)))
        return self.reasons.get((m, k, number), refused)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One for each image, method and metric, as far as they are measured; last, pictures that cannot be used."""
        every = range(len(self.methods))
        for number in np.flatnonzero(self.done).tolist():
            for m in every:
                yield from self.rows_of(m, [number] if self.measured[m, number] else [])
        for m in every:
            yield from self.rows_of(m, list(self.skipped))

    def rows_of(self, m: int, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The rows of one method."""
        for number in numbers:
            sample = self.data.samples[number]
            for k, metric in enumerate(self.metrics):
                yield {
                    "image": sample.name,
                    "label": sample.label,
                    "target": self.targets.get(number),
                    "method": self.methods[m],
                    "metric": metric,
                    "value": finite(self.values[m, k, number]),
                    "seconds": finite(self.seconds[m, number]),
                    "note": self.why(m, k, number),
                }

    def failures(self) -> list[str]:
        """Everything that could not be done, in sentences: the same reason is told once."""
        said = [f"left out: {reason}" for reason in self.skipped.values()]
        said += [f"{self.data.samples[n].name}: its mask is not used: {why}" for n, why in self.lost_masks.items()]
        said += [f"without {method}: {why}" for (method, metric), why in self.refused.items() if not metric]
        pairs: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (method, metric), why in self.refused.items():
            if metric:
                pairs[metric, why].append(method)
        said += [
            f"{metric} cannot be measured for {self._whose(names)}: {why}" for (metric, why), names in pairs.items()
        ]
        images: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        for (m, k, number), why in self.reasons.items():
            metric = "" if why == BROKEN else self.metrics[k]
            images["" if why == NO_MASK else self.methods[m], metric, why].add(number)
        for (method, metric, why), numbers in images.items():
            name = self.data.samples[min(numbers)].name
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            said.append(f"{', '.join(part for part in (method, metric) if part)}: {why} ({name}{more})")
        return said

    def _whose(self, names: list[str]) -> str:
        able = [name for name in self.methods if (name, "") not in self.refused]
        return "any method" if set(names) >= set(able) else ", ".join(names)

    def notes(self) -> list[str]:
        """What a reader should know."""
        told = [*self.data.notes, *self.plan.notes]
        if not self.finished:
            said = f"{self.measured.all(0).sum()} of {len(self.data)} images are done"
            begun = int((self.done & ~self.measured.all(0)).sum())
            told.append(f"stopped early: {said}{f', {begun} are begun' if begun else ''}")
        return told

    def save(self, folder: str | Path) -> list[Path]:
        """Write the tables (Parquet, CSV, JSON) and the report (HTML)."""
        from vitreous.report.files import write_all

        return write_all(self, Path(folder))


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def explained(error: Exception) -> str:
    """On one line; what is not ours says its kind."""
    said = one_line(error)
    return said if isinstance(error, VitreousError) else f"{type(error).__name__}: {said}"


def now(trace: Trace) -> float:
    """Seconds, when everything asked of the device is done."""
    device = trace.images.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def forward_seconds(trace: Trace) -> float:
    """A plain run of the model on a batch, the second of two."""
    with trace.model.still(), torch.no_grad():
        trace.model.run(trace.images)
        begun = now(trace)
        trace.model.run(trace.images)
        return now(trace) - begun


def shrunk(photo: Image.Image) -> Image.Image:
    scale = min(1.0, PHOTO / max(photo.size))
    return photo.resize((max(1, round(photo.width * scale)), max(1, round(photo.height * scale))))
