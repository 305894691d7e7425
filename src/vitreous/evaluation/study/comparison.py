"""How far methods agree on the tokens of many images, beside what was published about four of them.

s′ = s / max |s| of its image: the scale on which images are pooled
r within   = the mean over images of Pearson's r between two maps of an image
r pooled   = Pearson's r over all tokens of all images, of s′ or of s
sparsity   = share of tokens with |s| < 0.05 · max s, of max |s| where no s is positive; mean over images

Images come some at a time; what is kept of each is a few numbers a pair of methods. Their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from vitreous.errors import InputError
from vitreous.metrics.complexity.sparsity import share_of_little
from vitreous.plot.cdam_by_attention import Bin

NOTHING = 0.05  # of the largest score: less counts as nothing
ROUNDING = 4 * float(np.finfo(np.float32).eps)  # of the largest score: a map that varies less is constant
EDGES = (0.01, 0.05, 0.2, 0.5)  # of an image's largest attention
FINE = 1000  # steps of a histogram from 0 to 1
SAMPLE = 20_000  # tokens kept to be drawn
Scores = Float[np.ndarray, "M n"]  # methods, tokens of one image
Stack = Float[np.ndarray, "B M n"]  # of several
There = Bool[np.ndarray, "B M"]
Square = Float[np.ndarray, "M M"]
Squares = Float[np.ndarray, "B M M"]
Key = tuple[Any, ...]  # names a series of numbers, one per image


class Agreement:
    """Gathers the maps of all methods, some images and targets at a time."""

    def __init__(self, methods: Sequence[str], seed: int = 0) -> None:
        if not methods or len(set(methods)) < len(methods):
            raise InputError(f"methods {', '.join(methods) or 'none'}: name each method once, and at least one")
        self.methods, self.seed = tuple(methods), seed
        count = len(self.methods)
        self.failed, self.constant = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.negative = np.zeros(count, bool)
        self.scaled, self.raw = Pooled(count), Pooled(count)
        self.signs, self.bins = Signs(count), Bins()
        self.sample = Sample(count)
        self._keys = [np.zeros(0, np.uint64)]  # fingerprints of images
        self._rows = [np.zeros((0, count * (count + 1)))]  # their numbers

    def add(self, maps: Scores) -> None:
        """Add one image with each method's scores; a row with NaN or infinity is a map that failed."""
        self.add_all(maps[None])

    def add_all(self, maps: Stack) -> None:
        """Add several images of as many tokens each."""
        if maps.ndim != 3 or maps.shape[1] != len(self.methods) or not maps.shape[2]:
            raise InputError(f"maps {list(maps.shape[1:])}: give [{len(self.methods)}, tokens], a row for each method")
        scores = np.ascontiguousarray(maps, np.float64)
        keys = [int.from_bytes(blake2b(image.tobytes(), digest_size=8).digest(), "big") for image in scores]
        there = np.asarray(np.isfinite(scores).all(2))
        scores = np.where(there[:, :, None], scores, 0)
        scaled = relative(scores)
        varied = there & (np.ptp(scaled, axis=2) > ROUNDING)
        self.failed += (~there).sum(0)
        self.constant += (there & ~varied).sum(0)
        self.negative |= (scores < 0).any((0, 2))
        self.scaled.add(scaled, there)
        self.raw.add(scores, there)
        same = self.signs.add(scaled, there)
        if {"attention", "cdam"} <= set(self.methods):
            self.bins.add(*(np.abs(scaled[:, self.methods.index(name)]) for name in ("attention", "cdam")))
        lots = np.concatenate([np.random.default_rng([self.seed, key]).random(maps.shape[2]) for key in keys])
        drawn = np.where(there[:, :, None], scaled, np.nan)
        self.sample.add(np.moveaxis(drawn, 1, 0).reshape(len(self.methods), -1), lots)
        sparse = np.where(there, sparsity(scores.reshape(-1, maps.shape[2])).reshape(there.shape), np.nan)
        one, other = np.triu_indices(len(self.methods), 1)
        numbers = (correlation(scaled, varied)[:, one, other], same[:, one, other], sparse, self._dimmed(scaled, there))
        self._keys.append(np.array(keys, np.uint64))
        self._rows.append(np.concatenate(numbers, 1))

    def _dimmed(self, scaled: Stack, there: There) -> Float[np.ndarray, "B M"]:
        """By how much gae is higher on the tokens that each method calls negative than on all tokens."""
        if "gae" not in self.methods:
            return np.full(there.shape, np.nan)
        at = self.methods.index("gae")
        against, gae = scaled <= -NOTHING, scaled[:, at]
        count = against.sum(2)
        off = np.einsum("bmn,bn->bm", against, gae) / np.maximum(count, 1) - gae.mean(1)[:, None]
        return np.where((count > 0) & there[:, at, None], off, np.nan)

    @property
    def images(self) -> int:
        return sum(map(len, self._keys))

    @property
    def series(self) -> dict[Key, Float[np.ndarray, "N"]]:
        """One number per image, in an order that does not depend on the order in which images were added."""
        pairs = list(combinations(self.methods, 2))
        keys: list[Key] = [("r", *pair) for pair in pairs] + [("same", *pair) for pair in pairs]
        keys += [("sparsity", name) for name in self.methods] + [("dimmed", name) for name in self.methods]
        order = np.argsort(np.concatenate(self._keys), kind="stable")
        return dict(zip(keys, np.concatenate(self._rows)[order].T))


def relative(scores: np.ndarray) -> np.ndarray:
    """s / max |s| along the last axis; a map of zeros stays zero."""
    most = np.abs(scores).max(-1, keepdims=True)
    return np.asarray(scores / np.where(most > 0, most, 1))


def sparsity(scores: Scores) -> Float[np.ndarray, "M"]:
    """Share of tokens with |s| < 0.05 · max s, as the metric has it."""
    return np.asarray(share_of_little(torch.from_numpy(scores), NOTHING), np.float64)


def correlation(scores: Stack, varied: There) -> Squares:
    """Pearson's r between the rows of each image; NaN for rows that do not vary."""
    off = scores - scores.mean(2, keepdims=True)
    shared = off @ off.transpose(0, 2, 1)
    size = np.sqrt(np.where(varied, np.diagonal(shared, axis1=1, axis2=2), np.nan))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.clip(shared / size[:, :, None] / size[:, None, :], -1, 1))


class Pooled:
    """Pearson's r over all tokens of all images, without keeping them: pairwise sums of squares, merged part by part.

    C ← C + c + (m − M)(m′ − M′) · N n / (N + n)
    """

    def __init__(self, methods: int) -> None:
        square = (methods, methods)
        self.count = np.zeros(square)
        self.mean = np.zeros(square)  # of the row's method, over the images that the column's method has too
        self._spread, self._shared = np.zeros(square), np.zeros(square)

    def add(self, scores: Stack, there: There) -> None:
        """Add images; missing methods are left out of their pairs."""
        both, tokens = there[:, :, None] & there[:, None, :], scores.shape[2]
        images = both.sum(0)
        with np.errstate(over="ignore", invalid="ignore"):
            means = scores.mean(2, keepdims=True)
            shared = (scores - means) @ (scores - means).transpose(0, 2, 1)
            mean = np.where(both, means, 0).sum(0) / np.maximum(images, 1)
            off = np.where(both, means - mean, 0)
            step, weight = self._step(mean, images * tokens)
            own = np.diagonal(shared, axis1=1, axis2=2)[:, :, None] + tokens * off**2
            shared = shared + tokens * off * off.transpose(0, 2, 1)
            self._shared += np.where(both, shared, 0).sum(0) + step * step.T * weight
            self._spread += np.where(both, own, 0).sum(0) + step**2 * weight
        self.count += images * tokens
        self.mean += step * images * tokens / np.maximum(self.count, 1)

    def _step(self, mean: Square, count: Int[np.ndarray, "M M"] | Square) -> tuple[Square, Square]:
        """How far the mean of more tokens lies from that of those before, and its weight."""
        step = np.where(count > 0, mean - self.mean, 0)
        return step, self.count * count / np.maximum(self.count + count, 1)

    @property
    def r(self) -> Square:
        count = np.maximum(self.count, 1)
        varied = np.sqrt(self._spread / count) > ROUNDING * np.abs(self.mean)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            r = self._shared / (np.sqrt(self._spread) * np.sqrt(self._spread.T))
        return np.where(varied & varied.T & np.isfinite(r), np.clip(r, -1, 1), np.nan)


class Signs:
    """Which signs two methods give to the tokens that matter to both, and the scores of one where another is negative.

    a sign counts where |s′| ≥ 0.05
    """

    def __init__(self, methods: int) -> None:
        square = (methods, methods)
        self.both_up, self.both_down, self.apart = np.zeros(square), np.zeros(square), np.zeros(square)
        self.against, self.score, self.above = np.zeros(square), np.zeros(square), np.zeros(square)

    def add(self, scaled: Stack, there: There) -> Squares:
        """Add images; return the share of equal signs in each."""
        up, down = ((sign * scaled >= NOTHING).astype(np.float64) for sign in (1, -1))
        both_up, both_down, apart = (
            one @ other.transpose(0, 2, 1) for one, other in ((up, up), (down, down), (up, down))
        )
        self.both_up += both_up.sum(0)
        self.both_down += both_down.sum(0)
        self.apart += apart.sum(0)
        self.against += down.sum(2).T @ there
        self.score += (down @ scaled.transpose(0, 2, 1)).sum(0)
        self.above += (down @ (scaled > 0).transpose(0, 2, 1)).sum(0)
        return share(both_up + both_down, both_up + both_down + apart + apart.transpose(0, 2, 1))

    @property
    def tokens(self) -> Square:
        return np.asarray(self.both_up + self.both_down + self.apart + self.apart.T)

    @property
    def same(self) -> Square:
        return share(self.both_up + self.both_down, self.tokens)

    @property
    def chance(self) -> Square:
        """The agreement expected by chance: as many signs of each kind, placed at random."""
        up = share(self.both_up + self.apart, self.tokens)
        return np.asarray(up * up.T + (1 - up) * (1 - up.T))


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole; NaN where the whole is zero."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


class Bins:
    """The size of cdam on tokens of little, some and much attention, each relative to the most in its image."""

    def __init__(self) -> None:
        rows = len(EDGES) + 1
        self.total, self.large = np.zeros(rows), np.zeros(rows)
        self.images = np.zeros(rows, np.int64)
        self.levels: Int[np.ndarray, "R F"] = np.zeros((rows, FINE), np.int64)
        self.lowest = math.inf

    def add(self, attention: Float[np.ndarray, "B n"], cdam: Float[np.ndarray, "B n"]) -> None:
        """Add the magnitudes of images, in 0…1; an image with a map of zeros (or one that failed) is ignored."""
        kept = attention.any(1) & cdam.any(1)
        if not kept.any():
            return
        attention, cdam, rows = attention[kept], cdam[kept], len(EDGES) + 1
        row = np.searchsorted(EDGES, attention, side="right")
        level = np.minimum((cdam * FINE).astype(np.int64), FINE - 1)
        self.levels += np.bincount((row * FINE + level).ravel(), minlength=rows * FINE).reshape(rows, FINE)
        self.total += np.bincount(row.ravel(), cdam.ravel(), rows)
        self.large += np.bincount(row.ravel(), cdam.ravel() >= NOTHING, rows)
        self.images += np.stack([(row == each).any(1) for each in range(rows)]).sum(1)
        self.lowest = min(self.lowest, float(attention.min()))

    @property
    def tokens(self) -> Int[np.ndarray, "R"]:
        return np.asarray(self.levels.sum(1))

    @property
    def average(self) -> float:
        """Of all tokens."""
        return float(self.total.sum() / max(1, self.tokens.sum()))

    @property
    def large_share(self) -> float:
        """Of all tokens."""
        return float(self.large.sum() / max(1, self.tokens.sum()))

    @property
    def rows(self) -> list[Bin]:
        ends = (0.0, *EDGES, 1.0)
        return [
            Bin(low, high, int(count), int(images), float(mean), quantile(levels, 0.95), float(large))
            for low, high, count, images, mean, levels, large in zip(
                ends,
                ends[1:],
                self.tokens,
                self.images,
                share(self.total, self.tokens),
                self.levels,
                share(self.large, self.tokens),
            )
        ]


def quantile(levels: Int[np.ndarray, "F"], part: float) -> float:
    """A quantile from a histogram over 0…1, assuming values spread evenly within a bin."""
    if not levels.any():
        return math.nan
    reached, wanted = np.cumsum(levels), part * levels.sum()
    step = int(np.searchsorted(reached, wanted))
    return float((step + 1 - (reached[step] - wanted) / levels[step]) / len(levels))


class Sample:
    """A fair sample of all tokens: those with the lowest random numbers, whatever the order of the images."""

    def __init__(self, methods: int, most: int = SAMPLE) -> None:
        self.most, self._limit, self._waiting = most, math.inf, 0
        self._lots = [np.zeros(0)]
        self._tokens = [np.zeros((methods, 0), np.float32)]

    def add(self, tokens: Scores, lots: Float[np.ndarray, "n"]) -> None:
        """Add tokens of images, each with its random number."""
        low = lots < self._limit
        self._lots.append(lots[low])
        self._tokens.append(tokens[:, low].astype(np.float32))
        self._waiting += int(low.sum())
        if self._waiting > self.most:
            self._tidy()

    def _tidy(self) -> None:
        lots = np.concatenate(self._lots)
        first = np.argsort(lots, kind="stable")[: self.most]
        self._lots, self._tokens = [lots[first]], [np.concatenate(self._tokens, 1)[:, first]]
        self._waiting, self._limit = 0, float(lots[first[-1]]) if len(first) == self.most else math.inf

    @property
    def tokens(self) -> Float[np.ndarray, "M T"]:
        self._tidy()
        return self._tokens[0]
