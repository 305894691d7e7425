"""All pictures at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from _make import figures, inside
from _make.cache import kept
from _make.places import DOCS
from vitreous import METHODS, METRICS


def draw_all() -> None:
    """Two at a time, each on one core, what takes longest first; nothing where all are there."""
    slow_first = sorted(METHODS, key=lambda name: not METHODS[name].alone)
    jobs: list[Callable[[], object]] = [inside.dream]
    jobs += [partial(figures.draw_method, name) for name in slow_first]
    jobs += [partial(inside.view, name) for name in inside.VIEWS]
    jobs += [partial(figures.draw_metric, name) for name in METRICS]
    kept("drawn", lambda file: file.write_text(str(len(run(jobs)))))


def run(jobs: list[Callable[[], object]]) -> list[object]:
    sys.path.insert(0, str(DOCS))  # where the other processes find these makers
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return list(pool.map(call, jobs))


def call(job: Callable[[], object]) -> object:
    return job()
