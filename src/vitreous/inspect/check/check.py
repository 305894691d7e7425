"""`vitreous.check`: the first thing to send with a bug report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from vitreous.errors import VitreousError, explained
from vitreous.inspect.check.attempt import attempt, seconds_of
from vitreous.inspect.check.result import Check, Verified
from vitreous.inspect.check.verify import Subject, alone, verify
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.registry import METHODS, Method
from vitreous.trace.apply import as_model, of_images, read_target
from vitreous.trace.target import Neuron
from vitreous.trace.trace import Trace
from vitreous.version import VERSION

SECONDS = 60.0  # for the methods together, unless they are named


def check(
    model: Model | nn.Module | str | None,
    images: Any = None,
    methods: str | Sequence[str] | None = None,
    *,
    seconds: float = SECONDS,
) -> Check:
    """Find out whether vitreous is right about a model: what the layout run found, what was verified, what works.

    `images`: two are enough; by default noise of the model's usual size. `methods`: by default all, the slow ones with
    cheap options and only as far as they fit into `seconds`; named ones, or "all", run with their defaults and no
    limit. What is wrong with the model is not raised: it is the result.
    """
    known = of_images(as_model(model), "check works")
    chosen = choose(methods)
    ready = noise(known) if images is None else known.prepare(images)
    try:
        subject = study(known, ready)
    except VitreousError as refusal:
        return Check(known.name, facts(known, ready), {}, (), (), failure=explained(refusal))
    found: list[Verified] = list(verify(subject))
    limit = seconds if methods is None else None
    tried = tuple(attempt(subject, chosen, seconds_of(subject), limit))
    return Check(known.name, facts(known, ready), told_layout(subject.layout), tuple(found), tried)


def choose(methods: str | Sequence[str] | None) -> list[Method]:
    """The methods to try."""
    if methods is None or methods == "all":
        return list(METHODS.values())
    names = methods.split(",") if isinstance(methods, str) else methods
    return [METHODS[name.strip().replace("-", "_")] for name in dict.fromkeys(names)]


def noise(model: Model) -> Tensor:
    """Two images of noise, other ones than those of the layout run."""
    drawn = torch.randn(2, model.channels, *model.size, generator=torch.Generator().manual_seed(5))
    return drawn.to(model.device, model.dtype)


def study(model: Model, images: Tensor) -> Subject:
    """Run the model once by itself and once for its layout; choose what is explained."""
    trace = Trace(model, images[:1])
    images = images[:1] if trace.layout.alone else images
    output = alone(model, images)
    if not trace.classifies:
        return Subject(model, images, Neuron(0), output)
    return Subject(model, images, read_target(trace, None).fix(output), output)


def facts(model: Model, images: Tensor) -> dict[str, Any]:
    return {
        "library": model.library.PREFIX or "no known library",
        "network": type(model.module).__name__,
        "size": list(images.shape[-2:]),
        "channels": images.shape[1],
        "precision": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "outputs": model.outputs,
        "classifier": model.classifier,
        "form": model.form.value,
        "versions": {"vitreous": VERSION, "torch": torch.__version__, "Python": platform.python_version()},
    }


def told_layout(layout: Layout) -> dict[str, Any]:
    """Its fields, whatever they are; of what is internal only how much of it is known: where tokens enter, stages."""
    found = {field.name: getattr(layout, field.name) for field in fields(layout)}
    inner = {"entries": len(layout.entries), "stages": [list(stage.grid) for stage in layout.stages]}
    return {**found, **inner, "decoder": layout.decoder and layout.decoder.queries, "readers": len(layout.readers)}
