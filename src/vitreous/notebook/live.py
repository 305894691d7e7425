"""A model in this process that answers a view, with the images that it was given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np

from vitreous.attribution import Attribution
from vitreous.images import pictures
from vitreous.images.bands import Bands
from vitreous.images.pictures import Picture
from vitreous.models.model import Model
from vitreous.trace.views import Views
from vitreous.web.engine import Engine, Served, Source
from vitreous.web.limits import Limits

LONG = 24 * 3600.0  # seconds: nobody else waits for this model
LIMITS = Limits(seconds=LONG, job_seconds=LONG, patience=LONG)  # a kernel that runs a cell hears of nothing meanwhile
Given = Mapping[str, Mapping[int, Picture]]  # by their ids, then by the number of channels


class Live(Engine):
    """Models, and images that stay; they stand where the page has its samples."""

    def __init__(self, models: Sequence[Model], given: Given) -> None:
        super().__init__([(model, Source(model.spec)) for model in models], LIMITS)
        self.brought = given
        if given:
            self.samples = {number: Path(first(each).name) for number, each in given.items()}

    def first(self, served: Served) -> str:
        fitting = [number for number, each in self.brought.items() if served.model.channels in each]
        return fitting[0] if fitting else super().first(served)

    def picture(self, image: str, served: Served | None = None) -> Picture:
        found = self.brought.get(image, {}).get(3 if served is None else served.model.channels)
        return found if found is not None else super().picture(image, served)

    def _held(self, image: str) -> Picture | None:
        return first(self.brought[image]) if image in self.brought else super()._held(image)

    def maps_of(self, address: str) -> list[Attribution]:
        """The maps that were computed for the model and the image of an address, on that image."""
        told = parse_qs(address.lstrip("#"))
        served = self.find(told.get("model", [None])[0])
        image = told.get("image", [next(iter(self.samples))])[0]
        found = [kept.attribution for kept in self.maps.values() if (kept.model, kept.image) == (served.name, image)]
        views = Views([self.picture(image, served)], served.model.preprocess) if found else None
        return [replace(one, views=views) for one in found]


def given(images: Sequence[object], models: Sequence[Model]) -> dict[str, dict[int, Picture]]:
    """Images as the models take them, under ids that are the same for the same images."""
    found: dict[str, dict[int, Picture]] = {}
    for number, image in enumerate(images):
        read = {count: pictures.read(image, number, count) for count in dict.fromkeys(one.channels for one in models)}
        found[identity(first(read))] = read
    return found


def first(each: Mapping[int, Picture]) -> Picture:
    return next(iter(each.values()))


def identity(picture: Picture) -> str:
    values = picture.image.array if isinstance(picture.image, Bands) else np.asarray(picture.image)
    return hashlib.sha256(f"{values.shape} {values.dtype}".encode() + values.tobytes()).hexdigest()[:32]
