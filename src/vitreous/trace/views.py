"""The part of each image that a model saw, and where the images come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitreous.images import pictures, videos
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
    count: int | None = None  # of videos: how many frames the model takes

    @classmethod
    def of(cls, images: Any, model: Model, start: int = 0) -> Views:
        if isinstance(images, Tensor):
            sources: Any = images
        else:
            sources = pictures.as_list(images, model.channels) if model.frames is None else videos.as_list(images)
        stamps = () if isinstance(images, Tensor) else tuple(map(stamp_of, sources))
        return cls(sources, model, range(start, start + len(sources)), stamps, model.frames)

    @property
    def preprocess(self) -> Preprocess:
        return self.seen_by.preprocess if isinstance(self.seen_by, Model) else self.seen_by

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Image.Image:
        source = self.sources[index]
        if self.count is not None:
            frames = self.frames(index)
            return frames[len(frames) // 2]
        if isinstance(source, Tensor) and source.is_floating_point():
            return self.coloured(source)
        return self.preprocess.view(pictures.read(source, index, self.preprocess.channels).image)

    def coloured(self, x: Tensor) -> Image.Image:
        """The image that a model's input shows."""
        return Image.fromarray((self.preprocess.colours(x) * 255).round().astype(np.uint8))

    def frames(self, index: int) -> list[Image.Image]:
        """The frames of a video that the model saw."""
        source = self.sources[index]
        if isinstance(source, Tensor) and source.is_floating_point():
            return [self.coloured(frame) for frame in source]
        assert self.count is not None
        return [self.preprocess.view(frame) for frame in videos.read(source, self.count, index).frames]

    def name(self, index: int) -> str:
        source = self.sources[index]
        if isinstance(source, pictures.Picture | videos.Video):
            return source.name
        if self.count is not None and not isinstance(source, str | Path):
            return f"video {self.numbers[index] if self.numbers else index}"
        path = source if isinstance(source, str | Path) else getattr(source, "filename", "")
        return Path(path).name if path else f"image {self.numbers[index] if self.numbers else index}"

    def told(self, index: int) -> dict[str, Any]:
        """The name of an image, where it comes from and a hash of its content."""
        stamp = self.stamps[index] if self.stamps else stamp_of(self.sources[index])
        found = {"name": self.name(index), **told_of(self.sources[index], stamp)}
        source = self.sources[index]
        return {**found, "frames": list(source.picked)} if isinstance(source, videos.Video) else found

    def part(self, index: slice) -> Views:
        """The views of some of the images."""
        numbers = self.numbers or range(len(self))
        return Views(self.sources[index], self.seen_by, numbers[index], self.stamps[index], self.count)

    @classmethod
    def join(cls, parts: Sequence[Views]) -> Views:
        """The views of several batches."""
        sources = [source for part in parts for source in part.sources]
        numbers = [number for part in parts for number in part.numbers or range(len(part))]
        stamps = [stamp for part in parts for stamp in part.stamps]
        return cls(sources, parts[0].seen_by, numbers, stamps, parts[0].count)
