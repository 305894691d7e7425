"""Apply one method to one trace: check that it is supported, choose the target and compute the maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vitreous._support.memory import batch_size, capturing
from vitreous.errors import EmptyMap, InputError, ModelError, OptionError, TargetError, Unsupported, one_of
from vitreous.images import pictures, videos
from vitreous.models.inputs import Inputs
from vitreous.models.layout import Layout
from vitreous.models.load import load
from vitreous.models.model import Model
from vitreous.models.output import Form
from vitreous.models.survey_run import noise_images
from vitreous.registry import METHODS, ConfiguredMethod, Method, Noted
from vitreous.trace.aim import Aimed, aimed
from vitreous.trace.batched_targets import maps_of, targets_at_once
from vitreous.trace.cuda_graphs import replays
from vitreous.trace.parse_target import asks_latent, parse
from vitreous.trace.parse_target import listed as parse_list
from vitreous.trace.placing import place
from vitreous.trace.queries import reading
from vitreous.trace.target import Target, Top, no_classifier
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map, Output

PLACED = (Form.DENSE, Form.DETECTIONS)  # whose targets are put on the images
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
    aimed = trace.classifies or any(target is not None for target in targets)
    return [one for one in ranked_methods() if aimed or not one.targeted]


def class_methods() -> list[Method]:
    """The methods for a class to try in turn where none is named."""
    return [one for one in ranked_methods() if one.targeted]


def ranked_methods() -> list[Method]:
    return sorted((one for one in METHODS.values() if one.default), key=lambda one: one.default)


def as_model(model: Any) -> Model:
    return model if isinstance(model, Model) else load(model)


def of_images(model: Model, what: str) -> Model:
    """The model; raise if it takes videos and `what` works with images."""
    if model.frames is None:
        return model
    said = f"{model.name} takes videos, and {what} with images"
    raise Unsupported(f"{said}; explain, evaluate and the command vitreous explain take videos")


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


def as_images(images: Any, channels: int = 3, frames: int | None = None) -> Any:
    """A tensor [B channels Y X], or a list of images; of a model that takes frames, [B T channels Y X], or videos."""
    if frames is not None:
        return videos.as_batch(images)
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


def as_inputs(model: Model, inputs: Any, count: int) -> Inputs:
    """What travels with so many images, checked."""
    if inputs is None and not model.arguments.shared:
        return Inputs(count)
    return model.arguments.check(inputs, count, torch.empty(0, device=model.device, dtype=model.dtype))


def images_at_once(model: Model, images: Any = None, inputs: Inputs | None = None) -> int:
    """The number of images to explain in one batch."""
    frames = model.frames is not None
    ready = isinstance(images, Tensor) and images.is_floating_point()
    size = (*images.shape[1:-3], *images.shape[-2:]) if ready else model.extent
    if ready and (images.ndim != 4 + frames or not model.takes(images)):
        return 1  # the error is that of its preparation
    if not isinstance(images, Tensor) and model.preprocess.varies:
        return 1  # each image has a size of its own
    most = BATCH["cuda" if model.device.type == "cuda" else "cpu"]
    layout = model.layout_at(size, inputs)
    if model.facts_for(inputs).knows(("layout run", size)):  # not yet known whether a batch keeps its images apart
        layout = Trace(model, noise_images(model, size)[:1], model.arguments.sample(inputs)).layout
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
    if layout.decoder is not None and declared.attention and not declared.decodes:
        others = [m.name for m in METHODS.values() if m.decodes]
        said = f"the queries of {name} read its tokens through a decoder"
        return f"{declared.name} follows one stack of layers; {said}. Try {one_of(others)}."
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


def read_target(trace: Trace, target: Any) -> Target:
    """The given target, or the best class of each image by default, on the images of a trace."""
    if asks_latent(target) and read_by(trace, target)[0] is not trace:
        raise TargetError(f"{target}: a latent is no number of the output; explain, evaluate and leaderboards take it")
    classes = target is None and trace.model.form is not Form.WORDS
    chosen = Top(1) if classes else parse(target, trace.model, trace.model.outputs or trace.output.shape[1])
    return place(chosen, trace) if trace.model.form in PLACED else chosen


def read_by(trace: Trace, target: Any) -> tuple[Trace, Any]:
    """The trace whose output a target is a function of, and the target on it: of a latent, that of another model."""
    if not asks_latent(target):
        return trace, target
    from vitreous.trace.latent import reading

    return reading(trace, target)


def model_by(model: Model, target: Any) -> Model:
    """The model whose output a target is a function of."""
    if not asks_latent(target):
        return model
    from vitreous.trace.latent import latent_model, latents_of

    return latent_model(model, latents_of(target, model))


def between_all(layout: Layout, name: str, what: str) -> str | None:
    """A sentence on why something else than a method, which needs attention between all tokens, does not work."""
    said = why_not(layout, name, replace(METHODS["attention"], stages=False))
    return None if said is None else said.replace("attention needs", f"{what} needs", 1)


def choose(trace: Trace, target: Any, declared: Method) -> Target:
    """The given target, or the best class of each image by default; raise if the model has no classes."""
    chosen = read_target(trace, target)
    if (declared.targeted or target is not None) and chosen.names_classes and not trace.classifies:
        raise no_classifier(trace.model.name)
    return chosen


def is_aimed(model: Model, declared: Method) -> bool:
    """Whether the map depends on a target: where places or queries have their own read-out, so has every map of
    attention."""
    return declared.targeted or (model.form in (*PLACED, Form.WORDS) and declared.attention)


def at_places(
    trace: Trace, declared: Method, targets: tuple[Target, ...], values: dict[str, Any]
) -> tuple[list[Noted], Output | None]:
    """The same image by image, with the read-out of each target."""
    made = []
    for target in targets:
        fixed = target.fix(trace.output)
        each = [at_place(aimed(trace, fixed, i), declared, fixed.of_image(i), values) for i in range(len(trace))]
        notes = {key: [one.notes[key] for one in each] for key in each[0].notes}
        made.append(Noted(torch.cat([one.map for one in each]), {k: [v[0] for v in some] for k, some in notes.items()}))
    return made, None


def at_place(own: Aimed, declared: Method, target: Target, values: dict[str, Any]) -> Noted:
    refuse(own, declared)  # its read-out may be that of several layers
    return computed(own, declared, (target,), values)[0][0]


def at_queries(
    trace: Trace, declared: Method, targets: tuple[Target, ...], values: dict[str, Any]
) -> tuple[list[Noted], Output | None]:
    """The same with the read-out of the queries of each target."""
    made = []
    for target in targets:
        with reading(trace, target):
            made += computed(trace, declared, (target,), values)[0]
    return made, None


def computed(
    trace: Trace, declared: Method, targets: tuple[Target, ...], values: dict[str, Any]
) -> tuple[list[Noted], Output | None]:
    """The map for each target, and the matching output if a CUDA graph was replayed."""
    if trace.model.form is Form.DENSE and declared.attention and not isinstance(trace, Aimed):
        return at_places(trace, declared, targets, values)
    asked = trace.model.form in (Form.DETECTIONS, Form.WORDS)
    if asked and declared.attention and trace.queries is None:
        return at_queries(trace, declared, targets, values)
    several = len(targets) > 1 and trace.shared is None and declared.takes_several(values)

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

    replay = trace.fresh and on_gpu(trace.images) and not trace.inputs and trace.queries is None
    graphs = replays(trace.model, declared, values, trace.images, *targets) if replay else None
    if graphs is None:
        return run(trace, targets), None
    kept, key = graphs
    made = kept(key, replayed, trace.images, targets)
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
    largest = maps.detach().flatten(1).abs().amax(1).tolist()  # NaN if there is one
    broken = {i: BROKEN for i, most in enumerate(largest) if not math.isfinite(most)}
    empty = {} if declared.family == "control" else {i: EMPTY for i, most in enumerate(largest) if most == 0}
    return dict(sorted((broken | empty).items()))


@runtime_checkable
class Named(Protocol):
    """Something that knows the names of the images."""

    def name(self, index: int) -> str: ...


def refuse_empty(trace: Trace, declared: Method, target: Target, maps: Map, views: Named) -> None:
    """Raise if a map explains nothing."""
    wrong = {} if capturing(trace.images) else faults(declared, maps)
    for index, fault in wrong.items():
        asked = f", target {target.of_image(index)}" if is_aimed(trace.model, declared) else ""
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        about = f"{views.name(index)}{more}, {trace.model.name}{asked}"
        raise EmptyMap(f"{declared.name}: {fault} ({about}): {LIKELY[fault]}")


def on_gpu(images: Images) -> bool:
    return images.is_cuda
