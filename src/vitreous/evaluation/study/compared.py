"""The gathered scores of compared methods in numbers: means with their intervals, signs, and scores on negatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from vitreous._support.statistics import intervals, mean_of
from vitreous._support.words import finite, number
from vitreous.evaluation.study.comparison import Agreement, Key, Square
from vitreous.evaluation.study.published_claims import CLAIMS
from vitreous.registry import METHODS


@dataclass(frozen=True)
class Estimate:
    """A mean over images and its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return number(self.mean) + (f" [{number(self.low)}, {number(self.high)}]" if self.count > 1 else "")

    @property
    def numbers(self) -> dict[str, float | int | None]:
        return {"mean": finite(self.mean), "low": finite(self.low), "high": finite(self.high), "images": self.count}


@dataclass(frozen=True)
class OnNegative:
    """The scores of a method on the tokens that another calls negative."""

    negative_for: str
    method: str
    mean: float
    mean_of_all: float
    positive: float  # share of those tokens
    tokens: int

    @property
    def numbers(self) -> dict[str, Any]:
        return {k: finite(v) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class SameSigns:
    """How often two signed methods give a token the same sign."""

    methods: tuple[str, str]
    within: Estimate  # an image
    pooled: float  # over all tokens
    chance: float
    tokens: int

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "methods": list(self.methods),
            "within": self.within.numbers,
            "pooled": finite(self.pooled),
            "chance": finite(self.chance),
            "tokens": self.tokens,
        }


class Compared:
    """What the gathered scores say, in numbers."""

    def __init__(self, gathered: Agreement) -> None:
        self.of = gathered
        self.methods = gathered.methods
        self.images = gathered.images

    @cached_property
    def estimates(self) -> Mapping[Key, Estimate]:
        """Every mean with its interval, and the paired differences that claims are about, from the same resamples."""
        series = self.of.series
        for claim in CLAIMS:
            for one, other in claim.pairs(self.methods):
                series[one, other] = series[one] - series[other]
        values = np.stack(list(series.values()))
        means, counts = mean_of(values), np.isfinite(values).sum(1)
        low, high = intervals(values, self.of.seed)
        rows = zip(means.tolist(), low.tolist(), high.tolist(), counts.tolist())
        return {key: Estimate(*row) for key, row in zip(series, rows)}

    def at(self, one: str, other: str) -> tuple[int, int]:
        """Where two methods stand in the squares of numbers."""
        return self.methods.index(one), self.methods.index(other)

    @cached_property
    def within(self) -> Square:
        """The mean r within an image of each pair."""
        found = np.full((len(self.methods), len(self.methods)), np.nan)
        for one, other in combinations(self.methods, 2):
            i, j = self.at(one, other)
            found[i, j] = found[j, i] = self.estimates["r", one, other].mean
        return found

    @cached_property
    def signed(self) -> list[bool]:
        """As declared; a method that is not declared is signed if it gave a score below zero."""
        return [
            METHODS[name].is_signed(METHODS[name].check({})) if name in METHODS else bool(below)
            for name, below in zip(self.methods, self.of.negative)
        ]

    def same_signs(self, one: str, other: str) -> SameSigns:
        at, signs = self.at(one, other), self.of.signs
        within = self.estimates["same", one, other]
        return SameSigns((one, other), within, float(signs.same[at]), float(signs.chance[at]), int(signs.tokens[at]))

    @cached_property
    def all_same_signs(self) -> list[SameSigns]:
        """Every pair of signed methods."""
        signed = [name for name, has_sign in zip(self.methods, self.signed) if has_sign]
        return [self.same_signs(one, other) for one, other in combinations(signed, 2)]

    def on_negative(self, name: str, other: str) -> OnNegative:
        """The scores of `other` on the tokens that `name` calls negative."""
        at, signs = self.at(name, other), self.of.signs
        tokens = int(signs.against[at])
        of_all = float(self.of.scaled.mean[at[::-1]]) if self.of.scaled.count[at] else math.nan
        if not tokens:
            return OnNegative(name, other, math.nan, of_all, math.nan, 0)
        return OnNegative(name, other, float(signs.score[at]) / tokens, of_all, float(signs.above[at]) / tokens, tokens)

    @cached_property
    def all_on_negative(self) -> list[OnNegative]:
        """Every signed method with every unsigned one."""
        kinds = dict(zip(self.methods, self.signed))
        return [self.on_negative(one, other) for one in kinds if kinds[one] for other in kinds if not kinds[other]]
