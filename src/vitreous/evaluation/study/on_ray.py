"""The engine for Ray, on one machine or a cluster: actors compute shards, this process writes what they send.

Ray starts, places, restarts and feeds the actors; a shard whose actor died is computed again by another.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from vitreous._support.optional import needs
from vitreous.errors import InputError, ModelError, VitreousError, one_line
from vitreous.evaluation.study.local import Tick, ignore
from vitreous.evaluation.study.plan import Recipe, Shard
from vitreous.evaluation.study.shard import encode, run_shard
from vitreous.evaluation.study.store import Store
from vitreous.images.readers import Reader, in_threads
from vitreous.models.model import Model

AHEAD = 2  # shards that each actor has: it reads one while it computes the other
RETRIES = 3  # times that a shard is computed again when its actor dies


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

    def run(self, shard: Shard) -> bytes:
        """The rows of a shard, encoded as the file to store."""
        with self._lock:
            model = self.model(shard.model)
        samples = {shard.first + i: sample for i, sample in enumerate(shard.samples)}
        reader = Reader(samples, model.preprocess, shard.shown, masked=self.recipe.kind.masked, hashed=True)
        loaded = in_threads(reader, shard.groups(self.recipe.batch), self.threads)
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
            max_task_retries=RETRIES,
            max_concurrency=AHEAD,
        )
        actors = [make.remote(recipe, store.manifest["id"], os.getcwd()) for _ in range(count)]
        for shard, content in results(ray, actors, shards):
            store.write_bytes(shard.number, content)
            tick(len(shard))


def results(ray: Any, actors: list[Any], shards: Sequence[Shard]) -> Iterator[tuple[Shard, bytes]]:
    """The rows of every shard as they become ready; each actor has its next shard queued."""
    rest = iter(shards)
    pending: dict[Any, tuple[Any, Shard]] = {}

    def give(actor: Any) -> None:
        shard = next(rest, None)
        if shard is not None:
            pending[actor.run.remote(shard)] = actor, shard

    for _ in range(AHEAD):
        for actor in actors:
            give(actor)
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1)
        actor, shard = pending.pop(ready[0])
        give(actor)
        yield shard, received(ray, ready[0], shard)


def received(ray: Any, reference: Any, shard: Shard) -> bytes:
    """What an actor sent; its errors are raised here as our own."""
    try:
        content: bytes = ray.get(reference)
        return content
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VitreousError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ModelError(
            f"the Ray worker of shard {shard.number} died again and again ({one_line(error, 120)}); what is finished "
            "is stored, and the same command goes on: try fewer workers or a smaller --batch"
        ) from None


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
            ray.init(num_cpus=max(2, os.cpu_count() or 1), **quiet)
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        where = "could not be started here" if address is None else f"at {address} does not answer"
        raise InputError(f"Ray {where} ({one_line(error, 160)})") from None
    try:
        yield
    finally:
        ray.shutdown()
