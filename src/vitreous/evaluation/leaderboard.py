"""Leaderboards: every method scored by every metric on many images, next to control maps that carry no information."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitreous._support.memory import in_batches, out_of_memory
from vitreous._support.progress import steps
from vitreous._support.statistics import Moments
from vitreous.attribute import attribute
from vitreous.attribution import Attribution
from vitreous.errors import InputError, OptionError, TargetError, Unsupported, explained
from vitreous.evaluation.plan import Methods, Settings, make_plan
from vitreous.evaluation.report.files import write_all
from vitreous.evaluation.results import NO_MASK, UNTOLD, About, Asked, Board, Example, Plan
from vitreous.images.dataset import Data, read_data
from vitreous.images.masks import Mask
from vitreous.images.readers import Batch, Loaded, Reader, from_jpeg
from vitreous.metrics.case import Case, Measured, aim_at, make_case, measure, no_target
from vitreous.metrics.pool import Pool
from vitreous.models.match_labels import match_labels
from vitreous.models.model import Model
from vitreous.registry import METHODS, Metric
from vitreous.trace.apply import (
    as_inputs,
    as_model,
    choose,
    faults,
    images_at_once,
    is_aimed,
    model_by,
    of_images,
    read_target,
)
from vitreous.trace.placing import best_classes
from vitreous.trace.shared import pays
from vitreous.trace.target import Class, Target
from vitreous.trace.trace import Trace

PERMANENT = (Unsupported, TargetError, OptionError)  # the next batch would end the same way
TIMED = 3  # batches in which every method runs on a trace of its own, so that its cost can be told
EXAMPLES = 4  # images whose maps are shown

After = Callable[[list[int]], None]


def run_leaderboard(
    model: Model | nn.Module | str | None,
    data: str | Path | Sequence[str | Path] | Data,
    methods: Methods | None = None,
    metrics: str | Sequence[str] | None = None,
    *,
    masks: str | Path | None = None,
    inputs: str | Path | Mapping[str, Any] | None = None,
    target: Any = None,
    options: Settings | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Leaderboard:
    """Measure methods on a data set; `.save(folder)` writes the tables and the report.

    `data`: a folder, a folder of class folders, a CSV or files. `methods`, `metrics`: names, "all", or a family of
    metrics; None: a quick choice. A method may come with its options, `vitreous.methods.rollout(discard=0.9)` or
    "rollout:discard=0.9", a metric too: "srg:of=logit"; each is a row or a column of its own.
    `target`: "label", "top-1" or what `explain` takes; None: the label where it is known, else top-1. `options`:
    {"rollout": {"discard": 0.9}, "deletion": {"steps": 20}}. `limit`: use only the first N images; `sample`: N chosen
    at random. `inputs`: what the network gets beside each image, arrays by name or an .npz, one row for each image.
    """
    whole = data if isinstance(data, Data) else read_data(data, masks)
    found = whole.with_inputs(inputs).take(limit, sample, seed)
    plan = make_plan(methods, metrics, options or {}, found, target, seed)
    board = Leaderboard(model_by(of_images(as_model(model), "a leaderboard works"), target), found, plan)
    board.run()
    return board


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, eq=False)
class Scene:
    """One batch: its images, what is explained in them, where the object is."""

    trace: Trace
    target: Target
    masks: Sequence[Mask | None]
    timed: bool  # does each method run on a trace of its own?
    pool: Pool | None = None  # all images of the evaluation
    numbers: Sequence[int] = ()  # which of them these are


@dataclass(eq=False)
class Found:
    """What one method gave on one batch."""

    values: np.ndarray  # [K B]
    made: Attribution | None = None
    seconds: float = float("nan")  # of an image
    curves: dict[str, Measured] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # by metric; "": the method itself
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)  # metric and place in the batch


def measure_method(plan: Plan, scene: Scene, name: str, without: frozenset[str] = frozenset()) -> Found:
    """Compute one method's maps for a batch and score them by every metric except those in `without`."""
    asked = plan.methods[name]
    found = Found(np.full((len(plan.metrics), len(scene.trace)), np.nan))
    own = scene.trace.like(scene.trace.images) if scene.timed else scene.trace
    begun = now(own)
    try:
        target = scene.target if is_aimed(own.model, asked.declared) else None
        found.made = attribute(own, asked.declared, target, asked.values, strict=False)
    except Exception as error:
        failed(plan, found, error, None)
        return found
    if scene.timed:
        found.seconds = (now(own) - begun) / len(own)
    case = make_case(scene.trace, asked.declared, asked.values, scene.target, found.made.map, scene.masks)
    case = replace(case, pool=scene.pool, numbers=scene.numbers)
    wrong = faults(asked.declared, found.made.map)
    for k, metric in enumerate(plan.metrics):
        if metric not in without:
            try:
                measure_metric(case, found, wrong, k, metric, plan.metrics[metric])
            except Exception as error:
                failed(plan, found, error, k)
    return found


def measure_metric(case: Case, found: Found, wrong: dict[int, str], k: int, name: str, wanted: Asked[Metric]) -> None:
    assert case.masks is not None
    unmasked = [wanted.declared.masks and mask is None for mask in case.masks]
    if not all(unmasked):
        measured = measure(wanted.declared, case, wanted.values)
        found.values[k] = measured.value.double().numpy()
        found.values[k, list(wrong)] = np.nan
        if measured.curve is not None and measured.at is not None:
            found.curves[name] = measured
    for i in np.flatnonzero(np.isnan(found.values[k])).tolist():
        found.reasons[k, i] = NO_MASK if unmasked[i] else wrong.get(i, UNTOLD)


def failed(plan: Plan, found: Found, error: Exception, k: int | None) -> None:
    """Record why a method or metric failed, for good or for this batch; out-of-memory errors are raised again."""
    count = found.values.shape[1]
    if out_of_memory(error) and count > 1:
        raise error
    said = explained(error)
    if isinstance(error, PERMANENT):
        found.refused["" if k is None else list(plan.metrics)[k]] = said
        return
    for which in range(len(plan.metrics)) if k is None else [k]:
        found.reasons.update({(which, i): said for i in range(count)})


# ------------------------------------------------------------------------------------------------------------- running


class Leaderboard(Board):
    """A board that is filled while the run goes on."""

    def __init__(self, model: Model, data: Data, plan: Plan) -> None:
        show_inputs(model, data)
        super().__init__(About.of(model), match_labels(data, model), plan)
        self.model = model
        self.pool = pool_of(model, self.data, plan.target)
        self._shown = frozenset(round(i) for i in np.linspace(0, len(data) - 1, min(EXAMPLES, len(data))))

    def run(
        self, after: After | None = None, numbers: Sequence[int] | None = None, names: Sequence[str] | None = None
    ) -> None:
        """Measure everything, or these images by these methods; `after` is called with images that have new values."""
        chosen = list(range(len(self.data))) if numbers is None else list(numbers)
        rows = range(len(self.methods)) if names is None else [self.methods.index(name) for name in names]
        size = min(images_at_once(self.model), len(self.data))
        groups = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        reader = Reader(dict(enumerate(self.data.samples)), self.model.preprocess, self._shown, masked=True)
        for group in steps(groups, len(chosen), "images", len):
            loaded = reader[group]
            self.skipped |= loaded.failed
            self.lost_masks |= loaded.lost_masks
            for batch in loaded.batches:
                self._measure(batch, loaded, rows, after)

    def _measure(self, batch: Batch, loaded: Loaded, rows: Sequence[int], after: After | None) -> None:
        """Measure one batch, in smaller parts where memory is short; skip it if it fails altogether."""
        try:
            in_batches(lambda part: self._on_part(batch.part(part), loaded, rows, after), len(batch), len(batch))
        except TargetError:
            raise
        except Exception as error:
            if not self.measured.any() and not isinstance(error, InputError):
                raise  # the first batch: nothing is lost, and the next would fail as well
            self.skipped.update({number: explained(error) for number in batch.numbers})

    def _on_part(self, batch: Batch, loaded: Loaded, rows: Sequence[int], after: After | None) -> None:
        """Measure method by method; what an attempt finished before memory ran out is kept."""
        scene = self._scene(batch, loaded, [self.methods[m] for m in rows])
        for m in steps(rows, len(rows), "methods"):
            if self.measured[m, batch.numbers].all():
                continue
            name = self.methods[m]
            if (name, "") not in self.refused:
                without = frozenset(metric for method, metric in self.refused if method == name)
                self._take(batch.numbers, m, measure_method(self.plan, scene, name, without))
            self.measured[m, batch.numbers] = True
            if after is not None:
                after(batch.numbers)

    def _scene(self, batch: Batch, loaded: Loaded, names: Sequence[str]) -> Scene:
        trace = Trace(self.model, torch.as_tensor(batch.images), self.data.beside(batch.numbers))
        trace.crops = replace(trace.crops, prepared=True)
        timed = len(self.forwards) < TIMED
        if not timed:
            share_between(trace, self.plan, names)
        trace.whole()
        target = self._target(trace, batch.numbers)
        if timed:
            self.forwards.append(forward_seconds(trace) / len(batch))
        self.best.update(zip(batch.numbers, best_classes(trace)))
        for i, number in enumerate(batch.numbers):
            own = target.of_image(i)
            self.targets[number] = str(own)
            if number in loaded.photos and number not in self.examples:
                said = own.title(self.model, trace.output[i : i + 1], 0)
                self.examples[number] = Example(self.data.samples[number].name, from_jpeg(loaded.photos[number]), said)
        return Scene(trace, target, batch.masks, timed, self.pool, batch.numbers)

    def _target(self, trace: Trace, numbers: list[int]) -> Target:
        """The target of each image, resolved once."""
        if self.plan.target not in (None, "label"):
            return choose(trace, self.plan.target, METHODS["gradient"]).fix(trace.output)
        if not trace.classifies:
            raise no_target(trace)
        return label_target([self.data.samples[number].label for number in numbers], trace)

    def _take(self, numbers: list[int], m: int, found: Found) -> None:
        """Store the values that a method got."""
        name = self.methods[m]
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

    def save(self, folder: str | Path) -> list[Path]:
        """Write the tables (Parquet, CSV, JSON) and the report (HTML)."""
        return write_all(self, Path(folder))


def share_between(trace: Trace, plan: Plan, names: Sequence[str]) -> None:
    """Make one forward pass for several of these methods, if that costs less than one for each."""
    if pays({name: (plan.methods[name].declared, plan.methods[name].values) for name in names}):
        trace.share()


def label_target(labels: Sequence[int | str | None], trace: Trace) -> Target:
    """Each image's label, or its best class where it has none."""
    best = best_classes(trace)
    chosen = Class(tuple(label if isinstance(label, int) else top for label, top in zip(labels, best)))
    return read_target(trace, chosen).fix(trace.output)


def pool_of(model: Model, data: Data, target: Any) -> Pool:
    """All images of a data set, with the targets that a leaderboard explains."""
    reader = Reader(dict(enumerate(data.samples)), model.preprocess)

    def read(number: int) -> torch.Tensor:
        loaded = reader[[number]]
        if number in loaded.failed:
            raise InputError(loaded.failed[number])
        return torch.as_tensor(loaded.batches[0].images)

    given = partial(one_row, data)
    return Pool(model, len(data), read, partial(target_of_sample, data, target), given)


def one_row(data: Data, number: int) -> dict[str, np.ndarray] | None:
    return data.beside([number])


def show_inputs(model: Model, data: Data) -> None:
    """Let a model know of what kind its inputs are, before its layout is asked for."""
    model.arguments.sample(as_inputs(model, data.beside([0]), 1))


def target_of_sample(data: Data, target: Any, trace: Trace, number: int) -> Target:
    """The label of an image if that is asked for and known, else what the target is on its trace."""
    label = data.samples[number].label if target in (None, "label") else None
    trace.crops = replace(trace.crops, prepared=True)
    return (
        read_target(trace, label).fix(trace.output)
        if isinstance(label, int)
        else aim_at(trace, None if target == "label" else target)
    )


def now(trace: Trace) -> float:
    """The clock in seconds, after all work queued on the device is done."""
    device = trace.images.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def forward_seconds(trace: Trace) -> float:
    """Seconds of a plain forward pass of a batch: the second of two."""
    with trace.model.still(), torch.no_grad():
        given = trace.inputs.rows(range(len(trace)))
        trace.model.run(trace.images, given)
        begun = now(trace)
        trace.model.run(trace.images, given)
        return now(trace) - begun
