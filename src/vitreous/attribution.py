"""The result of a method: maps with their provenance, which can be resized, drawn and saved."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitreous._support.arrays import plain, read_map, save_arrays
from vitreous._support.files import FIGURES
from vitreous._support.marks import identity_of, identity_of_result
from vitreous._support.spread import spread
from vitreous.errors import InputError, OptionError, TargetError
from vitreous.images import pictures
from vitreous.images.bands import Bands
from vitreous.images.preprocess import Preprocess
from vitreous.models.origin import Origin
from vitreous.trace.area import Area
from vitreous.trace.own_sizes import differ, own_part, together
from vitreous.trace.parse_target import listed
from vitreous.trace.views import Views
from vitreous.types import Box, Map
from vitreous.version import VERSION

RENAMED = "view(image, index) is now seen(image, index), and goes in 0.3; view() shows the maps in a notebook"
PER_IMAGE = ("targets", "labels", "probabilities", "boxes", "regions", "sources", "inputs")
MODEL = (
    *("library", "spec", "architecture", "weights", "input", "preprocess", "output", "versions"),
    *("image_argument", "shared_inputs", "decoder"),
)


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
    boxes: tuple[Box | None, ...] = ()  # of a detector: the box of each image's query
    regions: tuple[Area | None, ...] = ()  # of an output for each place: that of each image's target; not saved
    sources: tuple[Mapping[str, Any], ...] = ()  # what a file tells of the images
    made_by: Origin | Mapping[str, Any] | None = None  # the model, or what a file tells of it
    inputs: tuple[str, ...] = ()  # a hash of what the network got beside each image
    times: tuple[tuple[int, int], ...] = ()  # of a video: the frames of each tubelet; empty: a map for each frame

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
            **({"boxes": list(self.boxes)} if self.boxes else {}),
            "model": self.model,
            "signed": self.signed,
            **({} if self.box is None else {"box": list(self.box)}),
            **({"inputs": list(self.inputs)} if self.inputs else {}),
            **({"times": [list(span) for span in self.times]} if self.times else {}),
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
        """Resize the maps to (height, width) of the image with bilinear interpolation; zero where no patch lies.

        Of a video, those of each tubelet: the number of tubelets stays.
        """
        shape = (size, size) if isinstance(size, int) else tuple(size)
        if len(shape) != 2 or min(shape) < 1:
            raise OptionError(f"size={size}: give one number or (height, width), each at least 1")
        if len(self) > 1 and differ(self.map):
            return join([one.resize(size) for one in self])
        return replace(self, map=spread(self.map, (shape[0], shape[1]), self.box), box=None)

    def view(self, *others: Any, index: int | None = None, height: int | None = None) -> Any:
        """The maps in a notebook, on the page's own views: point at patches, change colours, save; no model is needed.

        `others`: attributions of the same images, shown beside these. `height`: of the widget, in pixels.
        """
        if index is not None or not all(isinstance(one, Attribution) for one in others):
            warnings.warn(RENAMED, DeprecationWarning, stacklevel=2)
            return self.seen(others[0] if others else None, index or 0)
        import vitreous  # by its public name: a notebook's room lies below this one

        return vitreous.view([self, *others], height=height)

    def seen(self, image: Any = None, index: int = 0) -> Image.Image:
        """The image to draw on: the given one, or the one that was explained, cropped to what the model saw."""
        if image is not None:
            return drawn_on(image, None if self.views is None else self.views.preprocess)
        if self.views is None:
            raise InputError("this attribution was loaded from a file without its image; give one: overlay(image)")
        return self.views[index]

    def overlay(self, image: Any = None, *, index: int = 0, cells: bool = False) -> Image.Image:
        """Draw one map over its image, cropped to what the model saw; `cells` shows the patches without smoothing.

        Of a video: the map of each tubelet over its middle frame, side by side.
        """
        from vitreous.plot.colour import is_control, is_level, limits
        from vitreous.plot.outline import outlined
        from vitreous.plot.overlay import overlay
        from vitreous.plot.region import surrounded

        if self.map.ndim == 4:
            from vitreous.plot.strip import panel_of

            if image is not None:
                raise InputError("maps of a video are drawn over its own frames; leave the image out")
            return panel_of(self, index, cells).picture
        values, control = self[index].map[0].cpu().numpy(), is_control(self.method)
        ends = limits(values, self.signed, is_level(self.method))
        shown = self.seen(image, index)
        drawn = overlay(values, shown, self.signed, cells=cells, limits=ends, control=control, box=self.box)
        drawn = outlined(drawn, self.boxes[index] if self.boxes else None)
        return surrounded(drawn, self.regions[index] if self.regions else None)

    def save(self, path: str | Path) -> Path:
        """Save a figure (.png, .svg, .pdf, …), raw maps with their provenance (.npz), or a film of a video (.gif)."""
        file = Path(path)
        if file.suffix.lower() == ".npz":
            save_arrays(file, {"map": self.map.cpu().numpy()}, mark_of({"map": self}))
        elif file.suffix.lower() == ".gif":
            from vitreous.plot.strip import save_film

            save_film([self], file, mark_of({"map": self}))
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
            boxes=tuple(tuple(box) for box in told.get("boxes", ())),
            version=told["vitreous"],
            box=None if told.get("box") is None else tuple(told["box"]),
            times=tuple((span[0], span[1]) for span in told.get("times", ())),
            sources=tuple(told.get("sources") or ({"name": image} for image in told["images"])),
            made_by={key: told[key] for key in MODEL if key in told},
            inputs=tuple(told.get("inputs", ())),
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
