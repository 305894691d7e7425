"""The result of a method: maps with their provenance, which can be resized, drawn and saved."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous._support.files import FIGURES, write_whole
from vitreous.errors import InputError, OptionError, TargetError, one_line
from vitreous.images import pictures
from vitreous.images.bands import Bands
from vitreous.images.preprocess import Preprocess
from vitreous.models.model import Model
from vitreous.registry import Method
from vitreous.trace.apply import choose, computed, refuse, refuse_empty
from vitreous.trace.parse_target import listed
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Box, Map, Output
from vitreous.version import VERSION


@dataclass(frozen=True, eq=False)
class Views:
    """The part of each image that the model saw, rendered on access."""

    sources: Sequence[Any] | Tensor
    seen_by: Preprocess | Model  # a model: its preprocessing, made when first needed
    start: int = 0  # index of the first image, for names such as "image 3"

    @classmethod
    def of(cls, images: Any, model: Model, start: int = 0) -> Views:
        return cls(images if isinstance(images, Tensor) else pictures.as_list(images, model.channels), model, start)

    @property
    def preprocess(self) -> Preprocess:
        return self.seen_by.preprocess if isinstance(self.seen_by, Model) else self.seen_by

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Image.Image:
        source = self.sources[index]
        if isinstance(source, Tensor) and source.is_floating_point():
            return Image.fromarray((self.preprocess.colours(source) * 255).round().astype(np.uint8))
        return self.preprocess.view(pictures.read(source, index, self.preprocess.channels).image)

    def name(self, index: int) -> str:
        source = self.sources[index]
        if isinstance(source, pictures.Picture):
            return source.name
        path = source if isinstance(source, str | Path) else getattr(source, "filename", "")
        return Path(path).name if path else f"image {self.start + index}"

    def only(self, index: int) -> Views:
        return Views(self.sources[index : index + 1], self.seen_by, self.start + index)


@dataclass(frozen=True, eq=False)
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

    def __post_init__(self) -> None:
        if len(self.targets) != len(self.map):
            raise TargetError(f"{len(self.targets)} targets for {len(self.map)} maps; give one for each map")

    def __len__(self) -> int:
        return len(self.map)

    def __getitem__(self, index: int) -> Attribution:
        """The attribution of one image."""
        index = range(len(self))[index]
        views = None if self.views is None else self.views.only(index)
        notes = {k: v[index : index + 1] if per_image(v, len(self)) else v for k, v in self.notes.items()}
        targets = self.targets[index : index + 1]
        return replace(self, map=self.map[index : index + 1], views=views, notes=notes, targets=targets)

    def __iter__(self) -> Iterator[Attribution]:
        return (self[i] for i in range(len(self)))

    @property
    def target(self) -> str | None:
        """The explained target as text: the one that all images share, or "6;7-1" if each image has its own."""
        each = dict.fromkeys(self.targets)
        return next(iter(each), None) if len(each) < 2 else ";".join(map(str, self.targets))

    @property
    def names(self) -> list[str]:
        """The names of the images."""
        return [self.views.name(i) if self.views else f"image {i}" for i in range(len(self))]

    @property
    def provenance(self) -> dict[str, Any]:
        """Everything needed to reproduce the maps, as JSON."""
        return {
            "method": self.method,
            "options": plain(dict(self.options)),
            "target": self.target,
            "targets": list(self.targets),
            "model": self.model,
            "signed": self.signed,
            **({} if self.box is None else {"box": list(self.box)}),
            "images": self.names,
            "notes": plain(dict(self.notes)),
            "vitreous": self.version,
        }

    def resize(self, size: int | tuple[int, int]) -> Attribution:
        """Resize the maps to (height, width) of the image with bilinear interpolation; zero where no patch lies."""
        shape = (size, size) if isinstance(size, int) else tuple(size)
        if len(shape) != 2 or min(shape) < 1:
            raise OptionError(f"size={size}: give one number or (height, width), each at least 1")
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

        values, control = self.map[index].cpu().numpy(), is_control(self.method)
        ends = limits(values, self.signed, is_level(self.method))
        shown = self.view(image, index)
        return overlay(values, shown, self.signed, cells=cells, limits=ends, control=control, box=self.box)

    def save(self, path: str | Path) -> Path:
        """Save a figure (.png, .svg, .pdf, …), or the raw maps with their provenance (.npz)."""
        file = Path(path)
        if file.suffix.lower() == ".npz":
            save_arrays(file, {"map": self.map.cpu().numpy(), "provenance": json.dumps(self.provenance)})
        elif file.suffix.lower() in FIGURES:
            from vitreous.plot.figure import attribution_figure, save_figure

            save_figure(attribution_figure(self), file)
        else:
            raise OptionError(
                f"{file}: cannot save as {file.suffix or 'a file without suffix'}; use .npz or {', '.join(FIGURES)}"
            )
        return file

    def log(self, writer: Any, name: str | None = None, step: int | None = None, *, most: int = 8) -> None:
        """Log figures and numbers of the first maps to TensorBoard, Weights & Biases or MLflow; `name` leads the tags."""
        from vitreous.plot.logged import log

        log(self, [self[i] for i in range(min(len(self), most))], writer, name or self.method, step)

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> Attribution:
        """Load an .npz file written by `save` or by the command line; it holds no images.

        `name`: the map to load if the file holds several, e.g. "rollout".
        """
        maps, told = read_arrays(Path(path), name)
        keys = ("method", "options", "model", "signed", "notes")
        targets = told["targets"] if "targets" in told else old_targets(told["target"], len(maps))
        box = None if told.get("box") is None else tuple(told["box"])
        about = {key: told[key] for key in keys}
        return cls(map=maps, targets=tuple(targets), version=told["vitreous"], box=box, **about)

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


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an .npz file atomically: an interrupt leaves no partial file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_whole(path, buffer.getvalue())


def read_arrays(path: Path, name: str | None) -> tuple[Tensor, dict[str, Any]]:
    """The maps of one method [B … …] in a file, and their provenance."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            told = json.loads(str(stored["provenance"]))
            if "map" in stored:
                return torch.from_numpy(stored["map"]), told
            known = [key for key in stored if key != "provenance"]
            name = known[0] if name is None and len(known) == 1 else name
            if name not in known:
                raise OptionError(f"{path} holds {', '.join(known)}; choose one: Attribution.load(path, {known[0]!r})")
            return torch.from_numpy(stored[name])[None], told[name]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, OptionError):
            raise
        raise InputError(f"{path} is not an .npz file of maps written by vitreous ({one_line(error, 80)})") from None


def old_targets(joined: str | None, count: int) -> Sequence[str | None]:
    """The targets of a file written by version 0.1, which stored them in one string."""
    each = listed(joined or "")
    return each if len(each) == count > 1 else [joined] * count


def per_image(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple | Tensor) and len(value) == count


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tensors and arrays become lists, anything unknown its string."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def join(parts: Sequence[Attribution]) -> Attribution:
    """Concatenate the attributions of several batches."""
    first = parts[0]
    if len(parts) == 1:
        return first
    sources: list[Any] = [s for part in parts if part.views for s in part.views.sources]
    views = Views(sources, first.views.seen_by) if first.views else None
    notes = {
        key: [x for part in parts for x in plain(part.notes[key])]
        for key, value in first.notes.items()
        if per_image(value, len(first))
    }
    maps, targets = torch.cat([p.map for p in parts]), tuple(target for part in parts for target in part.targets)
    return replace(first, map=maps, views=views, notes={**first.notes, **notes}, targets=targets)


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
    return [
        Attribution(
            map=noted.map,
            method=declared.name,
            options=values,
            targets=told_targets(target, output, len(trace)),
            model=trace.model.name,
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
