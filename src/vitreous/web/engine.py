"""The models, their stored traces and maps, and the threads that use them.

Each model has three threads: one for jobs, one for brief jobs (maps of one or two runs), one for short questions. A job
lets brief jobs and questions pass at every step. What a trace already holds (a hover over attention) is answered by
none of them: it needs the model no more.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from torch import Tensor

from vitreous._support.memory import budget
from vitreous.images import pictures
from vitreous.images.bands import Bands
from vitreous.images.bands import count as spelt
from vitreous.images.pictures import Picture
from vitreous.images.videos import Video
from vitreous.models.model import Model
from vitreous.models.speaker import heard
from vitreous.trace.latents import Latents
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views
from vitreous.web.clips import Clips, usable
from vitreous.web.footprint import footprint
from vitreous.web.held import Held as Held
from vitreous.web.held import HeldMask as HeldMask
from vitreous.web.held import Kept as Kept
from vitreous.web.held import Room
from vitreous.web.ids import stamped
from vitreous.web.jobs import Job, Jobs
from vitreous.web.limits import Limits
from vitreous.web.problems import Problem
from vitreous.web.store import Store
from vitreous.web.trim import Trim, few_arenas
from vitreous.web.uploads import gone, weight
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


@dataclass(frozen=True)
class Allowed:
    """A model that visitors may add; `load` does it."""

    name: str
    source: Source
    load: Callable[[], Model]


@dataclass(frozen=True, eq=False)
class Served:
    """A model, how it was loaded, and its threads."""

    name: str
    model: Model
    source: Source
    jobs: Lane
    quick: Lane
    brief: Lane

    @property
    def lanes(self) -> tuple[Lane, Lane, Lane]:
        return self.jobs, self.quick, self.brief


class Engine:
    def __init__(
        self,
        models: Sequence[tuple[Model, Source]],
        limits: Limits | None = None,
        latents: Sequence[Latents] = (),
        allowed: Sequence[Allowed] = (),
    ) -> None:
        few_arenas()
        self.limits, self.latents = limits or Limits(), tuple(latents)
        self.models: dict[str, Served] = {}  # replaced when one is added, never changed
        for model, source in models:
            self._add(usable(heard(model)), source)
        self.allowed = {one.name: one for one in allowed}
        self.loading = Lane("loading of models", self.limits.queue, FULL)
        self._context = contextvars.copy_context()  # of threads that begin later: the memory limit, say
        self.trim = Trim(lambda: self.lanes)
        whole, most = budget(next(iter(self.models.values())).model.device), self.limits.traces_bytes
        self.traces: Store[tuple[str, str], Trace] = Store(whole // 4 if most is None else most)
        decoded = max(3 * self.limits.pixels, min(self.limits.images_bytes, whole // 8))
        self.images: Store[str, Picture] = Store(decoded)
        self.hashes: Store[str, str] = Store(10_000)  # the SHA-256 of the files that were sent
        self.maps: Store[str, Kept] = Store(self.limits.maps_bytes)
        self.features: Store[tuple[str, str, int], Tensor] = Store(whole // 16)  # of a model, an image, a layer
        self.bands: Store[Any, Any] = Store(64)
        self.concepts: Store[str, Held] = Store(self.limits.concepts)
        self.tried: dict[tuple[str, str], bool] = {}  # whether a model supports a method, where it was tried
        self.masks: Store[str, HeldMask] = Store(self.limits.masks_bytes)
        self.answers: Store[str, Served] = Store(self.limits.answers)  # a model with a question and its answer
        self.jobs = Jobs(self.limits)
        self.samples = {f"sample:{path.stem}": path for path in sorted((ASSETS / "photos").glob("*.jpg"))}
        self.clips = Clips(self.samples, decoded)
        found = sorted((ASSETS / "concepts").glob("*/*.jpg"))
        self.examples = {f"sample:{path.parent.name}-{path.stem}": path for path in found}  # of concepts
        self.packaged = {**self.samples, **self.examples}
        self._readers, self._decoders, self._drawers = Room(READERS), Room(DECODERS), Room(1)
        self.arriving = asyncio.Semaphore(UPLOADS)

    def _add(self, model: Model, source: Source) -> None:
        name, number = model.name, 2
        while name in self.models:
            name, number = f"{model.name}-{number}", number + 1
        self.models = {**self.models, name: self._served(name, model, source)}

    def served(self, name: str, model: Model, source: Source) -> Served:
        """A model with its threads; those of one that is added later begin as the first ones did."""
        return self._context.copy().run(self._served, name, model, source)

    def _served(self, name: str, model: Model, source: Source) -> Served:
        jobs, brief = (Lane(f"{kind} of {name}", self.limits.queue, FULL) for kind in ("jobs", "brief jobs"))
        return Served(name, model, source, jobs, Lane(f"questions to {name}", self.limits.quick, FULL), brief)

    @property
    def lanes(self) -> list[Lane]:
        return [self.loading, *(lane for served in self.models.values() for lane in served.lanes)]

    def warm(self) -> None:
        """Run every model once, so that the first visitor does not wait for its layout run."""
        for served in self.models.values():
            _ = self.trace(served, self.first(served)).classifies

    def close(self) -> None:
        self.jobs.stop_all()
        self.trim.close()
        for lane in self.lanes:
            lane.close()

    def ended(self, seconds: float) -> bool:
        """Whether all threads have ended after `close`, waiting at most this long."""
        until = time.monotonic() + seconds
        threads = [lane.thread for lane in self.lanes]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # -------------------------------------------------------------------------------------------------- what there is

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.models.values()))
        answered = self.answers.get(name)
        if answered is not None:
            return answered
        if name.partition("?")[0] in self.models and "?" in name:
            raise Problem(404, "this answer is not here (any more); ask the question again")
        if name not in self.models:
            raise Problem(404, f"there is no model {name[:60]!r} here; it has {', '.join(self.models)}")
        return self.models[name]

    @property
    def channels(self) -> list[int]:
        """How many channels the images of its models have."""
        return list(dict.fromkeys(one.model.channels for one in self.models.values() if one.model.frames is None))

    @property
    def lengths(self) -> list[int]:
        """How many frames its models of videos take."""
        return list(dict.fromkeys(one.model.frames for one in self.models.values() if one.model.frames is not None))

    def first(self, served: Served) -> str:
        """An image on which a model is run when it starts: a sample, or noise if it does not take photographs."""
        if served.model.frames is not None:
            return next(iter(self.clips.samples))
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
        if found is None and served is not None and self.clips.name(image) is not None:
            raise Problem(415, f"{served.name} takes images, and {self.name_of(image)} is a clip; choose an image")
        if found is None:
            raise gone()
        return found

    def input_of(self, image: str, served: Served) -> Picture | Video:
        """What a model is given: an image, or the frames of a clip."""
        if served.model.frames is None:
            return self.picture(image, served)
        still = self.name_of(image) if image in self.packaged or self._held(image) else None
        return self.clips.get(image, served.name, served.model.frames, still).video

    def views(self, image: str, served: Served) -> Views:
        """What a model saw."""
        return Views([self.input_of(image, served)], served.model.preprocess, count=served.model.frames)

    def _held(self, image: str) -> Picture | None:
        """An upload as any of the models takes it."""
        return next((found for count in self.channels if (found := self.images.get(kept_as(image, count)))), None)

    def expect(self, image: str) -> None:
        """Raise a problem unless the image is held."""
        if image not in self.packaged and self._held(image) is None and self.clips.name(image) is None:
            raise gone()

    def name_of(self, image: str) -> str:
        """The name of an image, even if it is no longer held."""
        found = self._held(image)
        if image in self.packaged:
            return self.packaged[image].name
        return found.name if found is not None else self.clips.name(image) or "picture"

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
            given = self.input_of(image, served)
            found = Trace(served.model, [given.image if isinstance(given, Picture) else given])
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

    def start(self, client: str, served: Served, work: Callable[[Job], None], brief: bool = False) -> Job:
        """Queue a job; a `brief` one passes the others."""
        if brief:
            return self.jobs.start(client, served.brief, [served.quick], work)
        return self.jobs.start(client, served.jobs, [served.quick, served.brief], work)


def kept_as(image: str, channels: int) -> str:
    """The key of a decoded image."""
    return image if channels == 3 else f"{image}@{channels}"


def key_of(*parts: Any) -> str:
    """A key that equal requests share."""
    return stamped(hashlib.sha256(repr(parts).encode()).hexdigest()[:24])
