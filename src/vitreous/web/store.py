"""An in-memory store with a size limit; the least recently used items are dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Store(Generic[K, V]):
    """Holds items up to a total size of `limit`; thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Keep an item, dropping older ones; an item larger than the limit is not kept."""
        with self._lock:
            self._drop(key)
            if size > self.limit:
                return
            while self.used + size > self.limit:
                self._drop(next(iter(self._held)))
            self._held[key] = value, size
            self.used += size

    def drop(self, key: K) -> bool:
        with self._lock:
            return self._drop(key)

    def _drop(self, key: K) -> bool:
        if key not in self._held:
            return False
        self.used -= self._held.pop(key)[1]
        return True

    def values(self) -> list[V]:
        with self._lock:
            return [value for value, _ in self._held.values()]
