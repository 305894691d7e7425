"""Queries and keys as images: one channel of a head says who reads whom.

s·qᵢ·kⱼ = Σ_c s·q_ic·k_jc: where q_ic and k_jc have the same sign, channel c makes patch i read patch j more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.errors import OptionError
from vitreous.inspect.channels import Channel, Images, Limits, Numbers, Pattern, Place, measure, meeting
from vitreous.inspect.view import AnyModel, View, looking, numbers, span
from vitreous.trace.tokens import one_head, projections
from vitreous.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LISTED = 10  # channels told of without being shown


@dataclass(frozen=True, eq=False, kw_only=True)
class QK(View):
    """Queries and keys of every channel looked at, best first, and what each channel does."""

    name = "qk"
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    centred: bool  # keys less their mean
    limits: Limits
    ranking: tuple[Channel, ...]
    shown: tuple[int, ...]  # places in the ranking
    scale: Numbers  # s of each channel's layer
    q: Images  # in the order of the ranking
    k: Images

    @property
    def where(self) -> str:
        """Which layers and heads."""
        return f"{span(list(self.layers), 'layer', 'layers')}, {span(list(self.heads), 'head', 'heads')}"

    @property
    def leaving(self) -> Images:
        """What flows out of each patch: s·(q̄⁺·k⁺ − q̄⁻·k⁻), positive to readers with q > 0, negative to the others."""
        return meeting(self.k, self.q, self.scale)

    @property
    def arriving(self) -> Images:
        """What flows into each patch: s·(k̄⁺·q⁺ − k̄⁻·q⁻)."""
        return meeting(self.q, self.k, self.scale)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """q and k [C h w], best first, and a column for each measure of a channel."""
        table = {f.name: np.array([getattr(one, f.name) for one in self.ranking]) for f in fields(Channel)}
        return {"q": self.q, "k": self.k, "scale": self.scale, **table}

    @property
    def provenance(self) -> dict[str, Any]:
        told = super().provenance
        shown = [self.ranking[i].label for i in self.shown]
        return {**told, "limits": vars(self.limits), "ranking": shown, "counts": self.counts}

    @property
    def counts(self) -> dict[Pattern, int]:
        """How many channels follow each pattern."""
        kinds: tuple[Pattern, ...] = get_args(Pattern)
        return {kind: sum(one.pattern == kind for one in self.ranking) for kind in kinds}

    @property
    def said(self) -> str:
        best, counts = self.ranking[0], self.counts
        kinds = f"{counts['one-way']} one-way, {counts['two-way']} two-way, {counts['none']} neither"
        return f"{len(self.ranking)} channels ({kinds}); best: {best.label}, {best.pattern}: {best.reads}"

    @property
    def details(self) -> dict[str, Any]:
        """The channels shown and the best ones, with their ranks."""
        listed = dict.fromkeys((*self.shown, *range(min(LISTED, len(self.ranking)))))
        return {"counts": self.counts, "channels": [{"rank": i + 1, **asdict(self.ranking[i])} for i in listed]}

    def figure(self, *, cells: bool = True) -> Figure:
        """A row for each channel shown: query, key, where it flows from and to, and in words; the ranking below."""
        from vitreous.plot.channels import channels_figure

        return channels_figure(self, cells=cells)


def qk(
    model: AnyModel,
    image: Any,
    *,
    layer: int | None = -1,
    head: int | None = 0,
    channels: Sequence[int] | None = None,
    count: int = 4,
    least: float = 0.03,
    coherence: float = 0.3,
    likeness: float = 0.2,
    centred: bool = False,
) -> QK:
    """The queries and keys of a head as images, its channels ranked, and the patterns in which information flows.

    score = η(k)·max(I(k), 0): Otsu's share of the key's variance that lies between two classes, times Moran's I.
    `layer`, `head`: None, all of them. `channels`: which to show; None, the `count` best. `least`: a sign counts where
    at least this share of the patches has it. `coherence`: regions have a Moran's I of at least this. `likeness`: from
    this correlation of the signs of q and k on, regions read themselves, below its negative each other. `centred`: keys
    less their mean over the patches, since a softmax sees only their differences.
    """
    limits = checked(least, coherence, likeness, count)
    with looking(model, image, "qk") as seen:
        trace = seen.trace
        chosen = list(range(len(trace.attention))) if layer is None else [trace.layer_number(layer)]
        parts = [trace.attention[i] if layer is None else trace.layer(i) for i in chosen]
        drawn = [pictures(trace, part, head) for part in parts]
        q, k = (np.concatenate([one[side] for one in drawn]) for side in (0, 1))
        places = [
            place for i, part, one in zip(chosen, parts, drawn) for place in places_of(i, part, head, len(one[0]))
        ]
        scale = np.array([drawn[chosen.index(place[0])][2] for place in places], np.float32)
        k = k - k.mean((1, 2), keepdims=True) if centred else k
        measured = measure(q, k, scale, places, limits)
        order = sorted(range(len(measured)), key=lambda i: -measured[i].score)
        ranking = tuple(measured[i] for i in order)
        return QK(
            **seen.about,
            layers=tuple(chosen),
            heads=tuple(sorted({place[1] for place in places})),
            centred=centred,
            limits=limits,
            ranking=ranking,
            shown=pick(ranking, channels, count),
            scale=scale[order],
            q=q[order],
            k=k[order],
        )


def checked(least: float, coherence: float, likeness: float, count: int) -> Limits:
    for name, value, top in (("least", least, 0.5), ("coherence", coherence, 1.0), ("likeness", likeness, 1.0)):
        if not 0 <= value <= top:
            raise OptionError(f"{name}={value}: give a number from 0 to {top:g}")
    if count < 1:
        raise OptionError(f"count={count}: give at least 1")
    return Limits(least, coherence, likeness)


def pictures(trace: Trace, layer: Attention, head: int | None) -> tuple[Images, Images, float]:
    """Queries and keys of a head (None: of all, one after the other), an image for each channel; and their scale."""
    q, k, scale = projections(trace, layer if head is None else one_head(layer, head))

    def drawn(side: Float[Tensor, "1 H N d"]) -> Images:
        patches = trace.to_patches(side.transpose(1, 2).flatten(2))[0]  # [h w H·d]
        return numbers(patches.permute(2, 0, 1))

    return drawn(q), drawn(k), scale


def places_of(number: int, layer: Attention, head: int | None, count: int) -> list[Place]:
    """Which channel each image of a layer is."""
    heads = range(layer.shape[1]) if head is None else [head]
    return [(number, h, c) for h in heads for c in range(count // len(heads))]


def pick(ranking: Sequence[Channel], channels: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Ranks of the requested channels, or of the best ones."""
    if channels is None:
        return tuple(range(min(count, len(ranking))))
    places = {one.channel: i for i, one in enumerate(ranking)}
    if len(places) != len(ranking):
        raise OptionError("channels are those of one head: say which layer and which head")
    for channel in channels:
        if channel not in places:
            raise OptionError(f"channel {channel} is out of range: this head has channels 0 to {len(ranking) - 1}")
    return tuple(places[channel] for channel in dict.fromkeys(channels))
