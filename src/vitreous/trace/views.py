"""The part of each image that a model saw, and where the images come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous.images import pictures
from vitreous.images.preprocess import Preprocess
from vitreous.images.sources import stamp_of, told_of
from vitreous.models.model import Model


@dataclass(frozen=True, eq=False)
class Views:
    """The part of each image that the model saw, rendered on access."""

    sources: Sequence[Any] | Tensor
    seen_by: Preprocess | Model  # a model: its preprocessing, made when first needed
    numbers: Sequence[int] = ()  # of the images among those that were given, for names such as "image 3"
    stamps: Sequence[str | None] = ()  # of the files when they were read

    @classmethod
    def of(cls, images: Any, model: Model, start: int = 0) -> Views:
        sources = images if isinstance(images, Tensor) else pictures.as_list(images, model.channels)
        stamps = () if isinstance(images, Tensor) else tuple(map(stamp_of, sources))
        return cls(sources, model, range(start, start + len(sources)), stamps)

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
        return Path(path).name if path else f"image {self.numbers[index] if self.numbers else index}"

    def told(self, index: int) -> dict[str, Any]:
        """The name of an image, where it comes from and a hash of its content."""
        stamp = self.stamps[index] if self.stamps else stamp_of(self.sources[index])
        return {"name": self.name(index), **told_of(self.sources[index], stamp)}

    def part(self, index: slice) -> Views:
        """The views of some of the images."""
        numbers = self.numbers or range(len(self))
        return Views(self.sources[index], self.seen_by, numbers[index], self.stamps[index])

    @classmethod
    def join(cls, parts: Sequence[Views]) -> Views:
        """The views of several batches."""
        sources = [source for part in parts for source in part.sources]
        numbers = [number for part in parts for number in part.numbers or range(len(part))]
        return cls(sources, parts[0].seen_by, numbers, [stamp for part in parts for stamp in part.stamps])


# ------------------------------------------------------- maps of images of different sizes: NaN beyond the smaller


def together(maps: Sequence[Tensor]) -> Tensor:
    """Maps [b … h w] of several batches as one tensor."""
    high, wide = (max(one.shape[axis] for one in maps) for axis in (-2, -1))
    more = [(0, wide - one.shape[-1], 0, high - one.shape[-2]) for one in maps]
    return torch.cat([F.pad(one, beyond, value=torch.nan) if any(beyond) else one for one, beyond in zip(maps, more)])


def differ(maps: Tensor) -> bool:
    """Whether these are maps of different sizes (no map itself ends in NaN)."""
    return bool(maps[..., -1, -1].isnan().any())


def own_part(maps: Tensor) -> Tensor:
    """The same without rows and columns that lie beyond all of them."""
    if not differ(maps):
        return maps
    inside = ~maps.isnan().flatten(0, -3).all(0)  # [h w]
    return maps[..., : int(inside.any(1).sum()), : int(inside.any(0).sum())]
