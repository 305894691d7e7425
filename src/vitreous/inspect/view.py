"""What every view has: raw numbers, their provenance, a figure, files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from vitreous._support.arrays import plain, save_arrays
from vitreous._support.marks import identity_of_result
from vitreous.errors import InputError, Unsupported
from vitreous.images import pictures
from vitreous.models.model import Model
from vitreous.models.origin import Origin
from vitreous.trace.apply import as_images, as_model, between_all, of_images, of_model
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views
from vitreous.version import VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyModel = Model | nn.Module | str | None
OBJECTS = ("photo", "views", "made_by")  # that are told in other ways


@dataclass(frozen=True, eq=False, kw_only=True)
class View(ABC):
    """What was recorded of one image inside one model."""

    name: ClassVar[str]
    moves: ClassVar[bool] = False  # can it be saved as a .gif?
    apart: ClassVar[tuple[str, ...]] = ()  # fields that the provenance leaves out
    model: str
    image: str
    photo: Image.Image = field(repr=False)  # what the model saw
    version: str = VERSION
    views: Views | None = field(default=None, repr=False)  # of the images that were looked at
    made_by: Origin | None = field(default=None, repr=False)

    @abstractmethod
    def figure(self) -> Figure: ...

    @property
    @abstractmethod
    def said(self) -> str:
        """The main finding, in one line."""

    @property
    def details(self) -> dict[str, Any]:
        """More facts for programs, as JSON."""
        return {}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The raw numbers."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    @property
    def provenance(self) -> dict[str, Any]:
        """Everything else, as JSON."""
        told = {name: value for name, value in vars(self).items() if name not in {*self.arrays, *OBJECTS, *self.apart}}
        sources = [] if self.views is None else [self.views.told(i) for i in range(len(self.views))]
        model = {} if self.made_by is None else self.made_by.told
        return {"view": self.name, **plain(told), "said": self.said, "sources": sources, **model}

    @property
    def mark(self) -> dict[str, Any]:
        """What its files say of it: the provenance, and a hash of what it follows from."""
        provenance = self.provenance
        return {"identity": identity_of_result(provenance), **provenance}

    @property
    def origin(self) -> str:
        """The model and the image, for titles."""
        return f"{self.model} on {self.image}"

    def save(self, path: str | Path, figure: Figure | None = None) -> Path:
        """A figure (.png, .svg, .pdf, …), by default `figure()`, or the numbers with their provenance (.npz)."""
        from vitreous.plot.figure import save_figure

        file = Path(path)
        if file.suffix.lower() == ".npz":
            save_arrays(file, self.arrays, self.mark)
        else:
            save_figure(figure or self.figure(), file, self.mark)
        return file

    def _repr_png_(self) -> bytes:
        """The figure, for notebooks."""
        from vitreous.plot.figure import png_bytes

        return png_bytes(self.figure())


@dataclass(frozen=True, eq=False)
class Seen:
    """One image in one model, recorded."""

    trace: Trace
    views: Views

    @property
    def about(self) -> dict[str, Any]:
        """What every view records."""
        made_by = Origin.of(self.trace.model, self.trace.size)
        about = {"model": self.trace.model.name, "image": self.views.name(0), "photo": self.views[0]}
        return {**about, "views": self.views, "made_by": made_by}

    @property
    def picture(self) -> tuple[tuple[int, int], tuple[float, float, float, float]]:
        """Width and height of the image as it was given, and the part of it that the model saw."""
        source = self.views.sources[0]
        if isinstance(source, Tensor) and source.is_floating_point():
            h, w = self.trace.size
            return (w, h), (0.0, 0.0, float(w), float(h))
        size = pictures.read(source, channels=self.views.preprocess.channels).image.size
        return size, self.views.preprocess.box(size)


@contextmanager
def looking(model: AnyModel, image: Any, view: str) -> Iterator[Seen]:
    """A recorded run of one image whose attention can be followed; `image` may be a `Trace` of one."""
    if isinstance(image, Trace):
        trace, views = of_model(image, model), Views.of(image.images, image.model)
    else:
        wrapped = as_model(model)
        listed = as_images(image, wrapped.channels, wrapped.frames)
        trace, views = Trace(wrapped, listed), Views.of(listed, wrapped)
    of_images(trace.model, "inspect works")
    if len(trace) != 1:
        raise InputError(f"inspect {view} looks at one image at a time, not at {len(trace)}; call it for each")
    refuse_view(trace, view)
    device = trace.images.device.type
    with torch.inference_mode(False), torch.autocast(device, enabled=False), torch.no_grad():
        yield Seen(trace, views)


def refuse_view(trace: Trace, view: str) -> None:
    """Raise if attention cannot be followed through the model."""
    said = between_all(trace.layout, trace.model.name, f"inspect {view}")
    if said is not None:
        raise Unsupported(said)


def numbers(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()


def width_of(maps: Float[np.ndarray, "*n h w"]) -> Float[np.ndarray, "*n"]:
    """exp(H)/n, H the entropy over the n patches: 1/n, all on one patch; 1, the same on each."""
    shares = maps.reshape(*maps.shape[:-2], -1).astype(np.float64)
    shares = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-30)
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(-1)
    return np.asarray(np.exp(entropy) / shares.shape[-1], np.float32)


def span(numbers: list[int], one: str, many: str) -> str:
    """layer 3, layers 0–11, layers 0, 4, 8."""
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    first, last = numbers[0], numbers[-1]
    row = numbers == list(range(first, last + 1))
    return f"{many} {first}–{last}" if row else f"{many} {', '.join(map(str, numbers))}"
