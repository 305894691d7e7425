"""The metrics of an engine: jobs, queues, stores, memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from vitreous.web.engine import Engine
from vitreous.web.metrics import Made, counter, gauge, resident
from vitreous.web.store import Store


def engine_metrics(engine: Engine, worker: int = 0) -> bytes:
    return generate_latest(Made(families(engine, worker)))


def families(engine: Engine, worker: int) -> Iterable[Metric]:
    unfinished = [job for job in engine.jobs.known.values() if not job.ended]
    running = sum(job.began is not None for job in unfinished)
    states = {"queued": float(len(unfinished) - running), "running": float(running)}
    yield gauge("vitreous_jobs", "Jobs that have not ended.", worker, states, "state")
    counts = {outcome: float(count) for outcome, count in engine.jobs.outcomes.counts.items()}
    yield counter("vitreous_jobs_ended", "Jobs that have ended.", worker, counts, "outcome")
    served = list(engine.models.values())
    waiting = {
        "jobs": float(sum(len(one.jobs.waiting) for one in served)),
        "questions": float(sum(len(one.quick.waiting) for one in served)),
    }
    yield gauge("vitreous_waiting", "What waits for a model.", worker, waiting, "queue")
    stores: dict[str, Store[Any, Any]] = {
        "traces": engine.traces,
        "images": engine.images,
        "maps": engine.maps,
        "features": engine.features,
    }
    held = {name: float(store.used) for name, store in stores.items()}
    yield gauge("vitreous_stored_bytes", "Bytes that a store holds.", worker, held, "store")
    yield gauge("vitreous_models", "Models that are loaded.", worker, {"": float(len(engine.models))})
    yield gauge("vitreous_resident_bytes", "Resident memory of a process.", worker, {"": resident()})
