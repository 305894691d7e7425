"""Where the read-out looks in every head of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from vitreous._support.words import finite, percent
from vitreous.errors import OptionError
from vitreous.inspect.view import AnyModel, View, looking, numbers, span, width_of
from vitreous.methods.attention.head_similarity import head_maps
from vitreous.trace.tokens import readout_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads(View):
    """ρᵀA of every head: one map each, its share that falls on patches, and how wide it is."""

    name = "heads"
    layers: tuple[int, ...]
    readout: str  # what the classifier reads
    maps: Float[np.ndarray, "L H h w"]  # NaN where a layer has fewer heads than another

    @property
    def patches(self) -> Float[np.ndarray, "L H"]:
        """The share of each head's attention that goes to patches; the rest goes to CLS and registers."""
        return np.asarray(self.maps.sum((2, 3)))

    @property
    def width(self) -> Float[np.ndarray, "L H"]:
        """How wide each head's attention is, as a share of the patches."""
        return width_of(self.maps)

    @property
    def extremes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Layer and head of the narrowest and of the widest."""
        width, across = self.width, self.maps.shape[1]
        found = [divmod(int(np.where(np.isnan(width), np.inf, side * width).argmin()), across) for side in (1, -1)]
        narrow, wide = ((self.layers[row], head) for row, head in found)
        return narrow, wide

    @property
    def said(self) -> str:
        narrow, wide = self.extremes
        ends = np.nanmin(self.width), np.nanmax(self.width)
        return (
            f"most focused: layer {narrow[0]}, head {narrow[1]}, as wide as {percent(ends[0])} of the patches; "
            f"widest: layer {wide[0]}, head {wide[1]} ({percent(ends[1])})"
        )

    @property
    def details(self) -> dict[str, Any]:
        return {"layers": list(self.layers), "width": finite(self.width), "patches": finite(self.patches)}

    @property
    def title(self) -> str:
        across = span(list(range(self.maps.shape[1])), "head", "heads")
        return f"{span(list(self.layers), 'Layer', 'Layers')}, {across} of {self.origin}"

    def figure(self, *, same_scale: bool = False, cells: bool = False) -> Figure:
        """A row for each layer, a column for each head; `same_scale`: one colour scale for all."""
        from vitreous.plot.head_grid import head_grid

        return head_grid(self, same_scale=same_scale, cells=cells)


def heads(model: AnyModel, image: Any, *, layers: Sequence[int] | None = None) -> Heads:
    """Where the tokens that the classifier reads look, in every attention head of these layers (None: all).

    ρᵀA⁽ˡ⁾ₕ
    """
    with looking(model, image, "heads") as seen:
        trace = seen.trace
        count = len(trace.attention)
        chosen = tuple(dict.fromkeys(trace.layer_number(i) for i in (range(count) if layers is None else layers)))
        if not chosen:
            raise OptionError("layers: name at least one, e.g. 0 or −1")
        each = [head_maps(trace, i)[0] for i in chosen]  # [H h w] each
        most = max(len(one) for one in each)
        maps = torch.full((len(each), most, *trace.layout.grid), torch.nan)
        for row, one in zip(maps, each):
            row[: len(one)] = one
        return Heads(**seen.about, layers=chosen, readout=readout_name(trace.layout), maps=numbers(maps))
