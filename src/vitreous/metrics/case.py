"""`evaluate` measures the quality of maps with one metric, image by image.

metric: Case -> Measured        value [B], and a curve [B T] for metrics that have one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitreous._support.memory import in_batches
from vitreous._support.spread import spread
from vitreous.attribute import attribute
from vitreous.attribution import Attribution
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.images.masks import Mask, check_masks, read_masks
from vitreous.metrics.pool import Pool
from vitreous.models.inputs import Inputs
from vitreous.models.model import Model
from vitreous.models.output import Of
from vitreous.registry import METHODS, METRICS, Better, ConfiguredMethod, Method, Metric
from vitreous.trace.apply import (
    as_images,
    as_inputs,
    as_model,
    choose,
    each_of,
    find_method,
    images_at_once,
    is_aimed,
    model_by,
    of_model,
    per_image,
    read_by,
)
from vitreous.trace.own_sizes import own_part
from vitreous.trace.perturb.variant_scores import Ends
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map, Output, Scores

Again = Callable[[Trace, Target], Map]


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of a metric: one value per image (NaN if undefined), and its curve if the metric has one."""

    value: Scores
    curve: Float[Tensor, "B T"] | None = None
    at: Sequence[float] | None = None  # abscissae of the curve's points


@dataclass(frozen=True, eq=False)
class Case:
    """One batch of images with their maps and the target that the maps explain."""

    trace: Trace
    map: Map  # as the method returned it
    target: Target  # fixed: the class of each image is set
    masks: Sequence[Mask | None] | None = None  # where the object is, in pixels of the model's input
    method: Again | None = None  # runs the same method on another trace or target
    pool: Pool | None = None  # all images of the evaluation, for metrics that need others
    numbers: Sequence[int] = ()  # which of them these are
    ends: Ends = field(default_factory=dict, init=False)  # outputs of variants of these maps, for other metrics

    @cached_property
    def patches(self) -> Map:
        """The map with one value per patch [B h w]: the mean over the pixels of a patch; of a video, of a tubelet."""
        values = widened(self.map)
        layout, extent = self.trace.layout, self.trace.extent
        if values.shape[1:] == layout.cells:
            return values
        if layout.box(self.trace.size) is not None and values.shape[1:] == extent:  # the pixels of patches only
            (top, _), (left, _) = layout.rows[0], layout.columns[0]
            values = values[..., top : layout.rows[-1][1], left : layout.columns[-1][1]]
        if layout.times and values.shape[1:-2] == extent[:-2]:  # the frames of tubelets only
            values = values[:, layout.times[0][0] : layout.times[-1][1]]
        return F.interpolate(values[:, None], layout.cells, mode="area")[:, 0]

    @cached_property
    def pixels(self) -> Map:
        """The map with one value per pixel [B Y X]; equal patches give exactly equal pixels."""
        values, size = widened(self.map), self.trace.size
        if values.shape[1:] == self.trace.extent:
            return values
        return spread(values.cpu().double(), size, self.trace.layout.box(size)).to(values)

    @cached_property
    def order(self) -> Int[Tensor, "B n"]:
        """The indices of the patches, the most relevant first; ties keep their order."""
        return self.patches.flatten(1).argsort(dim=1, descending=True, stable=True)

    @property
    def graded(self) -> Target:
        """The target by probability: p(target); by its score if it is no class, or a value."""
        return self.scored("probability")

    def scored(self, of: Of) -> Target:
        """The target by probability, by logit, or by its own score, as it is explained.

        What is no class (a concept, a text, a neuron), and a value, has its own score only, whatever `of` is.
        """
        model = self.trace.model
        return self.target.graded(model.meaning, of, model.exclusive)

    @cached_property
    def broken(self) -> Bool[Tensor, "B"]:
        """Which maps are not finite."""
        return ~self.map.flatten(1).isfinite().all(1)

    @cached_property
    def clean(self) -> Case:
        """The same with zeros in place of the maps that are not finite."""
        return replace(self, map=self.map.masked_fill(self.broken.view(-1, *[1] * (self.map.ndim - 1)), 0))

    def again(self, trace: Trace, target: Target | None = None) -> Map:
        """The method's maps for another trace or target."""
        if self.method is None:
            raise no_method()
        return self.method(trace, target or self.target)

    def rerun_among_others(self) -> Pool:
        """All images of the evaluation, for a metric that explains some of them together."""
        if self.method is None:
            raise no_method()
        if isinstance(self.target, NoTarget):
            raise no_target(self.trace)
        if self.pool is None:
            raise OptionError("this metric needs other images of the same evaluation; use evaluate or a leaderboard")
        return self.pool


def widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Score:
    """The result of `evaluate`: one value per image, its curve if the metric has one, and which direction is better."""

    value: Scores
    curve: Float[Tensor, "B T"] | None
    at: tuple[float, ...] | None
    better: Better
    metric: str
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None

    def __len__(self) -> int:
        return len(self.value)

    @property
    def mean(self) -> float:
        """The mean over the images with a value (NaN is ignored)."""
        return float(self.value.nanmean())


def evaluate(
    model: Any,
    images: Any,
    explained: Attribution | str | ConfiguredMethod | Any,
    metric: str,
    target: Any = None,
    masks: Any = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score:
    """Measure the quality of maps with one metric.

    `images`: as for `explain`, or a `Trace`. `explained`: a method's name or `vitreous.methods.NAME(…)`, an
    `Attribution`, or maps [B h w] or [B Y X] (of videos, with time behind B). `metric`: see `vitreous metrics`.
    `target`: as for `explain`; by default the target of the attribution, else the best class of each image. `masks`:
    where the object is, for the metrics that need it: one mask per image (a file, an array [Y X] or a box; None if
    unknown). `inputs`: as for `explain`.
    """
    declared = METRICS[metric]
    values = declared.check(options)
    if declared.masks and masks is None:
        raise InputError(f"{metric} needs masks; give one for each image: masks=[…]")
    given = of_model(images, model) if isinstance(images, Trace) else None
    if given is not None and inputs is not None:
        raise InputError("a trace has its own inputs: give them to Trace(model, images, inputs=…)")
    wrapped = as_model(model) if given is None else given.model
    refuse_videos(declared, wrapped)
    listed = as_images(images, wrapped.channels, wrapped.frames) if given is None else given.images
    given_inputs = given.inputs if given is not None else as_inputs(wrapped, inputs, len(listed))
    target = each_of(target_of(explained) if target is None else target)
    if per_image(target) and len(target) != len(listed):
        raise TargetError(f"{len(target)} targets for {len(listed)} images; give one, or one for each image")
    given, wrapped = None if given is None else read_by(given, target)[0], model_by(wrapped, target)
    masks = None if masks is None else check_masks(masks, listed, wrapped.channels)
    named = isinstance(explained, str | ConfiguredMethod)
    maps = None if named else maps_of(explained, len(listed), 3 if wrapped.frames is None else 4)
    method, settings = method_of(explained)

    def aim(trace: Trace, number: int) -> Target:
        return aim_at(trace, target[number] if per_image(target) else target)

    def beside(number: int) -> Inputs:
        return given_inputs.of_images([number])

    pool = Pool(wrapped, len(listed), lambda number: listed[number : number + 1], aim, beside)

    def run(part: slice) -> Measured:
        trace = Trace(wrapped, listed[part], given_inputs.part(part)) if given is None else given
        where = None if masks is None else read_masks(masks[part], listed[part], wrapped.preprocess, trace.size)
        chosen = target[part] if per_image(target) else target
        case = make_case(trace, method, settings, chosen, None if maps is None else own_part(maps[part]), where)
        return measure(declared, replace(case, pool=pool, numbers=range(len(listed))[part]), values)

    if given is not None:
        return join([run(slice(None))], declared, values, method)
    size = min(images_at_once(wrapped, listed, given_inputs), len(listed))
    return join(in_batches(run, len(listed), size, f"{metric}, images"), declared, values, method)


def make_case(
    trace: Trace,
    method: Method | None,
    settings: Mapping[str, Any],
    target: Any,
    maps: Map | None = None,
    masks: Sequence[Mask | None] | None = None,
) -> Case:
    """A case from a trace and its maps; the method computes the maps if none are given."""
    trace, target = read_by(trace, target)
    declared = method or METHODS["gradient"]  # any targeted method, to check the target
    fixed: Target = NoTarget(trace)
    if target is not None or trace.classifies:
        fixed = choose(trace, target, declared).fix(trace.output)

    def again(other: Trace, wanted: Target, strict: bool = False) -> Map:
        assert method is not None
        return attribute(
            other, method, wanted if is_aimed(other.model, method) else None, dict(settings), strict=strict
        ).map

    if maps is None:
        assert method is not None
        maps = again(trace, fixed, strict=True)
    return Case(trace, maps.to(trace.images.device), fixed, masks, again if method is not None else None)


def aim_at(trace: Trace, target: Any) -> Target:
    """What is explained in one image; the model runs only if that depends on its output."""
    chosen = choose(*read_by(trace, target), METHODS["gradient"])
    return chosen.fix(trace.output) if chosen.varies else chosen


@dataclass(frozen=True, eq=False)
class NoTarget(Target):
    """The target of a model without classes if none is given; metrics that use no score do not need one."""

    trace: Trace

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        raise no_target(self.trace)

    def __str__(self) -> str:
        return "none"


def no_method() -> OptionError:
    return OptionError("this metric runs the method again: give a method's name or an Attribution, not a map")


def no_target(trace: Trace) -> TargetError:
    return TargetError(
        f"{trace.model.name} has no classifier, so there is no score to measure; give a concept, a text or "
        "neuron:NUMBER as target=, or say that its outputs are classes: Model(net, classifier=True)"
    )


def refuse_videos(declared: Metric, model: Model) -> None:
    """Raise if a metric compares maps with places in an image and the model takes videos."""
    if model.frames is not None and (declared.masks or declared.family == "localisation"):
        said = f"{declared.name} compares a map with places in one image, and {model.name} takes videos"
        raise Unsupported(f"{said}; deletion, insertion and sensitivity_n hide tubelets")


def measure(declared: Metric, case: Case, values: Mapping[str, Any]) -> Measured:
    """Run one metric on one case; the value is NaN for a map that is not finite."""
    refuse_videos(declared, case.trace.model)
    broken = case.broken
    if broken.any():
        case = case.clean
    device = case.trace.images.device.type
    with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
        found: Measured = declared.run(case, **values)
    value = found.value.detach().float().masked_fill(broken, torch.nan)
    curve = None if found.curve is None else found.curve.detach().float().masked_fill(broken[:, None], torch.nan)
    return Measured(value.cpu(), None if curve is None else curve.cpu(), found.at)


def join(parts: Sequence[Measured], declared: Metric, values: Mapping[str, Any], method: Method | None) -> Score:
    """Concatenate the results of several batches."""
    curves = [part.curve for part in parts if part.curve is not None]
    return Score(
        value=torch.cat([part.value for part in parts]),
        curve=torch.cat(curves) if curves else None,
        at=None if parts[0].at is None else tuple(parts[0].at),
        better=declared.direction(values),
        metric=declared.name,
        options=dict(values),
        method=None if method is None else method.name,
    )


def target_of(explained: Any) -> Any:
    """The target of an attribution: one for all images, or a list with one per image."""
    if not isinstance(explained, Attribution):
        return None
    each = explained.targets
    shared = len(set(each)) == 1 and not (each[0] or "").isdigit()  # class numbers are kept one per image
    return each[0] if shared else list(each)


def method_of(explained: Any) -> tuple[Method | None, Mapping[str, Any]]:
    """The method that made the maps, if known, and its options."""
    if isinstance(explained, str | ConfiguredMethod):
        return find_method(explained, {})
    if isinstance(explained, Attribution) and explained.method in METHODS:
        declared = METHODS[explained.method]
        return declared, declared.check(dict(explained.options))
    return None, {}


def maps_of(explained: Any, count: int, axes: int = 3) -> Map:
    """The maps as a tensor, one per image; `axes`: how many they have together, four for videos."""
    found = explained.map if isinstance(explained, Attribution) else explained
    if isinstance(found, np.ndarray | list | tuple):
        found = torch.as_tensor(np.asarray(found))
    if not isinstance(found, Tensor) or found.ndim not in (axes - 1, axes):
        wanted = "[B h w]" if axes == 3 else "[B T h w]"
        raise InputError(
            f"a {type(explained).__name__} is not a map; give a method's name, an Attribution or maps {wanted}"
        )
    found = found[None] if found.ndim == axes - 1 else found
    if len(found) != count:
        raise InputError(f"{len(found)} maps for {count} images; give one for each image")
    return widened(found)
