"""The call most users need: a model, images and a method in, an attribution out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitreous import pictures
from vitreous.attribution import Attribution, Views, join
from vitreous.errors import InputError, OptionError, TargetError, Unsupported, one_of
from vitreous.graphs import key_of, replays
from vitreous.layout import Layout
from vitreous.memory import batch_size, in_batches
from vitreous.model import Model
from vitreous.registry import METHODS, Method, Noted
from vitreous.several import maps_of, targets_at_once
from vitreous.sources import load
from vitreous.target import Target, Top, classes, fix, no_classifier, parse
from vitreous.target import listed as parse_list
from vitreous.trace import Trace
from vitreous.types import Images, Output

BATCH = {"cpu": 16, "cuda": 256}  # images at a time, where memory allows


def explain(
    model: Model | nn.Module | str | None, images: Any, method: str = "rollout", target: Any = None, **options: Any
) -> Attribution:
    """Explain images with one method.

    `images`: paths, PIL images, uint8 arrays (preprocessed here), a float tensor [B,3,H,W] (taken as it is), or a
    `Trace`, so that several methods share one forward pass. `target`: a class number or name, "top-1" (the default),
    "a-b", or a list with one for each image. `options`: the method's own, see `vitreous methods NAME`.
    """
    return explain_all(model, images, method, [target], options)[0]


def explain_targets(
    model: Model | nn.Module | str | None, images: Any, method: str, targets: Any, **options: Any
) -> list[Attribution]:
    """Explain images with one method, for each of several targets: what `explain` gives for each, in less time.

    `targets`: a list of what `explain` takes as its target. The network runs once for all of them; methods of gradients
    also go back through it once. A method that does not depend on a target gives the same for each.
    """
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise TargetError(f"explain_targets takes a list of targets, not {targets!r}; for one target use explain")
    asked = list(targets)
    if not asked:
        raise TargetError("there are no targets to explain; give at least one")
    return explain_all(model, images, method, asked, options)


def explain_all(
    model: Model | nn.Module | str | None, images: Any, method: str, targets: list[Any], options: dict[str, Any]
) -> list[Attribution]:
    """One attribution for each target."""
    declared = find_method(method)
    values = declared.check(options)
    if isinstance(images, Trace):
        return attribute_all(images, declared, targets, values)
    wrapped = as_model(model)
    listed = as_images(images)
    targets = [each_of(target) for target in targets]
    for target in targets:
        if per_image(target) and len(target) != len(listed):
            raise TargetError(f"{len(target)} targets for {len(listed)} images; give one, or one for each image")

    def run(part: slice) -> list[Attribution]:
        chosen = [target[part] if per_image(target) else target for target in targets]
        return attribute_all(Trace(wrapped, listed[part]), declared, chosen, values, Views.of(listed[part], wrapped))

    size = 1 if declared.alone else images_at_once(wrapped, listed)
    parts = in_batches(run, len(listed), min(size, len(listed)), f"{declared.name}, images")
    return [join(list(of_target)) for of_target in zip(*parts)]


def images_at_once(model: Model, images: Any = None) -> int:
    """How many images to explain in one batch."""
    size = (images.shape[-2], images.shape[-1]) if isinstance(images, Tensor) else model.size
    most = BATCH["cuda" if model.device.type == "cuda" else "cpu"]
    return batch_size(model.layout_at(size).footprint[1], model.device, most)


def attribute(
    trace: Trace, declared: Method, target: Any, values: dict[str, Any], views: Views | None = None
) -> Attribution:
    """One method on one trace; `values` are checked options."""
    return attribute_all(trace, declared, [target], values, views)[0]


def attribute_all(
    trace: Trace, declared: Method, targets: list[Any], values: dict[str, Any], views: Views | None = None
) -> list[Attribution]:
    """One method on one trace for each target; one that does not depend on a target runs once."""
    refuse(trace, declared)
    chosen = [choose(trace, target, declared) for target in targets]
    results, output = computed(trace, declared, tuple(chosen if declared.targeted else chosen[:1]), values)
    output = trace.output if output is None and declared.targeted else output
    return [
        Attribution(
            map=noted.map,
            method=declared.name,
            options=values,
            target=None if output is None else str(fix(target, output)),
            model=trace.model.name,
            signed=declared.is_signed(values),
            notes=noted.notes,
            views=views or Views.of(trace.images, trace.model),
        )
        for target, noted in zip(chosen, results if declared.targeted else results * len(chosen))
    ]


def computed(
    trace: Trace, declared: Method, targets: tuple[Target, ...], values: dict[str, Any]
) -> tuple[list[Noted], Output | None]:
    """The map for each target, and where they were replayed the output that goes with them."""
    several = len(targets) > 1 and declared.takes_several(values)
    size = targets_at_once(trace) if several else 1

    def run(own: Trace, asked: Sequence[Target]) -> list[Noted]:
        device = own.images.device.type
        with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.set_grad_enabled(False):
            found = maps_of(lambda target: declared.run(own, target, **values), asked, size)
        results = [result if isinstance(result, Noted) else Noted(result, {}) for result in found]
        return [replace(noted, map=noted.map.detach().float()) for noted in results]

    def replayed(images: Images, asked: Sequence[Target]) -> tuple[Tensor, ...]:
        own = Trace(trace.model, images)
        maps = [noted.map for noted in run(own, asked)]
        return (*maps, own.output) if declared.targeted else (*maps,)

    graphs = replays(declared.name, values, trace.images, *targets) if trace.fresh else None
    if graphs is None:
        return run(trace, targets), None
    key = key_of(declared.name, values, trace.model, trace.images, *targets)
    made = graphs(key, replayed, trace.images, targets)
    trace.refuse_infinite()
    maps, output = made[: len(targets)], made[len(targets) :]
    return [Noted(map, {}) for map in maps], next(iter(output), None)


def find_method(name: str) -> Method:
    if not isinstance(name, str):
        raise OptionError(f"a method is given by its name, not as a {type(name).__name__}; see vitreous.METHODS")
    return METHODS[name]


def as_model(model: Model | nn.Module | str | None) -> Model:
    if isinstance(model, Model):
        return model
    return load(model) if model is None or isinstance(model, str) else Model(model)


def as_images(images: Any) -> Any:
    """A tensor [B 3 H W], or a list of pictures."""
    listed: Any = images if isinstance(images, Tensor) else pictures.as_list(images)
    if len(listed) == 0:
        raise InputError("there are no images to explain")
    if isinstance(listed, Tensor):
        return listed[None] if listed.ndim == 3 else listed
    ready = [isinstance(image, Tensor) and image.is_floating_point() for image in listed]
    if not any(ready):
        return listed
    if not all(ready) or len({image.shape for image in listed}) > 1:
        raise InputError("float tensors are taken as preprocessed: give only such, all of one size")
    return torch.stack(list(listed))


def each_of(target: Any) -> Any:
    """Targets for each image as a list, however they were written."""
    if isinstance(target, str) and len(parse_list(target)) > 1:
        return parse_list(target)
    return target.tolist() if isinstance(target, np.ndarray | Tensor) else target


def per_image(target: Any) -> bool:
    """Is this a list with a target for each image?"""
    return isinstance(target, list | tuple)


def refuse(trace: Trace, declared: Method) -> None:
    """Say why this method cannot work on this model, and which can."""
    said = why_not(trace.layout, trace.model.name, declared)
    if said is not None:
        raise Unsupported(said)


def why_not(layout: Layout, name: str, declared: Method) -> str | None:
    """Why a method cannot work on a model, in a sentence; None: it can."""
    obstacle, entries = layout.obstacle, layout.entries
    if obstacle is None or not (declared.attention or (declared.tokens and not entries)):
        return None
    able = [m for m in METHODS.values() if not m.attention and (entries or not m.tokens)]
    shown = [m.name for m in able if m.family != "control"] or [m.name for m in able]
    needed = "token attention" if declared.attention else "tokens that enter an attention"
    return f"{declared.name} needs {needed}; {name} {obstacle}. Try {one_of(shown[:4])}."


def choose(trace: Trace, target: Any, declared: Method) -> Target:
    """The target as given, or each image's best class; never a class of a model that has none."""
    chosen = Top(1) if target is None else parse(target, trace.model, trace.model.outputs or trace.output.shape[1])
    if (declared.targeted or target is not None) and classes(chosen) and not trace.classifies:
        raise no_classifier(trace.model.name)
    return chosen
