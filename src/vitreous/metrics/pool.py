"""All images of an evaluation, for metrics that put several of them together."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vitreous.errors import InputError
from vitreous.models.model import Model
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images


@dataclass(frozen=True, eq=False)
class Pool:
    """The images by number, in the order in which they were given; each is read when it is needed."""

    model: Model
    count: int
    read: Callable[[int], Any]  # one image, as a model prepares it
    aim: Callable[[Trace, int], Target]  # what is explained in it; runs the model if that is its best class
    given: Callable[[int], Any] = lambda number: None  # the inputs that travel with it
    kept: dict[Hashable, Any] = field(default_factory=dict)  # what a metric made of the current batch
    _known: dict[int, str | None] = field(default_factory=dict)

    def image(self, number: int) -> Images:
        """One image [1 channels Y X], ready for the model."""
        return self.model.prepare(self.read(number))

    def target(self, number: int) -> str | None:
        """What is explained in an image, in words; None if it cannot be read."""
        if number not in self._known:
            try:
                trace = Trace(self.model, self.read(number), self.given(number))
                self._known[number] = str(self.aim(trace, number).of_image(0))
            except InputError:
                self._known[number] = None
        return self._known[number]

    def others(self, number: int, own: str, count: int, draw: random.Random) -> list[int]:
        """The first images of a random order whose targets differ from `own` and from each other; at most `count`."""
        found: list[int] = []
        taken: set[str | None] = {own, None}
        for other in shuffled(self.count, draw):
            if len(found) == count:
                break
            if other != number and self.target(other) not in taken:
                taken.add(self.target(other))
                found.append(other)
        return found

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes of a batch, until another batch comes."""
        if key not in self.kept:
            self.kept.clear()
            self.kept[key] = make()
        return self.kept[key]


def shuffled(count: int, draw: random.Random) -> Iterator[int]:
    """The numbers below `count` in a random order, drawn one by one."""
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        place = draw.randrange(last + 1)
        yield moved.get(place, place)
        moved[place] = moved.get(last, last)
