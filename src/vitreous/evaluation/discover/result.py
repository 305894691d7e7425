"""What was found: latents, where they are seen, and what classes lose without them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitreous._support.statistics import pearson
from vitreous.evaluation.discover.fit import Quality, Stability
from vitreous.evaluation.discover.rank import Effect, Spread
from vitreous.evaluation.discover.search import Search
from vitreous.images.dataset import Data
from vitreous.models.model import Model
from vitreous.trace.latents import Latents

CONTEXT = 3  # patches across, of a crop

Place = tuple[int, int, float]  # the number of an image, its patch where a latent is largest, and how large


@dataclass(frozen=True, eq=False)
class Found:
    """Latents, how good and how stable they are, where they are seen, and what classes lose without them."""

    latents: Latents
    model: Model
    data: Data
    quality: Quality
    stability: Stability | None
    top: list[list[Place]]  # of each latent
    seen: dict[str, Tensor]  # of each image: mean, most, where, share [N K]; class, best [N]
    effects: list[Effect]
    grid: tuple[int, ...]
    failed: dict[str, str]  # images that could not be read
    notes: list[str]
    search: Search = field(repr=False)

    @property
    def explained(self) -> Spread:
        return Spread.of(self.quality.explained, self.search.seed)

    @property
    def agreement(self) -> float:
        """Pearson's r of the predicted and the true effects, over classes and their latents."""
        if len(self.effects) < 3:
            return float("nan")
        values = np.array([[one.predicted, one.logit.mean] for one in self.effects]).T
        return float(pearson(values[0], values[1]))

    def stable(self, latent: int) -> bool | None:
        return None if self.stability is None else bool(self.stability.stable[latent])

    def best(self, latent: int) -> Effect | None:
        """The class that loses most without a latent, among those it was tried for."""
        own = [one for one in self.effects if one.latent == latent]
        return max(own, key=lambda one: one.logit.mean, default=None)

    @property
    def order(self) -> list[int]:
        """The latents, those with the largest effect on a class first, then by how many images have them."""
        has = (self.seen["most"] > 0).float().mean(0)
        effect = {j: one.logit.mean for j in range(len(self.latents)) if (one := self.best(j)) is not None}
        return sorted(range(len(self.latents)), key=lambda j: (j not in effect, -effect.get(j, 0), -float(has[j])))

    def photo(self, number: int) -> Image.Image:
        """What the model sees of an image."""
        return self.model.preprocess.view(self.data.samples[number].open(self.model.channels).image)

    def crop(self, number: int, patch: int, context: int = CONTEXT) -> Image.Image:
        """A patch with what is around it, as a square of `context` patches."""
        photo, (rows, columns) = self.photo(number), self.grid[-2:]
        y, x = divmod(patch % (rows * columns), columns)
        box = self.model.layout.box(self.model.size) or (0.0, 0.0, 1.0, 1.0)
        high, wide = (box[2] - box[0]) * photo.height / rows, (box[3] - box[1]) * photo.width / columns
        middle = box[1] * photo.width + (x + 0.5) * wide, box[0] * photo.height + (y + 0.5) * high
        half = context / 2 * max(high, wide)
        left = min(max(middle[0] - half, 0), max(0, photo.width - 2 * half))
        top = min(max(middle[1] - half, 0), max(0, photo.height - 2 * half))
        return photo.crop((round(left), round(top), round(left + 2 * half), round(top + 2 * half)))

    def maps(self, wanted: dict[int, list[int]]) -> dict[tuple[int, int], Float[np.ndarray, "h w"]]:
        """The latents' own activations in the patches of images, by image and latent."""
        return self.search.maps(self.latents, wanted)


def told_effect(effect: Effect) -> dict[str, Any]:
    """An effect as one flat row."""
    row: dict[str, Any] = {}
    for name, value in asdict(effect).items():
        ends = {"mean": None, "low": None, "high": None} if value is None else value
        row |= {f"{name}_{end}": ends[end] for end in ends} if isinstance(ends, dict) else {name: value}
    return row
