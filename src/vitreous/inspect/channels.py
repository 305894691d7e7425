"""What one channel of a head does: measured from the signs and the regions of its query and key images.

one-way   the query has one sign nearly everywhere, the key both: all patches read the key's region of that sign
two-way   query and key have both signs: q⁺ reads k⁺ and q⁻ reads k⁻
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from vitreous._support.statistics import otsu, pearson
from vitreous._support.words import percent

Pattern = Literal["one-way", "two-way", "none"]
Place = tuple[int, int, int]  # layer, head, channel
Images = Float[np.ndarray, "C h w"]  # an image for each channel
Numbers = Float[np.ndarray, "C"]
THEMSELVES, OTHERS = "regions read themselves", "regions read each other"


@dataclass(frozen=True)
class Limits:
    """What counts as a sign, as regions, and as alike."""

    least: float
    coherence: float
    likeness: float


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One channel of one head, measured over the patches."""

    layer: int
    head: int
    channel: int
    score: float  # how well its key parts the image into regions: 0 … 1
    effect: float  # how far it moves the scores before the softmax: s·mean|q|·std(k)
    query_positive: float  # share of the patches where q > 0
    key_positive: float
    query_coherence: float  # Moran's I: 1, smooth regions; 0, noise
    key_coherence: float
    likeness: float  # correlation of the signs of q and k: −1 … 1
    pattern: Pattern
    reads: str  # who reads whom, in words

    @property
    def label(self) -> str:
        return f"layer {self.layer}, head {self.head}, channel {self.channel}"


def measure(q: Images, k: Images, scale: Numbers, places: Sequence[Place], limits: Limits) -> list[Channel]:
    """Every channel; its score is η(k)·max(I(k), 0)."""
    columns = {
        "score": split_share(k) * np.maximum(moran(k), 0),
        "effect": scale * np.abs(q).mean((1, 2)) * k.std((1, 2)),
        "query_positive": (q > 0).mean((1, 2)),
        "key_positive": (k > 0).mean((1, 2)),
        "query_coherence": moran(q),
        "key_coherence": moran(k),
        "likeness": correlation(np.sign(q), np.sign(k)),
    }
    found = []
    for i, (layer, head, channel) in enumerate(places):
        told = {name: float(values[i]) for name, values in columns.items()}
        pattern = pattern_of(told, limits)
        words = in_words(told, pattern, limits)
        found.append(Channel(layer=layer, head=head, channel=channel, pattern=pattern, reads=words, **told))
    return found


def pattern_of(told: dict[str, float], limits: Limits) -> Pattern:
    """How information flows, by the signs of query and key."""
    if not both_signs(told["key_positive"], limits) or told["key_coherence"] < limits.coherence:
        return "none"
    if not both_signs(told["query_positive"], limits):
        return "one-way"
    return "two-way" if told["query_coherence"] >= limits.coherence else "none"


def both_signs(positive: float, limits: Limits) -> bool:
    return min(positive, 1 - positive) >= limits.least


def in_words(told: dict[str, float], pattern: Pattern, limits: Limits) -> str:
    """Who reads whom."""
    q, k, likeness = told["query_positive"], told["key_positive"], told["likeness"]
    if pattern == "one-way":
        sign, share = ("⁺", k) if q > 0.5 else ("⁻", 1 - k)
        return f"all patches read k{sign} ({percent(share)})"
    if pattern == "two-way":
        said = f"q⁺ ({percent(q)}) reads k⁺ ({percent(k)}), q⁻ reads k⁻"
        kind = THEMSELVES if likeness >= limits.likeness else OTHERS if likeness <= -limits.likeness else ""
        return f"{said}: {kind}" if kind else said
    if not both_signs(k, limits):
        return f"the key has one sign ({percent(max(k, 1 - k))}): no side to choose"
    return f"no clear regions in the {'key' if told['key_coherence'] < limits.coherence else 'query'}"


# ---------------------------------------------------------------------------------------------------------- measuring


def split_share(pictures: Images) -> Numbers:
    """η of Otsu: the share of the variance that lies between two classes, cut where it is largest.

    max_t w₀·w₁·(μ₀ − μ₁)² / σ²: 1, two values only; 0.75, all values alike often; 0.64, a bell curve
    """
    return otsu(pictures.reshape(len(pictures), -1))[0]


def moran(pictures: Images) -> Numbers:
    """Moran's I over neighbours above, below, left and right: their mean product, over the variance."""
    z = pictures.astype(np.float64)
    z = z - z.mean((1, 2), keepdims=True)
    down, across = z[:, 1:] * z[:, :-1], z[:, :, 1:] * z[:, :, :-1]
    pairs = down[0].size + across[0].size
    whole = (z * z).mean((1, 2))
    together = (down.sum((1, 2)) + across.sum((1, 2))) / max(pairs, 1)
    return np.asarray(np.where(whole > 0, together / np.maximum(whole, 1e-300), 0))


def correlation(a: Images, b: Images) -> Numbers:
    """Pearson's r of each image with its partner; 0 where one is flat."""
    return np.asarray(np.nan_to_num(pearson(a.reshape(len(a), -1), b.reshape(len(b), -1))))


def meeting(here: Images, there: Images, scale: Numbers) -> Images:
    """s·(m⁺·x⁺ − m⁻·x⁻), x the value here, m± the mean of the values of that sign there."""
    plus, minus = (np.maximum(sign * there, 0).mean((1, 2), keepdims=True) for sign in (1, -1))
    flows = plus * np.maximum(here, 0) - minus * np.maximum(-here, 0)
    return np.asarray(scale[:, None, None] * flows, np.float32)
