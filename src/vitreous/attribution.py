"""The result of a method: maps with their provenance, which can be resized, drawn and saved."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous._support.arrays import plain, read_map, save_arrays
from vitreous._support.files import FIGURES
from vitreous._support.marks import identity_of, identity_of_result
from vitreous.errors import InputError, OptionError, TargetError
from vitreous.images import pictures
from vitreous.images.bands import Bands
from vitreous.images.preprocess import Preprocess
from vitreous.models.origin import Origin
from vitreous.registry import Method
from vitreous.trace.apply import choose, computed, refuse, refuse_empty
from vitreous.trace.parse_target import listed
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views, differ, own_part, together
from vitreous.types import Box, Map, Output
from vitreous.version import VERSION

PER_IMAGE = ("targets", "labels", "probabilities", "sources")
MODEL = ("library", "spec", "architecture", "weights", "input", "preprocess", "output", "versions")


@dataclass(frozen=True, eq=False, repr=False)
class Attribution:
    """Maps of one method for a batch of images: float32, not normalised, one value per patch or per pixel."""

    map: Map
    method: str
    options: Mapping[str, Any]
    targets: tuple[str | None, ...]  # one per image; None if the method does not depend on a target
    model: str
    signed: bool
    notes: Mapping[str, Any] = field(default_factory=dict)
    views: Views | None = field(default=None, repr=False)
    version: str = VERSION
    box: Box | None = None  # the part of the image that the maps cover; None: all of it
    labels: tuple[str | None, ...] = ()  # the name of each image's target
    probabilities: tuple[float | None, ...] = ()  # of each image's target; of a regression, its value
    sources: tuple[Mapping[str, Any], ...] = ()  # what a file tells of the images
    made_by: Origin | Mapping[str, Any] | None = None  # the model, or what a file tells of it

    def __post_init__(self) -> None:
        if len(self.targets) != len(self.map):
            raise TargetError(f"{len(self.targets)} targets for {len(self.map)} maps; give one for each map")

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, index: SupportsIndex | slice) -> Attribution:
        """The attribution of one image, or of several: found[0], found[:2]."""
        if not isinstance(index, slice):
            number = range(len(self))[operator.index(index)]
            index = slice(number, number + 1)
        cut = {name: values[index] for name in PER_IMAGE if (values := getattr(self, name))}
        notes = {k: v[index] if per_image(v, len(self)) else v for k, v in self.notes.items()}
        views = None if self.views is None else self.views.part(index)
        return replace(self, map=own_part(self.map[index]), views=views, notes=notes, **cut)

    def __iter__(self) -> Iterator[Attribution]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The maps as an array [B h w]: np.asarray(found)."""
        return np.array(self.map.detach().cpu(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        """One line: what it is, of which images and of which model."""
        size = "×".join(map(str, self.map.shape[1:]))
        count = f"{len(self)} maps" if len(self) != 1 else "1 map"
        label = next(iter(set(self.labels)), None) if len(set(self.labels)) == 1 else None
        aim = "" if self.target is None else f", target {label or self.target}"
        names = ", ".join(self.names[:3]) + (", …" if len(self) > 3 else "")
        return f"<Attribution: {self.method} of {self.model}, {count} {size}{aim}: {names}>"

    @property
    def target(self) -> str | None:
        """The explained target as text: the one that all images share, or "6;7-1" if each image has its own."""
        each = dict.fromkeys(self.targets)
        return next(iter(each), None) if len(each) < 2 else ";".join(map(str, self.targets))

    @property
    def names(self) -> list[str]:
        """The names of the images."""
        if self.views is not None:
            return [self.views.name(i) for i in range(len(self))]
        return [str(told["name"]) for told in self.sources] or [f"image {i}" for i in range(len(self))]

    @property
    def provenance(self) -> dict[str, Any]:
        """Everything needed to reproduce the maps, as JSON."""
        sources = (
            [{"name": name} for name in self.names] if self.views is None else map(self.views.told, range(len(self)))
        )
        return {
            "method": self.method,
            "options": plain(dict(self.options)),
            "target": self.target,
            "targets": list(self.targets),
            "labels": list(self.labels),
            "probabilities": list(self.probabilities),
            "model": self.model,
            "signed": self.signed,
            **({} if self.box is None else {"box": list(self.box)}),
            "images": self.names,
            "sources": plain(self.sources or list(sources)),
            "notes": plain(dict(self.notes)),
            "vitreous": self.version,
            **(self.made_by.told if isinstance(self.made_by, Origin) else self.made_by or {}),
        }

    @property
    def identity(self) -> str:
        """A short hash of what the maps follow from: weights, images, method, options, target and versions."""
        return identity_of_result(self.provenance)

    def resize(self, size: int | tuple[int, int]) -> Attribution:
        """Resize the maps to (height, width) of the image with bilinear interpolation; zero where no patch lies."""
        shape = (size, size) if isinstance(size, int) else tuple(size)
        if len(shape) != 2 or min(shape) < 1:
            raise OptionError(f"size={size}: give one number or (height, width), each at least 1")
        if len(self) > 1 and differ(self.map):
            return join([one.resize(size) for one in self])
        return replace(self, map=spread(self.map, (shape[0], shape[1]), self.box), box=None)

    def view(self, image: Any = None, index: int = 0) -> Image.Image:
        """The image to draw on: the given one, or the one that was explained, cropped to what the model saw."""
        if image is not None:
            return drawn_on(image, None if self.views is None else self.views.preprocess)
        if self.views is None:
            raise InputError("this attribution was loaded from a file without its image; give one: overlay(image)")
        return self.views[index]

    def overlay(self, image: Any = None, *, index: int = 0, cells: bool = False) -> Image.Image:
        """Draw one map over its image, cropped to what the model saw; `cells` shows the patches without smoothing."""
        from vitreous.plot.colour import is_control, is_level, limits
        from vitreous.plot.overlay import overlay

        values, control = self[index].map[0].cpu().numpy(), is_control(self.method)
        ends = limits(values, self.signed, is_level(self.method))
        shown = self.view(image, index)
        return overlay(values, shown, self.signed, cells=cells, limits=ends, control=control, box=self.box)

    def save(self, path: str | Path) -> Path:
        """Save a figure (.png, .svg, .pdf, …), or the raw maps with their provenance (.npz)."""
        file = Path(path)
        if file.suffix.lower() == ".npz":
            save_arrays(file, {"map": self.map.cpu().numpy()}, mark_of({"map": self}))
        elif file.suffix.lower() in FIGURES:
            from vitreous.plot.figure import attribution_figure, save_figure

            save_figure(attribution_figure(self), file, mark_of({"map": self}))
        else:
            raise OptionError(
                f"{file}: cannot save as {file.suffix or 'a file without suffix'}; use .npz or {', '.join(FIGURES)}"
            )
        return file

    def log(self, writer: Any, name: str | None = None, step: int | None = None, *, most: int = 8) -> None:
        """Log figures and numbers of the first maps to TensorBoard, Weights & Biases or MLflow, under `name`."""
        from vitreous.plot.logged import log

        log(self, [self[i] for i in range(min(len(self), most))], writer, name or self.method, step)

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> Attribution:
        """Load an .npz file written by `save` or by the command line; it holds no images.

        `name`: the map to load if the file holds several, e.g. "rollout".
        """
        maps, told = read_map(Path(path), name)
        targets = told["targets"] if "targets" in told else old_targets(told["target"], len(maps))
        return cls(
            map=torch.from_numpy(maps),
            targets=tuple(targets),
            labels=tuple(told.get("labels", ())),
            probabilities=tuple(told.get("probabilities", ())),
            version=told["vitreous"],
            box=None if told.get("box") is None else tuple(told["box"]),
            sources=tuple(told.get("sources") or ({"name": image} for image in told["images"])),
            made_by={key: told[key] for key in MODEL if key in told},
            **{key: told[key] for key in ("method", "options", "model", "signed", "notes")},
        )

    def _repr_png_(self) -> bytes:
        """The figure that notebooks display."""
        from vitreous.plot.figure import attribution_figure, png_bytes

        return png_bytes(attribution_figure(self))


def drawn_on(image: Any, steps: Preprocess | None) -> Image.Image:
    """An image that a user gives to draw on: RGB, or of the channels that the model takes."""
    try:
        picture = pictures.read(image, channels=3 if steps is None else steps.channels).image
    except InputError:
        if steps is None or steps.channels == 3:
            raise
        picture = pictures.read(image).image
    if steps is not None:
        return steps.view(picture)
    return picture.shown() if isinstance(picture, Bands) else picture


def mark_of(maps: Mapping[str, Attribution]) -> dict[str, Any]:
    """What a file of these maps says of them: the provenance of each, and one identity of all."""
    each = {key: one.provenance for key, one in maps.items()}
    return {"identity": identity_of({key: identity_of_result(told) for key, told in each.items()}), "maps": each}


def old_targets(joined: str | None, count: int) -> Sequence[str | None]:
    """The targets of a file written by version 0.1, which stored them in one string."""
    each = listed(joined or "")
    return each if len(each) == count > 1 else [joined] * count


def per_image(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple | Tensor) and len(value) == count


def join(parts: Sequence[Attribution]) -> Attribution:
    """Concatenate the attributions of several batches."""
    first = parts[0]
    if len(parts) == 1:
        return first
    views = Views.join([part.views for part in parts if part.views]) if first.views else None
    notes = {
        key: [x for part in parts for x in plain(part.notes[key])]
        for key, value in first.notes.items()
        if per_image(value, len(first))
    }
    rows: dict[str, Any] = {name: tuple(value for part in parts for value in getattr(part, name)) for name in PER_IMAGE}
    return replace(first, map=together([p.map for p in parts]), views=views, notes={**first.notes, **notes}, **rows)


# ------------------------------------------------------------------------------------------ running methods


def attribute(
    trace: Trace,
    declared: Method,
    target: Any,
    values: dict[str, Any],
    views: Views | None = None,
    *,
    strict: bool = True,
) -> Attribution:
    """Run one method on one trace; `values` are validated options."""
    return attribute_all(trace, declared, [target], values, views, strict=strict)[0]


def attribute_all(
    trace: Trace,
    declared: Method,
    targets: list[Any],
    values: dict[str, Any],
    views: Views | None = None,
    *,
    strict: bool = True,
) -> list[Attribution]:
    """Run one method on one trace for each target; a method that does not depend on a target runs once.

    `strict`: raise if the map of an image is zero everywhere or not finite.
    """
    refuse(trace, declared)
    chosen = [choose(trace, target, declared) for target in targets]
    results, output = computed(trace, declared, tuple(chosen if declared.targeted else chosen[:1]), values)
    output = trace.output if output is None and declared.targeted else output
    views = views or Views.of(trace.images, trace.model)
    for target, noted in zip(chosen, results) if strict else ():
        fixed = target if output is None else target.fix(output)
        refuse_empty(trace, declared, fixed, noted.map, views)
    made_by = Origin.of(trace.model, trace.size)
    return [
        Attribution(
            map=noted.map,
            method=declared.name,
            options=values,
            targets=told_targets(target, output, len(trace)),
            **told_shares(target, output, trace),
            model=trace.model.name,
            made_by=made_by,
            signed=declared.is_signed(values),
            notes=noted.notes,
            views=views,
            box=trace.layout.box(trace.size) if tuple(noted.map.shape[1:]) == trace.layout.grid else None,
        )
        for target, noted in zip(chosen, results if declared.targeted else results * len(chosen))
    ]


def spread(maps: Tensor, size: tuple[int, int], box: Box | None) -> Tensor:
    """Maps at the size of their images (bilinear), put where they lie; zero where they cover nothing."""
    if box is None:
        return F.interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    top, left, bottom, right = (round(share * size[axis % 2]) for axis, share in enumerate(box))
    inner = F.interpolate(maps[:, None], (bottom - top, right - left), mode="bilinear", align_corners=False)[:, 0]
    inner = inner[:, : size[0] - top, : size[1] - left]
    whole = maps.new_zeros(len(maps), *size)
    whole[:, top : top + inner.shape[1], left : left + inner.shape[2]] = inner
    return whole


def told_targets(target: Target, output: Output | None, count: int) -> tuple[str | None, ...]:
    """The target of each image as a string that `parse` reads; None if the method does not depend on a target."""
    if output is None:
        return (None,) * count
    fixed = target.fix(output)
    return tuple(str(fixed.of_image(index)) for index in range(count))


def told_shares(target: Target, output: Output | None, trace: Trace) -> dict[str, Any]:
    """The name of each image's target, and its probability if it is a class."""
    if output is None:
        return {}
    fixed, model = target.fix(output), trace.model
    each = [fixed.of_image(index).single() for index in range(len(trace))]
    numbers = [number for one in each for number in one.class_numbers(1) or ()]
    if len(numbers) < len(each) or not trace.classifies:
        return {"labels": tuple(one.title(model, output[i : i + 1], 0) for i, one in enumerate(each))}
    chosen = torch.tensor(numbers, device=output.device)[:, None]
    shares = model.meaning.probabilities(output.detach().float()).gather(1, chosen)[:, 0].tolist()
    return {"labels": tuple(model.label(number) for number in numbers), "probabilities": tuple(shares)}
