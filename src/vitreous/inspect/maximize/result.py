"""The images of an activation maximisation, and how they were found: drawn, saved, as a film."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitreous._support.arrays import plain, save_arrays
from vitreous._support.files import FIGURES, write_whole
from vitreous._support.marks import identity_of_result, pixels
from vitreous.errors import OptionError
from vitreous.models.origin import Origin
from vitreous.version import VERSION

FRAME_MS, HOLD_MS = 90, 1500  # of a film: each frame, and the last
LEAST_SIDE = 224  # smaller images are enlarged in films


@dataclass(frozen=True, eq=False)
class Maximized:
    """One image for each unit and seed, with the ascent that led to it."""

    images: Float[Tensor, "U channels Y X"]  # in 0…1, in steps of 1/255
    units: tuple[str, ...]
    titles: tuple[str, ...]  # the units for people: with the label of a class given by its number
    seeds: tuple[int, ...]
    activation: Float[Tensor, "U T"]  # the mean over each step's random views
    start: Float[Tensor, "U"]  # on the first image as it is
    final: Float[Tensor, "U"]  # on the last
    border_ratio: Float[Tensor, "U"]  # squared steps between patches over those inside; 1: no checkerboard
    film: UInt8[Tensor, "U F channels Y X"] = field(repr=False)
    options: Mapping[str, Any]
    model: str
    patch: tuple[int, int]
    stopped: bool = False  # by Ctrl-C, before the last step
    version: str = VERSION
    usual: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the defaults of the options
    bands: tuple[int, ...] = (0, 1, 2)  # the channels that are shown
    made_by: Origin | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: int) -> Maximized:
        """One unit's image."""
        i = range(len(self))[index]
        rows = {name: getattr(self, name)[i : i + 1] for name in PER_UNIT}
        words = {name: getattr(self, name)[i : i + 1] for name in WORDS}
        return replace(self, **words, **rows)

    def __iter__(self) -> Iterator[Maximized]:
        return (self[i] for i in range(len(self)))

    @property
    def provenance(self) -> dict[str, Any]:
        """Everything needed to make these images again, as JSON."""
        return {
            "units": list(self.units),
            "seeds": list(self.seeds),
            "model": self.model,
            "options": plain(dict(self.options)),
            "steps_done": self.activation.shape[1],
            "start": self.start.tolist(),
            "final": self.final.tolist(),
            "border_ratio": self.border_ratio.tolist(),
            "vitreous": self.version,
            **({} if self.made_by is None else self.made_by.told),
        }

    @property
    def mark(self) -> dict[str, Any]:
        """What its files say of it: the provenance, and a hash of what it follows from."""
        provenance = self.provenance
        return {"identity": identity_of_result(provenance), **provenance}

    def picture(self, index: int = 0) -> Image.Image:
        """One image, in the model's own size."""
        return as_image((self.images[index] * 255).round().to(torch.uint8), self.bands)

    def save(self, path: str | Path) -> Path:
        """A figure (.png, .svg, .pdf, …) or all the numbers with their provenance (.npz)."""
        file = Path(path)
        if file.suffix.lower() == ".npz":
            arrays = {name: getattr(self, name).numpy() for name in PER_UNIT if name != "film"}
            save_arrays(file, arrays, self.mark)
        elif file.suffix.lower() in FIGURES:
            from vitreous.plot.figure import save_figure
            from vitreous.plot.maximized import maximized_figure

            save_figure(maximized_figure(self), file, self.mark)
        else:
            ending = file.suffix or "a file without ending"
            raise OptionError(f"{file}: cannot save as {ending}; use .npz or {', '.join(FIGURES)}")
        return file

    def save_image(self, path: str | Path, index: int = 0) -> Path:
        """Write the bare image as a PNG."""
        buffer = io.BytesIO()
        self.picture(index).save(buffer, "PNG", **pixels("png", self.mark))
        return write_image(Path(path), buffer.getvalue(), ".png")

    def save_gif(self, path: str | Path, index: int = 0) -> Path:
        """Write the ascent as a film that stays on its last image for a while."""
        from vitreous.plot.gif import gif_bytes

        frames = [enlarged(as_image(frame, self.bands)) for frame in self.film[index]]
        return write_image(Path(path), gif_bytes(frames, [FRAME_MS] * (len(frames) - 1) + [HOLD_MS], self.mark), ".gif")

    def _repr_png_(self) -> bytes:
        """A figure, for notebooks."""
        from vitreous.plot.figure import png_bytes
        from vitreous.plot.maximized import maximized_figure

        return png_bytes(maximized_figure(self))


WORDS = ("units", "titles", "seeds")
LENGTHS = ("activation", "film")  # of so many steps or frames
PER_UNIT = ("images", "start", "final", "border_ratio", *LENGTHS)


def join(parts: Sequence[Maximized]) -> Maximized:
    """Join batches to one result; curves that Ctrl-C cut short are extended by their last value."""
    rows = {name: [getattr(part, name) for part in parts] for name in PER_UNIT}
    for name in LENGTHS:
        most = max(row.shape[1] for row in rows[name])
        rows[name] = [lengthened(row, most) for row in rows[name]]
    joined: dict[str, Any] = {name: torch.cat(row) for name, row in rows.items()}
    joined |= {name: tuple(one for part in parts for one in getattr(part, name)) for name in WORDS}
    return replace(parts[0], stopped=any(part.stopped for part in parts), **joined)


def lengthened(values: Tensor, length: int) -> Tensor:
    """With its last entry repeated."""
    missing = length - values.shape[1]
    return torch.cat([values, values[:, -1:].expand(-1, missing, *values.shape[2:])], 1)


def as_image(pixels: UInt8[Tensor, "channels Y X"], bands: Sequence[int]) -> Image.Image:
    shown = pixels[list(bands if len(bands) == 3 else [*bands] * 3)]
    return Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy())


def enlarged(image: Image.Image) -> Image.Image:
    """Enlarge by an integer factor, so that pixels stay pixels."""
    times = -(-LEAST_SIDE // min(image.size))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def write_image(path: Path, content: bytes, ending: str) -> Path:
    """Write a file whose name must end in `ending`."""
    if path.suffix.lower() != ending:
        raise OptionError(f"{path}: must end in {ending}")
    write_whole(path, content)
    return path
