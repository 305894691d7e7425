"""Where the read-out looks from layer to layer, and all layers as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from vitreous._support.words import percent
from vitreous.attribute import attribute
from vitreous.errors import OptionError, one_of
from vitreous.evaluation.study.spread import aggregated
from vitreous.inspect.view import AnyModel, View, looking, numbers, span, width_of
from vitreous.methods.common import fuse_heads
from vitreous.registry import METHODS
from vitreous.trace.tokens import readout_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUSIONS = ("mean", "min", "max")


@dataclass(frozen=True, eq=False, kw_only=True)
class Layers(View):
    """A map for each layer, their mean, minimum and maximum, and rollout through all of them."""

    name = "layers"
    heads: str
    readout: str
    maps: Float[np.ndarray, "L h w"]
    mean: Float[np.ndarray, "h w"]
    min: Float[np.ndarray, "h w"]
    max: Float[np.ndarray, "h w"]
    rollout: Float[np.ndarray, "h w"]

    @property
    def width(self) -> Float[np.ndarray, "L"]:
        """How wide each layer's attention is, as a share of the patches."""
        return width_of(self.maps)

    @property
    def said(self) -> str:
        narrow, wide = int(np.nanargmin(self.width)), int(np.nanargmax(self.width))
        ends = percent(self.width[narrow]), percent(self.width[wide])
        return f"most focused: layer {narrow}, as wide as {ends[0]} of the patches; widest: layer {wide} ({ends[1]})"

    @property
    def details(self) -> dict[str, Any]:
        return {"width": self.width.tolist()}

    def figure(self, *, bare: bool = False, same_scale: bool = False, cells: bool = False) -> Figure:
        """The image, a map for each layer, then the four of all layers; `bare`: without the image under them."""
        from vitreous.plot.spread import example_figure

        panels = np.concatenate([self.maps, np.stack([self.mean, self.min, self.max, self.rollout])])
        title = f"{span(list(range(len(self.maps))), 'Layer', 'Layers')} of {self.origin}"
        told = f"what {self.readout} reads, {self.heads} of the heads · vitreous {self.version}"
        return example_figure(self.photo, panels, title, told, alone=bare, same_scale=same_scale, cells=cells)


def layers(model: AnyModel, image: Any, *, heads: str = "mean") -> Layers:
    """Where the tokens that the classifier reads look in each layer, and over all layers in four ways.

    fuse_h ρᵀA⁽ˡ⁾ₕ; mean, min and max over l; rollout
    """
    check_fusion(heads)
    with looking(model, image, "layers") as seen:
        trace = seen.trace
        rows = torch.cat([fuse_heads(trace.read_layer(layer), heads) for layer in trace.attention])  # [L M]
        maps = trace.map(rows).float()
        declared = METHODS["rollout"]
        rolled = attribute(trace, declared, None, declared.check({"heads": heads})).map
        mean, least, most, rollout = numbers(aggregated(maps[None], rolled)[0])
        return Layers(
            **seen.about,
            heads=heads,
            readout=readout_name(trace.layout),
            maps=numbers(maps),
            mean=mean,
            min=least,
            max=most,
            rollout=rollout,
        )


def check_fusion(heads: str) -> None:
    if heads not in FUSIONS:
        raise OptionError(f"heads={heads}: give {one_of(FUSIONS)}")
