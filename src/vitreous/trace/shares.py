"""Divide the images of a batch on a CPU among threads, each with a copy of the network (models/twin.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

from vitreous._support.threads import at_once, threads_for
from vitreous.models.model import Model
from vitreous.models.twin import has_twin, twin_of

T = TypeVar("T")


def in_shares(run: Callable[[slice, Model], T], model: Model, part: slice, work: Hashable) -> list[T]:
    """The results of `run` for the images of a slice, divided if that is faster.

    `work`: what is done to the images. The first time it is not divided, because then it is found out how to do it.
    """
    threads = 1 if model.device.type != "cpu" else threads_for(part.stop - part.start)
    if threads == 1 or model.facts.first(("done once", work)) or not has_twin(model):
        return [run(part, model)]
    models = [model, *(twin_of(model) for _ in range(threads - 1))]
    ends = [part.start + (part.stop - part.start) * i // threads for i in range(threads + 1)]
    return at_once([partial(run, slice(*ends[i : i + 2]), own) for i, own in enumerate(models)])
