"""The search for a small set of patches that turns a decision: prefixes of an order, greedy growth, pruning, proof.

Everything here sees the model only through `margin`: sets of patches in, one number for each out, positive where the
decision has turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Sets = Bool[Tensor, "V n"]
Margins = Float[Tensor, "V"]
Margin = Callable[[Sets], Margins]
Patches = list[int]  # in the order in which they are changed
BLOCK = 4096  # sets that an exhaustive search holds at a time


class Reached(NamedTuple):
    """A set of patches and its margin; positive: it turns the decision."""

    patches: Patches
    margin: float

    @property
    def turns(self) -> bool:
        return self.margin > 0


class Proof(NamedTuple):
    """What an exhaustive search shows: no set smaller than `bound` turns the decision."""

    bound: int
    found: Reached | None = None  # a set of that size which does


def as_sets(listed: Sequence[Sequence[int]], count: int, device: torch.device) -> Sets:
    """Lists of patches as rows of a mask."""
    sets = torch.zeros(len(listed), count, dtype=torch.bool)
    sizes = torch.tensor([len(patches) for patches in listed])
    rows = torch.arange(len(listed)).repeat_interleave(sizes)
    sets[rows, torch.tensor([patch for patches in listed for patch in patches], dtype=torch.long)] = True
    return sets.to(device)


def prefixes(order: Sequence[int], most: int) -> list[Patches]:
    """The first 0, 1, … patches of an order."""
    return [list(order[:size]) for size in range(most + 1)]


def first_turn(listed: Sequence[Patches], margins: Sequence[float]) -> Reached:
    """The first of these sets that turns the decision; if none does, the one that comes nearest."""
    turned = [i for i, margin in enumerate(margins) if margin > 0]
    best = turned[0] if turned else max(range(len(margins)), key=lambda i: margins[i])
    return Reached(listed[best], margins[best])


class Search:
    """The search on one image of `count` patches, of which at most `most` can be changed together."""

    def __init__(self, margin: Margin, count: int, most: int, device: torch.device) -> None:
        self.margin, self.count, self.most, self.device = margin, count, most, device
        self.known: dict[frozenset[int], float] = {}  # margins of sets that were run

    def measure(self, listed: Sequence[Sequence[int]]) -> list[float]:
        """The margins of these sets; each set is run once."""
        keys = [frozenset(patches) for patches in listed]
        new = [key for key in dict.fromkeys(keys) if key not in self.known]
        if new:
            found: list[float] = self.margin(as_sets([sorted(key) for key in new], self.count, self.device)).tolist()
            self.known.update(zip(new, found))
        return [self.known[key] for key in keys]

    def note(self, listed: Sequence[Patches], margins: list[float]) -> list[float]:
        """Remember margins that were measured elsewhere."""
        self.known.update(zip(map(frozenset, listed), margins))
        return margins

    def grown(self, pool: int, most: int) -> Reached:
        """Greedy growth: at each step the patch with the largest true effect, until the decision turns.

        At the first step every patch is tried alone, later the `pool` patches with the largest effects when each was
        tried last. `most`: patches at most. If nothing turns, the set that comes nearest.
        """
        chosen: Patches = []
        best = Reached([], *self.measure([[]]))
        effects = dict.fromkeys(range(self.count), math.inf)
        before = best.margin
        for _ in range(min(most, self.most)):
            left = sorted(set(effects) - set(chosen), key=lambda patch: -effects[patch])
            tried = left[:pool] if chosen else left
            margins = self.measure([[*chosen, patch] for patch in tried])
            effects.update({patch: margin - before for patch, margin in zip(tried, margins)})
            before = max(margins)
            chosen = [*chosen, tried[margins.index(before)]]
            if before > best.margin:
                best = Reached(chosen, before)
            if best.turns:
                break
        return best

    def pruned(self, start: Reached) -> Reached:
        """Put back what is not needed, until no single patch can be put back without losing the turn.

        Each round runs the set without each of its patches, then puts back as many of the dispensable ones together,
        the least needed first, as the turn survives.
        """
        now = start
        while now.turns:
            singles = self.measure([without(now.patches, [patch]) for patch in now.patches])
            spare = [i for i in sorted(range(len(singles)), key=lambda i: -singles[i]) if singles[i] > 0]
            if not spare:
                break
            back = [now.patches[i] for i in spare]
            tried = [without(now.patches, back[: size + 1]) for size in range(len(back))]
            margins = [singles[spare[0]], *self.measure(tried[1:])]
            last = max(i for i, margin in enumerate(margins) if margin > 0)
            now = Reached(tried[last], margins[last])
        return now

    def proved(self, below: int, budget: int) -> Proof:
        """Run all sets of 1, 2, … patches, as long as they are smaller than `below` and the budget lasts."""
        for size in range(1, below):
            budget -= math.comb(self.count, size)
            if budget < 0:
                return Proof(size)
            best = Reached([], 0.0)
            for block in blocks(self.count, size):
                sets = torch.zeros(len(block), self.count, dtype=torch.bool).scatter_(1, block, True)
                top, margin = largest(self.margin(sets.to(self.device)))
                if margin > best.margin:
                    best = Reached(block[top].tolist(), margin)
            if best.turns:
                return Proof(size, best)
        return Proof(below)


def without(patches: Patches, back: Sequence[int]) -> Patches:
    return [patch for patch in patches if patch not in back]


def largest(margins: Margins) -> tuple[int, float]:
    """Where the largest margin is, and how large it is."""
    top = int(margins.argmax())
    return top, float(margins[top])


def blocks(count: int, size: int) -> Iterator[Int[Tensor, "V size"]]:
    """All sets of so many patches, some at a time."""
    flat = chain.from_iterable(combinations(range(count), size))
    while len(block := np.fromiter(islice(flat, BLOCK * size), np.int64)):
        yield torch.from_numpy(block).view(-1, size)
