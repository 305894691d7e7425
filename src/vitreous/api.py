"""The call most users need: a model, images and a method in, an attribution out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from vitreous._support.memory import in_batches
from vitreous.attribution import Attribution, Views, attribute_all, join
from vitreous.errors import TargetError
from vitreous.models.model import Model
from vitreous.registry import ConfiguredMethod
from vitreous.trace import trace as engine
from vitreous.trace.apply import as_images, as_model, each_of, find_method, images_at_once, of_model, per_image


class Trace(engine.Trace):
    """What can be seen when one model meets one batch of images: recorded on first need, shared by all methods."""

    # The engine's trace knows no methods and no attributions: imports go one way, and methods are written on top of it.
    # The trace that users make is the same with the one thing added that needs them; whatever takes one takes either.

    def explain(self, method: str | ConfiguredMethod = "rollout", target: Any = None, **options: Any) -> Attribution:
        """These images explained with one method, as `vitreous.explain` does it."""
        return explain(self.model, self, method, target, **options)


def explain(
    model: Model | nn.Module | str | None,
    images: Any,
    method: str | ConfiguredMethod = "rollout",
    target: Any = None,
    **options: Any,
) -> Attribution:
    """Explain images with one method.

    `images`: paths, PIL images, uint8 arrays (preprocessed here), a float tensor [B,3,H,W] (taken as it is), or a
    `Trace`, so that several methods share one forward pass. `target`: a class number or name, "top-1" (the default),
    "a-b", or a list with one for each image. `method` with its `options` (see `vitreous methods NAME`), or both in one:
    `vitreous.methods.rollout(discard=0.9)`.
    """
    return explain_all(model, images, method, [target], options)[0]


def explain_targets(
    model: Model | nn.Module | str | None, images: Any, method: str | ConfiguredMethod, targets: Any, **options: Any
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
    model: Model | nn.Module | str | None,
    images: Any,
    method: str | ConfiguredMethod,
    targets: list[Any],
    options: dict[str, Any],
) -> list[Attribution]:
    """One attribution for each target."""
    declared, values = find_method(method, options)
    if isinstance(images, engine.Trace):
        return attribute_all(of_model(images, model), declared, targets, values)
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
