"""Methods × metrics on many images: what every map is worth, beside the controls that know nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitreous._support.memory import in_batches, out_of_memory
from vitreous._support.progress import steps
from vitreous._support.statistics import Moments
from vitreous.attribution import Attribution, attribute
from vitreous.errors import InputError, OptionError, TargetError, Unsupported, explained, nearest
from vitreous.evaluation.report.files import write_all
from vitreous.evaluation.results import BROKEN, NO_MASK, UNTOLD, About, Asked, Board, Example, Plan, describes
from vitreous.images.dataset import Data, read_data
from vitreous.images.masks import Mask
from vitreous.images.readers import Batch, Loaded, Reader, from_jpeg
from vitreous.metrics.case import Measured, make_case, measure, no_target
from vitreous.models.match_labels import match_labels
from vitreous.models.model import Model
from vitreous.registry import METHODS, METRICS, Method, Metric
from vitreous.trace.apply import as_model, choose, images_at_once
from vitreous.trace.target import Class, Target, fix, of_image, title
from vitreous.trace.trace import Trace

CONTROLS = ("random", "centre")
QUICK = ("attention", "rollout", "gae", "cdam", "legrad", "gradcam", "attn_lrp", "input_x_gradient")
USUAL = ("token_deletion", "deletion", "insertion", "sparsity")
USUAL_WITH_MASKS = ("pointing_game", "energy_in_mask")
PERMANENT = (Unsupported, TargetError, OptionError)  # the next batch would end the same way
TIMED = 3  # batches in which every method runs on a trace of its own, so that its cost can be told
EXAMPLES = 4  # images whose maps are shown

Settings = Mapping[str, Mapping[str, Any]]
After = Callable[[list[int]], None]


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


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, eq=False)
class Scene:
    """One batch: its images, what is explained in them, where the object is."""

    trace: Trace
    target: Target
    masks: Sequence[Mask | None]
    timed: bool  # does each method run on a trace of its own?


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
    """One method's maps for a batch, and every metric of them, `without` those that cannot work."""
    asked = plan.methods[name]
    found = Found(np.full((len(plan.metrics), len(scene.trace)), np.nan))
    own = Trace(scene.trace.model, scene.trace.images) if scene.timed else scene.trace
    begun = now(own)
    try:
        target = scene.target if asked.declared.targeted else None
        found.made = attribute(own, asked.declared, target, asked.values)
    except Exception as error:
        failed(plan, found, error, None)
        return found
    if scene.timed:
        found.seconds = (now(own) - begun) / len(own)
    for k, metric in enumerate(plan.metrics):
        if metric not in without:
            try:
                measure_metric(scene, found, asked, k, plan.metrics[metric])
            except Exception as error:
                failed(plan, found, error, k)
    return found


def measure_metric(scene: Scene, found: Found, asked: Asked[Method], k: int, wanted: Asked[Metric]) -> None:
    assert found.made is not None
    maps = found.made.map
    unmasked = [wanted.declared.masks and mask is None for mask in scene.masks]
    if not all(unmasked):
        case = make_case(scene.trace, asked.declared, asked.values, scene.target, maps, scene.masks)
        measured = measure(wanted.declared, case, wanted.values)
        found.values[k] = measured.value.double().numpy()
        if measured.curve is not None and measured.at is not None:
            found.curves[wanted.declared.name] = measured
    for i in np.flatnonzero(np.isnan(found.values[k])).tolist():
        broken = not maps[i].isfinite().all()
        found.reasons[k, i] = NO_MASK if unmasked[i] else BROKEN if broken else UNTOLD


def failed(plan: Plan, found: Found, error: Exception, k: int | None) -> None:
    """A method (or a metric of it) that fails: for good, or for this batch; too little memory halves the batch."""
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
    """A board that is filled as the run goes."""

    def __init__(self, model: Model, data: Data, plan: Plan) -> None:
        super().__init__(About.of(model), match_labels(data, model), plan)
        self.model = model
        self._shown = frozenset(round(i) for i in np.linspace(0, len(data) - 1, min(EXAMPLES, len(data))))

    def run(self, after: After | None = None) -> None:
        """Measure everything; `after` each method and batch it is told of which images there is more."""
        size = min(images_at_once(self.model), len(self.data))
        starts = range(0, len(self.data), size)
        groups = [list(range(start, min(start + size, len(self.data)))) for start in starts]
        reader = Reader(dict(enumerate(self.data.samples)), self.model.preprocess, self._shown, masked=True)
        for group in steps(groups, len(self.data), "images", len):
            loaded = reader[group]
            self.skipped |= loaded.failed
            self.lost_masks |= loaded.lost_masks
            for batch in loaded.batches:
                self._measure(batch, loaded, after)

    def _measure(self, batch: Batch, loaded: Loaded, after: After | None) -> None:
        """One batch, in smaller parts where memory is short; one that fails altogether is skipped."""
        try:
            in_batches(lambda part: self._on_part(batch.part(part), loaded, after), len(batch), len(batch))
        except TargetError:
            raise
        except Exception as error:
            if not self.measured.any() and not isinstance(error, InputError):
                raise  # the first batch: nothing is lost, and the next would fail as well
            self.skipped.update({number: explained(error) for number in batch.numbers})

    def _on_part(self, batch: Batch, loaded: Loaded, after: After | None) -> None:
        """Method by method; what an attempt with too little memory has finished stays."""
        scene = self._scene(batch, loaded)
        for m in steps(range(len(self.methods)), len(self.methods), "methods"):
            if self.measured[m, batch.numbers].all():
                continue
            name = self.methods[m]
            if (name, "") not in self.refused:
                without = frozenset(metric for method, metric in self.refused if method == name)
                self._take(batch.numbers, m, measure_method(self.plan, scene, name, without))
            self.measured[m, batch.numbers] = True
            if after is not None:
                after(batch.numbers)

    def _scene(self, batch: Batch, loaded: Loaded) -> Scene:
        trace = Trace(self.model, torch.as_tensor(batch.images))
        trace.whole()
        target = self._target(trace, batch.numbers)
        timed = len(self.forwards) < TIMED
        if timed:
            self.forwards.append(forward_seconds(trace) / len(batch))
        self.best.update(zip(batch.numbers, trace.output.argmax(1).tolist()))
        for i, number in enumerate(batch.numbers):
            own = of_image(target, i)
            self.targets[number] = str(own)
            if number in loaded.photos and number not in self.examples:
                said = title(own, self.model, trace.output[i : i + 1], 0)
                self.examples[number] = Example(self.data.samples[number].name, from_jpeg(loaded.photos[number]), said)
        return Scene(trace, target, batch.masks, timed)

    def _target(self, trace: Trace, numbers: list[int]) -> Target:
        """What is explained in each image, fixed."""
        if self.plan.target not in (None, "label"):
            return fix(choose(trace, self.plan.target, METHODS["gradient"]), trace.output)
        if not trace.classifies:
            raise no_target(trace)
        return label_target([self.data.samples[number].label for number in numbers], trace)

    def _take(self, numbers: list[int], m: int, found: Found) -> None:
        """Keep what a method gave."""
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


def label_target(labels: Sequence[int | str | None], trace: Trace) -> Target:
    """Each image's label, or its best class where it has none."""
    best = trace.output.argmax(1).tolist()
    return Class(tuple(label if isinstance(label, int) else top for label, top in zip(labels, best)))


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
