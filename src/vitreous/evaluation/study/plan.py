"""Plans a study: which models, images and targets, cut into independent shards."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vitreous.errors import InputError, OptionError, TargetError
from vitreous.evaluation.leaderboard import show_inputs
from vitreous.evaluation.study.kind import Kind
from vitreous.images.beside import Arrays
from vitreous.images.dataset import Data
from vitreous.images.decoding import choose_scaling, decoding_by
from vitreous.images.samples import Sample
from vitreous.metrics.case import no_target
from vitreous.models.fingerprint import weights_digest
from vitreous.models.match_labels import match_labels
from vitreous.models.model import Model
from vitreous.models.origin import Origin
from vitreous.models.output import Form, Meaning
from vitreous.trace.apply import as_model, images_at_once, of_images, read_target
from vitreous.trace.target import no_classifier
from vitreous.trace.trace import Trace
from vitreous.version import VERSION

FORMAT = 2  # of the store; another number is another study. 1: rows without image_hash, target_label, probability
BY_GPU = "JPEG files are decoded on the GPU, which gives slightly other pixels than Pillow on the CPU"
MOST_SHARDS, LARGEST = 1000, 2048  # more images make larger shards, up to this many


@dataclass(frozen=True, eq=False)
class Source:
    """Where a model comes from: a name and files that any worker can load, or a model in memory."""

    spec: str | None = None
    weights: str | None = None
    img_size: int | tuple[int, int] | None = None
    labels: str | None = None
    probe: str | None = None
    dtype: str | None = None
    output: str = "auto"
    ready: Model | nn.Module | None = None
    bands: tuple[int, ...] | None = None

    def load(self, device: str | torch.device | None = None) -> Model:
        if self.ready is not None:
            return of_images(as_model(self.ready), "a study works")
        from vitreous.models.load import load

        rest: dict[str, Any] = {"img_size": self.img_size, "labels": self.labels, "probe": self.probe}
        rest |= {"bands": self.bands, "output": self.output}
        return of_images(load(self.spec, self.weights, device, self.dtype, **rest), "a study works")


@dataclass(frozen=True, eq=False)
class Shard:
    """A few images for one model: the unit that is computed and stored as a whole."""

    number: int
    model: int
    first: int  # the number of its first image
    samples: Sequence[Sample]
    shown: frozenset[int]  # numbers of images whose photo is kept
    inputs: Arrays | None = None  # what a network gets beside each image

    def __len__(self) -> int:
        return len(self.samples)

    def groups(self, batch: int) -> list[list[int]]:
        """Its images' numbers, batch by batch."""
        numbers = range(self.first, self.first + len(self))
        return [list(numbers[start : start + batch]) for start in range(0, len(numbers), batch)]


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that a worker needs to compute any shard."""

    kind: Kind
    sources: tuple[Source, ...]
    names: tuple[str, ...]  # of the models
    targets: tuple[str | None, ...]
    batch: int
    decoders: tuple[str, ...]  # of each model, "cpu" or "gpu"
    data: tuple[Data, ...] = ()  # of each model, if the kind needs other images than those of a shard


@dataclass(frozen=True, eq=False)
class Planned:
    """A recipe, the images with each model's class labels, and the manifest that identifies the study."""

    recipe: Recipe
    data: list[Data]
    manifest: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.manifest["id"])

    @property
    def shards(self) -> list[Shard]:
        return self.cut(self.manifest["shard"])

    def cut(self, size: int) -> list[Shard]:
        """Shards in the order of the models and the images."""
        found: list[Shard] = []
        for model, data in enumerate(self.data):
            shown = self.recipe.kind.shown_images(self.recipe.names[model], len(data))
            found += cut(data, model, size, len(found), shown)
        return found

    def then(self, kind: Kind, manifest: dict[str, Any]) -> Planned:
        """The second phase of a study whose manifest is given: the same images, cut alike, with another kind."""
        told = {"study": kind.name, "options": kind.options}
        recipe = replace(self.recipe, kind=kind, data=tuple(self.data) if kind.pooled else ())
        return Planned(recipe, self.data, {**manifest, **told, "id": digest({"of": manifest["id"], **told})})


def plan(
    kind: Kind,
    sources: Sequence[Source],
    data: Data,
    targets: Sequence[str | None] = (None,),
    *,
    batch: int | None = None,
    shard: int | None = None,
    device: str | None = None,
    choice: dict[str, Any] | None = None,
    decode: str = "cpu",
) -> tuple[Planned, Model]:
    """Check everything that can be checked before hours of work; returns the last loaded model too."""
    if not len(data):
        raise InputError(f"{data.source}: no image is left to study")
    if not sources:
        raise OptionError("name at least one model")
    notes, labelled, about = list(data.notes), list[Data](), list[dict[str, Any]]()
    names: list[str] = []
    origins: dict[str, Any] = {}
    decoders: list[str] = []
    for source in sources:
        model = source.load(device)
        show_inputs(model, data)
        notes += [note for note in model.notes if note not in notes] + kind.check(model)
        check_targets(kind, model, data, targets)
        batch = batch or images_at_once(model)
        labelled.append(match_labels(data, model))
        notes += [note for note in labelled[-1].notes if note not in notes]
        names.append(unlike(model.name, names))
        origins[names[-1]] = Origin.of(model, model.size).told
        about.append(describe(model, names[-1], origins[names[-1]]["weights"]["digest"]))
        decoders.append(choose_decoder(decode, kind, model))
        if decoders[-1] == "gpu":
            about[-1]["decoder"] = "gpu"  # other pixels, so it is another study
            origins[names[-1]]["decoder"] = decoding_by()
            notes.append(f"{names[-1]}: {BY_GPU}")
    assert batch is not None
    identity = {
        "format": FORMAT,
        "study": kind.name,
        "options": kind.options,
        "models": about,
        "data": {"fingerprint": data.fingerprint, "images": len(data)},
        "targets": list(targets),
        "vitreous": VERSION,
    }
    size = shard or shard_size(kind.shard, batch, len(data))
    rest = {  # how it is cut, where the images lie and how they were chosen: told, but it is the same study
        "batch": batch,
        "shard": size,
        "shards": len(sources) * math.ceil(len(data) / size),
        "source": data.source,
        "root": data.root,
        "choice": choice or {},
        "origins": origins,
    }
    pool = tuple(labelled) if kind.pooled else ()
    recipe = Recipe(kind, tuple(sources), tuple(names), tuple(targets), batch, tuple(decoders), pool)
    return Planned(recipe, labelled, {"id": digest(identity), **identity, **rest}, notes), model


def choose_decoder(asked: str, kind: Kind, model: Model) -> str:
    """Where the JPEG files of a model are decoded, "cpu" or "gpu"."""
    together = kind.pooled or kind.phases > 1  # such a kind also opens images one by one, on the CPU
    if asked == "gpu" and together:
        raise OptionError(f"decode=gpu: the study {kind.name} decodes on the CPU only; leave it out")
    found = choose_scaling("cpu" if together and asked == "auto" else asked, model.preprocess, model.device)
    return "cpu" if found is None else "gpu"


def digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def shard_size(usual: int, batch: int, images: int) -> int:
    """Whole batches; larger shards for large data sets."""
    wanted = min(LARGEST, max(usual, math.ceil(images / MOST_SHARDS)))
    return max(1, round(wanted / batch)) * batch


def cut(data: Data, model: int, size: int, number: int, shown: Collection[int]) -> list[Shard]:
    """Shards in the order of the images; `shown`: the images whose photos are kept."""
    count = len(data)
    return [
        Shard(
            number + i,
            model,
            first,
            data.columns[first : first + size],
            frozenset(n for n in shown if first <= n < first + size),
            data.beside(range(first, min(first + size, count))),
        )
        for i, first in enumerate(range(0, count, size))
    ]


def unlike(name: str, taken: Sequence[str]) -> str:
    """A name that no other model of the study uses."""
    if name not in taken:
        return name
    return next(other for i in range(2, len(taken) + 3) if (other := f"{name} ({i})") not in taken)


def describe(model: Model, name: str, digest: str | None = None) -> dict[str, Any]:
    """What identifies a model; `digest`: of its weights, where it is known."""
    layout, meaning = model.layout, model.meaning
    box = layout.box(model.size)
    return {
        "name": name,
        "weights": digest or weights_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "size": list(model.size),
        "grid": list(layout.grid),
        **({} if box is None else {"box": list(box)}),  # the part of the image that its patches cover
        "layers": layout.layers,
        "classes": len(model.labels) or model.outputs,
        **model.arguments.told,
        **({} if model.form is Form.VECTOR else {"form": model.form.name.lower()}),
        **({} if model.bands is None else {"bands": list(model.bands)}),  # of the images that it keeps
        **({} if meaning is Meaning.LOGITS or not model.classifier else {"output": meaning.value}),
    }


def check_targets(kind: Kind, model: Model, data: Data, targets: Sequence[str | None]) -> None:
    """Raise if a target does not exist on this model."""
    if not kind.targeted:
        return
    if kind.single and len(targets) > 1:
        raise OptionError(f"the study {kind.name} takes one target: the label or top-1")
    trace = Trace(model, torch.zeros(1, model.channels, *model.size), data.beside([0]))
    trace.crops = replace(trace.crops, prepared=True)
    for target in targets:
        if target in (None, "label"):
            if not trace.classifies:
                raise no_target(trace)
            if target == "label" and all(label is None for label in data.columns.labels or ()):
                raise TargetError(
                    f"{data.source}: has no labels; give class folders, a CSV with a label column, or top-1"
                )
        elif read_target(trace, target).names_classes and not trace.classifies:
            raise no_classifier(model.name)
