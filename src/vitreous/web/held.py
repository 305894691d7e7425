"""What the server holds in memory: finished maps, concepts, drawn regions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from anyio import CapacityLimiter

from vitreous.attribution import Attribution
from vitreous.trace.concept import Concept
from vitreous.trace.target import Target


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
class HeldMask:
    """A region that someone drew, as a mask of the whole image."""

    id: str
    pixels: np.ndarray  # [Y X]

    @property
    def digest(self) -> str:
        """As the library names a mask that is no file."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()[:8]


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
