"""What takes the place of an ablated value: zero, its mean over a data set, or the value of another image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.errors import InputError, Unsupported
from vitreous.inspect.ablate.places import Places
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace

BY = ("zero", "mean", "resample")


@dataclass(frozen=True, eq=False)
class Source:
    """The replacement of each layer's values, [B parts …] or [1 parts …]; none: zero."""

    layers: Sequence[Tensor] | None = None

    def of(self, layer: int, like: Tensor) -> Tensor:
        """Of the values of a layer, in their shape and type."""
        if self.layers is None:
            return torch.zeros_like(like)
        found = self.layers[layer].to(like)
        if found.shape[1:] != like.shape[1:]:
            said = f"values of shape {list(found.shape[1:])} cannot replace those of shape {list(like.shape[1:])}"
            raise Unsupported(f"{said}: the images have different numbers of tokens. Use --by zero.")
        return found.expand(like.shape)


def values_of(places: Places, trace: Trace) -> list[Tensor]:
    """The values of every layer for the images of a trace."""
    taken: dict[int, Tensor] = {}

    def keep(layer: int, values: Tensor) -> None:
        taken[layer] = values.detach().clone()

    trace.run(trace.images, places.edited(Run.to_output().unseen(), keep, len(trace)))
    return [taken.get(layer, trace.images.new_zeros(1, 0)) for layer in range(len(places.parts))]


def mean_values(places: Places, traces: Iterable[Trace]) -> list[Tensor]:
    """The mean over all images, at each position, [1 parts …]."""
    sums: list[Tensor] | None = None
    count = 0
    for trace in traces:
        found = [values.sum(0, dtype=torch.float64) for values in map(widen, values_of(places, trace))]
        if sums is not None and [one.shape for one in sums] != [one.shape for one in found]:
            said = "the images have different numbers of tokens, so that there is no mean at a position"
            raise Unsupported(f"{said}. Use --by zero.")
        sums = found if sums is None else [one + other for one, other in zip(sums, found)]
        count += len(trace)
    if sums is None:
        raise InputError("there is no image to take the mean of")
    return [(one / count)[None] for one in sums]


def partner(number: int, count: int, seed: int) -> int:
    """The image whose values replace those of another: a random cycle through all, so that none is its own partner."""
    order = np.random.default_rng([seed, count]).permutation(count)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    return int(order[(place[number] + 1) % count])


def readable(number: int, count: int, seed: int, read: Callable[[int], Tensor]) -> tuple[int, Tensor]:
    """The number and pixels of the partner of an image; of its own partner where it cannot be read."""
    other = number
    for _ in range(count - 1):
        other = partner(other, count, seed)
        try:
            return other, read(other)
        except InputError:
            continue
    raise InputError("resample needs a second image that can be read; use --by zero or --by mean")
