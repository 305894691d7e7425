"""Metrics in Prometheus format: requests where they arrive, jobs and stores where the models are.

Labels are route templates, methods, statuses, outcomes and numbers of workers: never ids, names of images or tokens.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from vitreous.web.logs import event
from vitreous.web.notes import Note

TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = {"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 600)


class Metrics:
    """What the process knows that visitors talk to."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of: dict[str, Any] = {"registry": self.registry}
        labels = ("method", "route", "status")
        self.requests = Counter("vitreous_requests", "Requests that were answered.", labels, **of)
        self.seconds = Histogram("vitreous_request_seconds", "Seconds.", ("route",), buckets=BUCKETS, **of)
        self.rejected = Counter("vitreous_rejected", "Requests refused before a route saw them.", ("reason",), **of)
        self.open = Gauge("vitreous_requests_open", "Requests that are being answered.", **of)

    def answered(self, method: str, route: str, status: int, seconds: float, note: Note) -> None:
        method = method if method in METHODS else "other"
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        if note.rejected is not None:
            self.rejected.labels(note.rejected).inc()
        event(
            "request",
            request=note.request,
            method=method,
            route=route,
            status=status,
            ms=round(1000 * seconds, 1),
            token=note.token,
            worker=note.worker,
        )

    def text(self, *more: bytes) -> bytes:
        """All metrics, with those that other processes wrote."""
        return generate_latest(joined([generate_latest(self.registry), *more]))


class Outcomes:
    """Counts the jobs that have ended, and logs each."""

    def __init__(self) -> None:
        self.counts: Counts[str] = Counts({"done": 0, "cancelled": 0, "failed": 0})

    def ended(self, outcome: str, job: str, began: float | None) -> None:
        self.counts[outcome] += 1
        ms = None if began is None else round(1000 * (time.monotonic() - began), 1)
        event("job", job=job, outcome=outcome, ms=ms)


class Made(CollectorRegistry):
    """Families that are made when they are asked for."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self.families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self.families


def joined(parts: Iterable[bytes]) -> Made:
    """Several expositions as one: families of the same name become one."""
    families: dict[str, Metric] = {}
    for part in parts:
        for found in text_string_to_metric_families(part.decode()):
            if found.name.endswith("_created"):  # when a series began, which nobody asks for
                continue
            known = families.setdefault(found.name, found)
            if known is not found:
                known.samples += found.samples
    return Made(families.values())


def gauge(name: str, said: str, worker: int | str, values: dict[str, float], label: str = "") -> Metric:
    """One gauge of a worker, or one for each value of a label."""
    made = GaugeMetricFamily(name, said, labels=["worker", *([label] if label else [])])
    for key, value in values.items():
        made.add_metric([str(worker), *([key] if label else [])], value)
    return made


def counter(name: str, said: str, worker: int | str, values: dict[str, float], label: str = "") -> Metric:
    made = CounterMetricFamily(name, said, labels=["worker", *([label] if label else [])])
    for key, value in values.items():
        made.add_metric([str(worker), *([key] if label else [])], value)
    return made


def resident() -> float:
    """Bytes of memory that this process has."""
    return float(psutil.Process().memory_info().rss)
