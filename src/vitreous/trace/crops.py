"""Where the pixels of the images that a user gave are in what the model sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from vitreous.errors import TargetError
from vitreous.images import pictures
from vitreous.images.masks import is_ready
from vitreous.models.model import Model
from vitreous.trace.area import Sides


class Crop(NamedTuple):
    """One image."""

    size: tuple[int, int]  # width, height
    seen: Sides | None  # what the model sees, in pixels of the image; None: no upright rectangle


@dataclass(frozen=True, eq=False)
class Crops:
    """The crop of each image, found when first needed."""

    model: Model
    images: Any  # as they were given
    numbers: Sequence[int] | None = None  # of the images among these; None: all of them
    prepared: bool = False  # by a reader of data sets, so that their own pixels are not known

    def of(self, index: int) -> Crops:
        """The crops of one of the images."""
        number = index if self.numbers is None else self.numbers[index]
        return Crops(self.model, self.images, [number], self.prepared)

    @cached_property
    def _listed(self) -> Any:
        given = self.images
        if isinstance(given, Tensor) and not is_ready(given):
            given = given.cpu().numpy()
        if isinstance(given, Tensor):
            return [given] if given.ndim == 3 else given
        return pictures.as_list(given, self.model.channels)

    def __getitem__(self, index: int) -> Crop:
        if self.prepared:
            raise TargetError(
                "the images of a data set are read at the model's size, where pixels of their own are not known; "
                "give CLASS@predicted, a class or top-1, or explain the images one by one: vitreous.explain"
            )
        number = index if self.numbers is None else self.numbers[index]
        image = self._listed[number]
        if is_ready(image):
            wide, high = image.shape[-1], image.shape[-2]
            return Crop((wide, high), (0.0, 0.0, float(wide), float(high)))
        size = pictures.read(image, number, self.model.channels).image.size
        return Crop(size, self.model.preprocess.located(size))
