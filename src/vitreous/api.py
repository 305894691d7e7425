"""The call most users need: a model, images and a method in, an attribution out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitreous._support.memory import in_batches
from vitreous.attribute import attribute_all
from vitreous.attribution import Attribution, join
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.models.inputs import Inputs
from vitreous.models.model import Model
from vitreous.registry import ConfiguredMethod, MethodWarning
from vitreous.trace import trace as engine
from vitreous.trace.apply import (
    as_images,
    as_inputs,
    as_model,
    default_methods,
    each_of,
    find_method,
    images_at_once,
    of_model,
    per_image,
)
from vitreous.trace.pairs import Like, Names, beside, taking, two_arguments
from vitreous.trace.views import Views


class Trace(engine.Trace):
    """One model with one batch of images; forward passes are recorded when first needed and shared by all methods."""

    # The engine's trace cannot import methods or attributions, because imports go one way and methods build on it.
    # This subclass adds `explain`, which needs both. Everything that takes a trace accepts either class.

    def explain(self, method: str | ConfiguredMethod | None = None, target: Any = None, **options: Any) -> Attribution:
        """Explain the images of this trace with one method; see `vitreous.explain`."""
        return explain(self.model, self, method, target, **options)


def explain(
    model: Any,
    images: Any,
    method: str | ConfiguredMethod | None = None,
    target: Any = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Attribution:
    """Explain images with one method.

    `model`: a `Model`, or whatever `vitreous.load` takes: a name, a network, a transformers pipeline.
    `images`: paths, PIL images, uint8 arrays (preprocessed here), a float tensor [B,3,H,W] (used as it is; of as many
    channels as the model takes), or a `Trace`, so that several methods share one forward pass. `method`: a name, with
    its `options` as keywords (see `vitreous methods NAME`), or a configured method such as
    `vitreous.methods.rollout(discard=0.9)`; None: the best quick map for a class (`vitreous methods` marks it), or, on
    a model that it does not support, the next best, with a warning. `target`: a class number or name, "top-1" (the
    default), "a-b" (a rather than b), or a list with one target per image. `inputs`: what the network gets beside the
    images, by name: tensors with one row for each image, or one for all.
    """
    return explain_all(model, images, method, [target], options, inputs)[0]


def explain_targets(
    model: Any,
    images: Any,
    method: str | ConfiguredMethod | None,
    targets: Any,
    *,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Attribution]:
    """Explain images with one method for several targets, faster than one call of `explain` per target.

    `targets`: a list of targets as `explain` takes them. All of them share one forward pass and, for gradient methods,
    one backward pass. A method that does not depend on a target returns the same maps for each.
    """
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise TargetError(f"explain_targets takes a list of targets, not {targets!r}; for one target use explain")
    asked = list(targets)
    if not asked:
        raise TargetError("the list of targets is empty; give at least one target")
    return explain_all(model, images, method, asked, options, inputs)


def explain_all(
    model: Any,
    images: Any,
    method: str | ConfiguredMethod | None,
    targets: list[Any],
    options: dict[str, Any],
    inputs: Mapping[str, Any] | None = None,
) -> list[Attribution]:
    """One attribution for each target."""
    if method is None and options:
        raise OptionError(f"name the method that takes {', '.join(options)}: explain(model, images, method, …)")
    declared, values = (None, {}) if method is None else find_method(method, options)

    instead: dict[str, None] = {}  # what to say if the first default is not supported

    def attributed(trace: engine.Trace, asked: list[Any], views: Views | None = None) -> list[Attribution]:
        if declared is not None:
            return attribute_all(trace, declared, asked, values, views)
        made, said = attribute_by_default(trace, asked, views)
        instead.update({said: None} if said else {})
        return made

    if isinstance(images, engine.Trace):
        if inputs is not None:
            raise InputError("a trace has its own inputs: give them to Trace(model, images, inputs=…)")
        made = attributed(of_model(images, model), targets)
        warn_of(instead)
        return made
    wrapped = as_model(model)
    listed = as_images(images, wrapped.channels, wrapped.frames)
    travelling = as_inputs(wrapped, inputs, len(listed))
    targets = [each_of(target) for target in targets]
    for target in targets:
        if per_image(target) and len(target) != len(listed):
            raise TargetError(f"{len(target)} targets for {len(listed)} images; give one, or one for each image")

    def run(part: slice) -> list[Attribution]:
        chosen = [target[part] if per_image(target) else target for target in targets]
        views, trace = Views.of(listed[part], wrapped, part.start), Trace(wrapped, listed[part], travelling.part(part))
        trace.once = len(targets) == 1
        return attributed(trace, chosen, views)

    alone = len(listed) == 1 or (declared is not None and declared.alone)
    size = 1 if alone else images_at_once(wrapped, listed, travelling)
    about = "images" if declared is None else f"{declared.name}, images"
    parts = in_batches(run, len(listed), min(size, len(listed)), about)
    warn_of(instead)
    return [join(list(of_target)) for of_target in zip(*parts)]


def warn_of(instead: Iterable[str]) -> None:
    for said in instead:
        warnings.warn(said, MethodWarning, stacklevel=4)  # where the user calls explain


def attribute_by_default(
    trace: engine.Trace, targets: list[Any], views: Views | None = None
) -> tuple[list[Attribution], str | None]:
    """The maps of the first default method that supports the model, and a sentence on the one that does not."""
    refusals: list[Unsupported] = []
    for declared in default_methods(trace, targets):
        try:
            made = attribute_all(trace, declared, targets, declared.check({}), views)
        except Unsupported as error:
            refusals.append(error)
        else:
            return made, f"{declared.name} is used, because {refusals[0]}" if refusals else None
    raise refusals[0]


# ------------------------------------------------------------------------------------------------------- two images


class Pair(NamedTuple):
    """The maps of two images, or of two batches of them: `one, other = explain_pair(…)`."""

    one: Attribution
    other: Attribution

    @property
    def both(self) -> Attribution:
        """All maps in one attribution, those of a pair next to each other."""
        return join([half[i] for i in range(len(self.one)) for half in self])

    def save(self, path: str | Path) -> Path:
        """Save a figure with the maps side by side (.png, .svg, .pdf, …), or the raw maps (.npz)."""
        return self.both.save(path)

    def _repr_png_(self) -> bytes:
        return self.both._repr_png_()


def explain_pair(
    model: Any,
    one: Any,
    other: Any,
    method: str | ConfiguredMethod | None = None,
    target: Any = None,
    *,
    similarity: str = "cosine",
    arguments: Sequence[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Pair:
    """Explain two images together, or image by image two lists of them: a map for each.

    A network that takes two images is explained for `target` (as for `explain`; a single number, such as a similarity,
    is its own target), each image with the other as its input; `arguments`: the names of the two, where its forward
    takes more. For any other network the score is the `similarity` of the embeddings of the two images: "cosine",
    "dot" or "l2". The maps of swapped images are swapped. `inputs`: what else the network gets, one row for each pair.
    """
    wrapped = as_model(model)
    images = as_images(one, wrapped.channels), as_images(other, wrapped.channels)
    if len(images[0]) != len(images[1]):
        raise InputError(f"{len(images[0])} and {len(images[1])} images are no pairs; give as many of each")
    names = two_arguments(wrapped, inputs or {}, arguments)
    if names is not None:
        return taken_together(wrapped, images, names, method, target, inputs, options)
    if target is not None:
        said = f"{wrapped.name} takes one image, so a pair is explained by the similarity of its embeddings"
        raise TargetError(f"{said}; leave target= out, or name the arguments of the two images: arguments=(…, …)")
    given = as_inputs(wrapped, inputs, len(images[0]))
    likes = [Like.to(wrapped, some, names_of(some, wrapped), similarity, given) for some in images]
    found = [explain(wrapped, images[i], method, likes[1 - i], inputs=inputs, **options) for i in (0, 1)]
    return Pair(*(with_other(found[i], wrapped, images[1 - i], given) for i in (0, 1)))


def taken_together(
    model: Model,
    images: tuple[Any, Any],
    names: Names,
    method: str | ConfiguredMethod | None,
    target: Any,
    inputs: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> Pair:
    """The maps of a network that takes two images."""
    ready = [model.prepare(some) for some in images]
    if target is None:
        first = Trace(taking(model, names[0]), ready[0][:1], beside(first_rows(inputs), names[1], ready[1][:1]))
        target = None if first.classifies or first.output.shape[1] > 1 else "neuron:0"
    found = [
        explain(
            taking(model, names[i]),
            images[i],
            method,
            target,
            inputs=beside(inputs, names[1 - i], ready[1 - i]),
            **options,
        )
        for i in (0, 1)
    ]
    return Pair(*found)


def first_rows(inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What belongs to the first pair."""
    return {name: value[:1] if hasattr(value, "__getitem__") else value for name, value in (inputs or {}).items()}


def names_of(images: Any, model: Model) -> list[str]:
    views = Views.of(images, model)
    given = [str(image) if isinstance(image, str | Path) else None for image in images]
    return [views.name(i) if name is None else name for i, name in enumerate(given)]


def with_other(found: Attribution, model: Model, others: Any, given: Inputs) -> Attribution:
    """The same, which also tells of the image that each is compared with."""
    seen = Inputs.of(beside(given.values, "like", model.prepare(others)), len(found), model.prepare(others))
    return replace(found, inputs=seen.stamps())
