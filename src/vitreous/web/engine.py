"""The models, their stored traces and maps, and the threads that use them.

Each model has two threads: one for jobs, one for short questions. A job lets questions pass at every step. What a trace
already holds (a hover over attention) is answered by neither: it needs the model no more.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from anyio import CapacityLimiter
from torch import Tensor

from vitreous._support.memory import budget
from vitreous.attribution import Attribution
from vitreous.capture.attention import Attention
from vitreous.images import pictures
from vitreous.images.bands import Bands
from vitreous.images.bands import count as spelt
from vitreous.images.pictures import Picture
from vitreous.models.model import Model
from vitreous.registry import METHODS
from vitreous.trace.apply import default_methods, of_images, why_not
from vitreous.trace.concept import Concept
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.web.jobs import Job, Jobs
from vitreous.web.limits import Limits
from vitreous.web.problems import Problem
from vitreous.web.store import Store
from vitreous.web.uploads import weight
from vitreous.web.worker import Lane

T = TypeVar("T")
ASSETS = Path(__file__).parents[1] / "assets"
READERS = 4  # threads for what needs no model
DECODERS = 2  # … and for images
UPLOADS = 8  # forms in memory at a time
BLANK = "blank"  # the id of an image of noise, which is not shown
FULL = "the server has more to do than it can hold; try again in a moment"


@dataclass(frozen=True)
class Source:
    """How a model was loaded, for the command that does it again."""

    spec: str | None = None
    weights: str | None = None
    img_size: int | tuple[int, int] | None = None
    bands: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Served:
    """A model, how it was loaded, and its two threads."""

    name: str
    model: Model
    source: Source
    jobs: Lane
    quick: Lane


@dataclass(frozen=True, eq=False)
class Kept:
    """A finished map and what it explains."""

    meta: dict[str, Any]
    attribution: Attribution  # on the CPU, without its image
    provenance: dict[str, Any]
    model: str
    image: str
    target: Target | None  # fixed; None: the method does not depend on one


@dataclass(frozen=True, eq=False)
class Held:
    """A concept that someone made."""

    id: str
    concept: Concept
    model: str


class Room:
    """A limiter of threads, made when an event loop first needs it."""

    def __init__(self, size: int) -> None:
        self.size = size

    @cached_property
    def limiter(self) -> CapacityLimiter:
        return CapacityLimiter(self.size)


class Engine:
    def __init__(self, models: Sequence[tuple[Model, Source]], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.models: dict[str, Served] = {}
        for model, source in models:
            self._add(of_images(model, "the page works"), source)
        whole, most = budget(next(iter(self.models.values())).model.device), self.limits.traces_bytes
        self.traces: Store[tuple[str, str], Trace] = Store(whole // 4 if most is None else most)
        self.images: Store[str, Picture] = Store(max(3 * self.limits.pixels, min(self.limits.images_bytes, whole // 8)))
        self.maps: Store[str, Kept] = Store(self.limits.maps_bytes)
        self.features: Store[tuple[str, str, int], Tensor] = Store(whole // 16)  # of a model, an image, a layer
        self.bands: Store[Any, Any] = Store(64)
        self.concepts: Store[str, Held] = Store(self.limits.concepts)
        self.jobs = Jobs(self.limits)
        self.samples = {f"sample:{path.stem}": path for path in sorted((ASSETS / "photos").glob("*.jpg"))}
        found = sorted((ASSETS / "concepts").glob("*/*.jpg"))
        self.examples = {f"sample:{path.parent.name}-{path.stem}": path for path in found}  # of concepts
        self.packaged = {**self.samples, **self.examples}
        self._readers, self._decoders, self._drawers = Room(READERS), Room(DECODERS), Room(1)
        self.arriving = asyncio.Semaphore(UPLOADS)

    def _add(self, model: Model, source: Source) -> None:
        name, number = model.name, 2
        while name in self.models:
            name, number = f"{model.name}-{number}", number + 1
        jobs = Lane(f"jobs of {name}", self.limits.queue, FULL)
        self.models[name] = Served(name, model, source, jobs, Lane(f"questions to {name}", self.limits.quick, FULL))

    def warm(self) -> None:
        """Run every model once, so that the first visitor does not wait for its layout run."""
        for served in self.models.values():
            _ = self.trace(served, self.first(served)).classifies

    def close(self) -> None:
        self.jobs.stop_all()
        for served in self.models.values():
            served.jobs.close()
            served.quick.close()

    def ended(self, seconds: float) -> bool:
        """Whether all threads have ended after `close`, waiting at most this long."""
        until = time.monotonic() + seconds
        threads = [lane.thread for served in self.models.values() for lane in (served.jobs, served.quick)]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -------------------------------------------------------------------------------------------------- what there is

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Problem(404, f"there is no model {name[:60]!r} here; it has {', '.join(self.models)}")
        return self.models[name]

    @property
    def channels(self) -> list[int]:
        """How many channels the images of its models have."""
        return list(dict.fromkeys(served.model.channels for served in self.models.values()))

    def first(self, served: Served) -> str:
        """An image on which a model is run when it starts: a sample, or noise if it does not take photographs."""
        return next(iter(self.samples)) if served.model.channels in (1, 3) else BLANK

    def picture(self, image: str, served: Served | None = None) -> Picture:
        """An image by its id, for a model: an upload, or one of the samples, whose files were listed at start."""
        count = 3 if served is None else served.model.channels
        found = self.images.get(kept_as(image, count))
        if found is None and image == BLANK:
            return Picture(Bands(np.random.default_rng(0).integers(0, 256, (224, 224, count), np.uint8)), BLANK)
        if found is None and image in self.packaged:
            found = pictures.read(self.packaged[image], channels=count)
            self.images.put(kept_as(image, count), found, weight(found))
        if found is None and served is not None and self._held(image):
            said = f"{served.name} takes images of {spelt(count)}, which this one does not have"
            raise Problem(415, f"{said}; send another, e.g. an array as .npy")
        if found is None:
            raise gone()
        return found

    def _held(self, image: str) -> Picture | None:
        """An upload as any of the models takes it."""
        return next((found for count in self.channels if (found := self.images.get(kept_as(image, count)))), None)

    def expect(self, image: str) -> None:
        """Raise a problem unless the image is held."""
        if image not in self.packaged and self._held(image) is None:
            raise gone()

    def name_of(self, image: str) -> str:
        """The name of an image, even if it is no longer held."""
        found = self._held(image)
        return self.packaged[image].name if image in self.packaged else found.name if found is not None else "picture"

    def map(self, number: str) -> Kept:
        found = self.maps.get(number)
        if found is None:
            raise Problem(404, "this map is not here (any more); explain the image again")
        return found

    # -------------------------------------------------------------------------------------------------------- traces

    def trace(self, served: Served, image: str) -> Trace:
        """A recorded run, from the store or made now (in a thread of the model)."""
        found = self.traces.get((served.name, image))
        if found is None:
            found = Trace(served.model, [self.picture(image, served).image])
            found.whole()
            _ = found.classifies
            self.traces.put((served.name, image), found, footprint(found))
        return found

    # ------------------------------------------------------------------------------------------------- doing the work

    async def ask(self, served: Served, work: Callable[[], T]) -> T:
        """Run a short task on a model."""
        return await self.answered(served.quick.submit(work))

    async def answered(self, future: Future[T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.limits.seconds)
        except TimeoutError:
            raise self.late() from None

    async def seen(self, served: Served, image: str) -> Trace:
        """The trace of an image, from the store if it is there."""
        found = self.traces.get((served.name, image))
        return found if found is not None else await self.ask(served, lambda: self.trace(served, image))

    async def read(self, work: Callable[[], T]) -> T:
        """Run something that needs a trace but no model."""
        return await self.in_thread(work, self._readers)

    async def decode(self, work: Callable[[], T]) -> T:
        """Decode or encode images, a few at a time: a large one takes hundreds of megabytes."""
        return await self.in_thread(work, self._decoders)

    async def draw(self, work: Callable[[], T]) -> T:
        """Draw a figure, one at a time."""
        return await self.in_thread(work, self._drawers)

    async def in_thread(self, work: Callable[[], T], room: Room) -> T:
        try:
            with anyio.fail_after(self.limits.seconds):
                return await anyio.to_thread.run_sync(work, limiter=room.limiter)
        except TimeoutError:
            raise self.late() from None

    def late(self) -> Problem:
        return Problem(503, f"no answer within {self.limits.seconds:.0f} seconds; try again", retry=5)

    def start(self, client: str, served: Served, work: Callable[[Job], None]) -> Job:
        return self.jobs.start(client, served.jobs, served.quick, work)


def kept_as(image: str, channels: int) -> str:
    """The key of a decoded image."""
    return image if channels == 3 else f"{image}@{channels}"


def gone() -> Problem:
    return Problem(404, "this image is not here (any more); send it again")


def footprint(trace: Trace) -> int:
    """Bytes that a recorded run holds."""
    record = trace.whole()
    held: list[Tensor | None] = [trace.images, record.output, record.embedding]
    for layer in [*record.layers, *([record.pool] if record.pool is not None else [])]:
        held += tensors(layer)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t is not None}
    return sum(sizes.values())


def tensors(layer: Attention) -> list[Tensor | None]:
    factors = layer.factors or ()
    return [layer.node, layer.v, layer.q, layer.k, layer.bias, layer.given, layer.keys, *factors]


def key_of(*parts: Any) -> str:
    """A key that equal requests share."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def heads_of(trace: Trace) -> list[int]:
    """The number of heads of each layer; none where attention cannot be followed."""
    return [layer.shape[1] for layer in trace.attention] if trace.layout.obstacle is None else []


def unsupported(model: Model) -> dict[str, str]:
    said = {name: why_not(model.layout, model.name, declared) for name, declared in METHODS.items()}
    return {name: why for name, why in said.items() if why is not None}


def first_methods(trace: Trace) -> list[str]:
    """Attention, and the default map for a class, as far as the model supports them."""
    able = [one for one in default_methods(trace, []) if why_not(trace.layout, trace.model.name, one) is None]
    chosen = [one for one in able if not one.targeted][:1] + [one for one in able if one.targeted][:1]
    return [one.name for one in chosen]


def takes_text(model: Model) -> bool:
    return model.library.text(model.module, model.name) is not None
