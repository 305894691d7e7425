"""Maximum flow in exact fractions: the shortest path that still has room, again and again (Edmonds and Karp)."""

from __future__ import annotations

from collections import defaultdict, deque
from fractions import Fraction
from typing import Any

import numpy as np

Node = tuple[int, int]
END: Node = (-1, -1)


def flow(pipes: list[np.ndarray], read: np.ndarray, patch: int) -> float:
    """From a token before the first layer to what is read; `pipes` [N M] of each layer, row i: what token i reads."""
    room: dict[Node, dict[Node, Fraction]] = defaultdict(dict)

    def connect(a: Node, b: Node, width: float) -> None:
        if width > 0:
            room[a][b] = Fraction(width)
            room[b][a] = Fraction(0)

    for level, pipe in enumerate(pipes):
        for i, row in enumerate(pipe):
            for j, width in enumerate(row):
                connect((level, j), (level + 1, i), float(width))
    for i, width in enumerate(read):
        connect((len(pipes), i), END, float(width))
    total = Fraction(0)
    while path := shortest(room, (0, patch)):
        least = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= least
            room[b][a] += least
        total += least
    return float(total)


def shortest(room: Any, start: Node) -> list[tuple[Node, Node]]:
    """The edges of a shortest path to the end; none where there is no room left."""
    came: dict[Node, Node] = {start: start}
    queue = deque([start])
    while queue and END not in came:
        node = queue.popleft()
        for other, width in room[node].items():
            if width > 0 and other not in came:
                came[other] = node
                queue.append(other)
    path, node = [], END
    while node in came and node != start:
        path.append((came[node], node))
        node = came[node]
    return path
