"""Apply one method to one trace: check that it is supported, choose the target and compute the maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vitreous._support.memory import batch_size
from vitreous.errors import EmptyMap, InputError, ModelError, OptionError, Unsupported, one_of
from vitreous.images import pictures
from vitreous.models.layout import Layout
from vitreous.models.load import load
from vitreous.models.model import Model, capturing
from vitreous.models.survey_run import noise_images
from vitreous.registry import METHODS, ConfiguredMethod, Method, Noted
from vitreous.trace.batched_targets import maps_of, targets_at_once
from vitreous.trace.cuda_graphs import key_of, replays
from vitreous.trace.parse_target import listed as parse_list
from vitreous.trace.parse_target import parse
from vitreous.trace.target import Target, Top, no_classifier
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map, Output

BATCH = {"cpu": 16, "cuda": 256}  # images per batch, if memory allows


def find_method(method: str | ConfiguredMethod, options: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """The method for a name or a configured method, and the values of all its options."""
    if isinstance(method, ConfiguredMethod):
        if options:
            raise OptionError(f"{method!r} has its own options; give {', '.join(options)} there, or the method's name")
        return method.method, dict(method.values)
    if not isinstance(method, str):
        said = f"a method is given by its name or as vitreous.methods.NAME(…), not as a {type(method).__name__}"
        raise OptionError(f"{said}; see vitreous.METHODS")
    return METHODS[method], METHODS[method].check(options)


def default_methods(trace: Trace, targets: Sequence[Any]) -> list[Method]:
    """The methods to try in turn where none is named; without classes and targets, those that need no target."""
    ranked = sorted((one for one in METHODS.values() if one.default), key=lambda one: one.default)
    aimed = trace.classifies or any(target is not None for target in targets)
    return [one for one in ranked if aimed or not one.targeted]


def as_model(model: Any) -> Model:
    return model if isinstance(model, Model) else load(model)


def of_model(trace: Trace, model: Any) -> Trace:
    """Return the trace; raise if `model` is given and is not the model of the trace."""
    if model is None:
        return trace
    if isinstance(model, str):
        name, same = model, is_called(trace.model, model)
    else:
        given = as_model(model)
        name, same = given.name, given.module is trace.model.module
    if same:
        return trace
    raise ModelError(
        f"this trace is of {trace.model.name}, not of {name}: give the model that it was made with, "
        f"or make a trace of {name}: Trace(model, images)"
    )


def is_called(model: Model, spec: str) -> bool:
    """Whether the model may be the result of `load(spec)`."""
    own = spec.partition("/")[2]
    return model.name in (spec, own, own.partition(":")[0], Path(spec).name)


def as_images(images: Any, channels: int = 3) -> Any:
    """A tensor [B channels Y X], or a list of images."""
    listed: Any = images if isinstance(images, Tensor) else pictures.as_list(images, channels)
    if len(listed) == 0:
        raise InputError("there are no images to explain")
    if isinstance(listed, Tensor):
        return listed[None] if listed.ndim == 3 else listed
    ready = [isinstance(image, Tensor) and image.is_floating_point() for image in listed]
    if not any(ready):
        return listed
    if not all(ready) or len({image.shape for image in listed}) > 1:
        raise InputError("float tensors count as preprocessed; give only float tensors, all of one size")
    return torch.stack(list(listed))


def images_at_once(model: Model, images: Any = None) -> int:
    """The number of images to explain in one batch."""
    size = (images.shape[-2], images.shape[-1]) if isinstance(images, Tensor) else model.size
    if isinstance(images, Tensor) and images.ndim == 4 and not model.takes(images):
        return 1  # the error is that of its preparation
    if not isinstance(images, Tensor) and model.preprocess.varies:
        return 1  # each image has a size of its own
    most = BATCH["cuda" if model.device.type == "cuda" else "cpu"]
    layout = model.layout_at(size)
    if model.facts.knows(("layout run", size)):  # it is not yet known whether a batch keeps its images apart
        layout = Trace(model, noise_images(model, size)[:1]).layout
    return batch_size(layout.footprint[1], model.device, most)


def each_of(target: Any) -> Any:
    """Normalise targets that are given per image to a list."""
    if isinstance(target, str) and len(parse_list(target)) > 1:
        return parse_list(target)
    return target.tolist() if isinstance(target, np.ndarray | Tensor) else target


def per_image(target: Any) -> bool:
    """Whether this is a list with one target per image."""
    return isinstance(target, list | tuple)


def refuse(trace: Trace, declared: Method) -> None:
    """Raise if the method does not support the model; the message names methods that do."""
    said = why_not(trace.layout, trace.model.name, declared)
    if said is not None:
        raise Unsupported(said)


def why_not(layout: Layout, name: str, declared: Method) -> str | None:
    """A sentence on why a method does not support a model; None if it does."""
    obstacle, entries = layout.obstacle, layout.entries
    if layout.reads and not declared.joins and (declared.attention or declared.tokens):
        layers = [number for number, _, _ in layout.reads]
        others = [m.name for m in METHODS.values() if m.joins]
        said = f"{name} also reads the tokens of layers {', '.join(map(str, layers))}"
        return f"{declared.name} follows the tokens of the last layer only; {said}. Try {one_of(others)}."
    if obstacle is None or not (declared.attention or (declared.tokens and not entries)):
        return None
    if layout.stages and declared.stages:
        return None
    able = [m for m in METHODS.values() if not (m.attention or m.blocks) and (entries or not m.tokens)]
    followed = [m for m in METHODS.values() if m.stages and layout.stages]
    shown = [m.name for m in (*followed, *able) if m.family != "control"] or [m.name for m in able]
    needed = "tokens that enter an attention"
    if declared.attention:
        needed = "attention between all tokens" if layout.stages else "token attention"
    return f"{declared.name} needs {needed}; {name} {obstacle}. Try {one_of(shown[:4])}."


def between_all(layout: Layout, name: str, what: str) -> str | None:
    """A sentence on why something else than a method, which needs attention between all tokens, does not work."""
    said = why_not(layout, name, replace(METHODS["attention"], stages=False))
    return None if said is None else said.replace("attention needs", f"{what} needs", 1)


def choose(trace: Trace, target: Any, declared: Method) -> Target:
    """The given target, or the best class of each image by default; raise if the model has no classes."""
    chosen = Top(1) if target is None else parse(target, trace.model, trace.model.outputs or trace.output.shape[1])
    if (declared.targeted or target is not None) and chosen.names_classes and not trace.classifies:
        raise no_classifier(trace.model.name)
    return chosen


def computed(
    trace: Trace, declared: Method, targets: tuple[Target, ...], values: dict[str, Any]
) -> tuple[list[Noted], Output | None]:
    """The map for each target, and the matching output if a CUDA graph was replayed."""
    several = len(targets) > 1 and declared.takes_several(values)

    def run(own: Trace, asked: Sequence[Target]) -> list[Noted]:
        device, one = own.images.device.type, partial(declared.run, own, **values)
        with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.set_grad_enabled(False):
            found = maps_of(one, asked, targets_at_once(trace)) if several else [one(target) for target in asked]
        results = [result if isinstance(result, Noted) else Noted(result, {}) for result in found]
        return [replace(noted, map=noted.map.detach().float()) for noted in results]

    def replayed(images: Images, asked: Sequence[Target]) -> tuple[Tensor, ...]:
        own = Trace(trace.model, images)
        maps = [noted.map for noted in run(own, asked)]
        return (*maps, own.output) if declared.targeted else (*maps,)

    graphs = replays(declared, values, trace.images, *targets) if trace.fresh and on_gpu(trace.images) else None
    if graphs is None:
        return run(trace, targets), None
    key = key_of(declared.name, values, trace.model, trace.images, *targets)
    made = graphs(key, replayed, trace.images, targets)
    trace.refuse_infinite()
    maps, output = made[: len(targets)], made[len(targets) :]
    return [Noted(map, {}) for map in maps], next(iter(output), None)


BROKEN, EMPTY = "the map is not finite", "the map is zero everywhere"
LIKELY = {
    BROKEN: "its activations or gradients overflow; try float32 weights, or another method",
    EMPTY: "the score does not depend on what the method reads, or all of it was clipped at 0; "
    "try another target or method",
}


def faults(declared: Method, maps: Map) -> dict[int, str]:
    """What is wrong with the maps of some images, by index; a control may be anything but NaN."""
    flat = maps.detach().flatten(1)
    broken, empty = torch.stack([~flat.isfinite().all(1), (flat == 0).all(1)]).tolist()
    control = declared.family == "control"
    return {i: BROKEN if bad else EMPTY for i, bad in enumerate(broken) if bad or (empty[i] and not control)}


@runtime_checkable
class Named(Protocol):
    """Something that knows the names of the images."""

    def name(self, index: int) -> str: ...


def refuse_empty(trace: Trace, declared: Method, target: Target, maps: Map, views: Named) -> None:
    """Raise if a map explains nothing."""
    wrong = {} if capturing(trace.images) else faults(declared, maps)
    for index, fault in wrong.items():
        asked = f", target {target.of_image(index)}" if declared.targeted else ""
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        about = f"{views.name(index)}{more}, {trace.model.name}{asked}"
        raise EmptyMap(f"{declared.name}: {fault} ({about}): {LIKELY[fault]}")


def on_gpu(images: Images) -> bool:
    return images.is_cuda
