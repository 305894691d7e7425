"""The engine for Ray, on one machine or a cluster: actors compute shards, this process writes what they send.

Ray starts, places and restarts the actors; a shard whose actor died, alone or with its node, is computed by another.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from vitreous._support.optional import needs
from vitreous.errors import InputError, ModelError, VitreousError, one_line
from vitreous.evaluation.study.local import Tick, ignore
from vitreous.evaluation.study.plan import Recipe, Shard
from vitreous.evaluation.study.shard import encode, run_shard
from vitreous.evaluation.study.store import Store
from vitreous.images.readers import Reader, in_threads, lost, still_there, vanished
from vitreous.models.model import Model

AHEAD = 2  # shards that each actor has: it reads one while it computes the other
RETRIES = 3  # times that a shard is computed again when its actor dies
PATIENCE = 600  # seconds to wait for a worker when none is left
CHANGED = ("changed", "changed")  # instead of stamps, and like none
RESUME = "what is finished is stored, and the same command resumes it"


class Worker:
    """A Ray actor that computes shards, one model at a time."""

    def __init__(self, recipe: Recipe, study: str, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)  # names of files may be relative to where the study was begun
        self.recipe, self.study = recipe, study
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.threads = max(1, torch.get_num_threads())
        self._model: tuple[int, Model] | None = None
        self._lock = threading.Lock()

    def model(self, number: int) -> Model:
        if self._model is None or self._model[0] != number:
            self._model = None  # before the next is loaded
            self._model = number, self.recipe.sources[number].load(self.device).to(self.device)
        return self._model[1]

    def here(self) -> None:
        """Answers when the actor runs."""

    def run(self, shard: Shard) -> bytes:
        """The rows of a shard, encoded as the file to store."""
        with self._lock:
            model = self.model(shard.model)
        samples = {shard.first + i: sample for i, sample in enumerate(shard.samples)}
        reader = Reader(samples, model.preprocess, shard.shown, masked=self.recipe.kind.masked, hashed=True)
        loaded = still_there(in_threads(reader, shard.groups(self.recipe.batch), self.threads))
        with self._lock:  # images of the next shard are read meanwhile
            table = run_shard(self.recipe, model, shard, loaded)
        return encode(table, {"study": self.study, "shard": shard.number})


def run_ray(
    recipe: Recipe,
    shards: Sequence[Shard],
    store: Store,
    *,
    address: str | None = None,
    workers: int | None = None,
    gpus: float = 0.0,
    tick: Tick = ignore,
) -> None:
    """Compute shards on actors and store them as they arrive."""
    ray = needs("ray", "ray")
    with connected(ray, address):
        count = min(workers or usual_actors(ray, gpus), len(shards))
        make = ray.remote(Worker).options(
            num_cpus=cores_each(ray, count),
            num_gpus=gpus,
            max_restarts=-1,
            max_concurrency=AHEAD,
        )
        actors = [make.remote(recipe, store.manifest["id"], os.getcwd()) for _ in range(count)]
        for shard, content in results(ray, actors, shards):
            store.write_bytes(shard.number, content)
            tick(len(shard))


def results(ray: Any, actors: Sequence[Any], shards: Sequence[Shard]) -> Iterator[tuple[Shard, bytes]]:
    """The rows of every shard as they become ready; each actor has its next shard queued."""
    crew = Crew(ray, actors, shards)
    while crew.rest or crew.pending:
        crew.feed()
        done = crew.next()
        if done is not None:
            crew.feed()  # while the rows are written
            yield done


class Crew:
    """The actors and their shards.

    What an actor had when it died goes to the others at once, as its node may be gone and with it the room to restart.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], shards: Sequence[Shard]) -> None:
        self.ray, self.actors, self.rest = ray, actors, deque(shards)
        self.here = set(range(len(actors)))
        self.away: dict[Any, int] = {}  # by the reference that is ready when the actor is back
        self.pending: dict[Any, tuple[int, Shard]] = {}
        self.deaths: Counter[int] = Counter()  # by shard
        self.changed: dict[int, frozenset[int]] = {}  # places of images that have changed, by shard

    def feed(self) -> None:
        """Give every actor that is here the shards that it may have."""
        has = Counter(actor for actor, _ in self.pending.values())
        for most in range(1, AHEAD + 1):
            for actor in sorted(self.here):
                if self.rest and has[actor] < most:
                    shard = self.rest.popleft()
                    sent = marked(shard, self.changed.get(shard.number, frozenset()))
                    self.pending[self.actors[actor].run.remote(sent)] = actor, shard
                    has[actor] += 1

    def next(self) -> tuple[Shard, bytes] | None:
        """Wait for something: a finished shard, or an actor that died or came back."""
        ready, _ = self.ray.wait([*self.pending, *self.away], timeout=None if self.here else PATIENCE)
        if not ready:
            raise ModelError(f"every Ray worker died and none came back within {PATIENCE // 60} minutes; {RESUME}")
        if ready[0] in self.away:
            self.welcome(ready[0], self.away.pop(ready[0]))
            return None
        actor, shard = self.pending.pop(ready[0])
        try:
            content = received(self.ray, ready[0])
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
            self.miss(actor, shard, error)  # the rows, too, are lost with the node that made them
            return None
        return (shard, content) if self.unchanged(shard) else None

    def unchanged(self, shard: Shard) -> bool:
        """Are these rows of the planned images? If not they are asked for again, with a reason for the changed ones."""
        found = changes(shard)
        if found <= self.changed.get(shard.number, frozenset()):
            return True
        self.changed[shard.number] = found
        self.rest.appendleft(shard)
        return False

    def miss(self, actor: int, shard: Shard, error: Exception) -> None:
        """An actor died over a shard: another gets it, and this one is waited for."""
        self.deaths[shard.number] += 1
        if self.deaths[shard.number] > RETRIES:
            raise ModelError(
                f"the Ray worker of shard {shard.number} died again and again ({one_line(error, 120)}); {RESUME}: "
                "try fewer workers or a smaller --batch"
            )
        self.rest.appendleft(shard)
        if actor in self.here:
            self.here.remove(actor)
            self.away[self.actors[actor].here.options(max_task_retries=-1).remote()] = actor

    def welcome(self, reference: Any, actor: int) -> None:
        """An actor is back, or Ray has given it up."""
        try:
            self.ray.get(reference)
            self.here.add(actor)
        except self.ray.exceptions.RayActorError as error:
            if not self.here and not self.away:
                raise ModelError(f"every Ray worker died ({one_line(error, 120)}); {RESUME}") from None


def changes(shard: Shard) -> frozenset[int]:
    """The places of images that have changed since the study was planned.

    This is seen here, not by the workers: their machines may have copies of the images, written at other times.
    """
    found = []
    for place, sample in enumerate(shard.samples):
        if sample.seen is not None and sample.stamps != sample.seen:
            found.append(place)
            if gone := vanished(sample):
                raise lost(gone)
    return frozenset(found)


def marked(shard: Shard, changed: frozenset[int]) -> Shard:
    """A shard as it is sent: only of the changed images it is known how they were."""
    stamps = (CHANGED if place in changed else None for place in range(len(shard)))
    return replace(shard, samples=tuple(replace(sample, seen=seen) for sample, seen in zip(shard.samples, stamps)))


def received(ray: Any, reference: Any) -> bytes:
    """What an actor sent; its errors are raised here as our own."""
    try:
        content: bytes = ray.get(reference)
        return content
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VitreousError):
            raise error.cause from None
        raise


def usual_actors(ray: Any, gpus: float) -> int:
    """As many as the cluster has room for."""
    there = ray.cluster_resources()
    return max(1, int(there.get("GPU", 0) / gpus) if gpus else int(there.get("CPU", 1)))


def cores_each(ray: Any, actors: int) -> int:
    """An equal share of the cluster's cores."""
    return max(1, min(16, int(ray.cluster_resources().get("CPU", 1)) // actors))


@contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a running Ray, or start one here and stop it afterwards."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    try:
        if address is None:
            ray.init("local", num_cpus=max(2, os.cpu_count() or 1), **quiet)  # not one that another program left
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        where = "could not be started here" if address is None else f"at {address} does not answer"
        raise InputError(f"Ray {where} ({one_line(error, 160)})") from None
    try:
        yield
    finally:
        ray.shutdown()
