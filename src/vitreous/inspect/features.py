"""Patch features as colours: three principal components, one basis for all images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from vitreous._support.words import count_of, percent
from vitreous.errors import OptionError
from vitreous.inspect.basis import Basis, Components, Covariance, LayerBasis, Parts, parted
from vitreous.inspect.stream import Stream, stacked, streaming
from vitreous.inspect.view import AnyModel, View, span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawn = list[np.ndarray]  # one for each image, [h w 3]; images may have grids of their own


@dataclass(frozen=True, eq=False, kw_only=True)
class Features(View):
    """Principal components of the patch features of some layers, of all images in one basis."""

    name = "features"
    apart = ("basis", "components", "whole", "raw")
    images: tuple[str, ...]
    layers: tuple[int, ...]
    of: str  # tokens, queries, keys or values
    normed: bool  # whether the model's final norm was applied to the tokens
    foreground: bool
    fitted: bool  # whether the basis is that of these images; else it was given
    basis: Basis
    components: Mapping[int, Drawn]  # by layer: those that the colours stand for
    whole: Mapping[int, Drawn]  # by layer: of all patches; with a foreground, its first component parts them
    raw: Mapping[int, list[np.ndarray]] | None = None  # by layer: the features, if they were asked for

    @property
    def shares(self) -> dict[int, list[float]]:
        """The share of the variance along each component, of all patches or of those of the foreground."""
        return {layer: self.basis.layers[layer].shown.share.tolist() for layer in self.layers}

    @property
    def patches(self) -> int:
        """How many patches the images have in the first of the layers."""
        return sum(one[..., 0].size for one in self.whole[self.layers[0]])

    def inside(self, layer: int, index: int) -> Bool[np.ndarray, "h w"]:
        """Which patches of an image are foreground; all, if none was asked for."""
        first = self.whole[layer][index][..., 0]
        return self.basis.layers[layer].foreground(first) if self.foreground else np.ones(first.shape, np.bool_)

    def colours(self, layer: int, index: int) -> Float[np.ndarray, "h w 3"]:
        """Red, green and blue of each patch in 0…1; NaN in the background."""
        found = self.basis.layers[layer].shown.colours(self.components[layer][index])
        return np.where(self.inside(layer, index)[..., None], found, np.float32(np.nan))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        found = {f"components_{i}": stacked(self.components[i]) for i in self.layers}
        if self.foreground:
            found |= {f"first_{i}": stacked([one[..., 0] for one in self.whole[i]]) for i in self.layers}
        for i in self.layers:
            found |= {f"{name}_{i}": array for name, array in self.basis.layers[i].arrays.items()}
        if self.raw is not None:
            found |= {f"features_{i}": stacked(self.raw[i]) for i in self.layers}
        return found

    @property
    def what(self) -> str:
        """What the features are, in words."""
        if self.of != "tokens":
            return f"{self.of} of the attention"
        return "tokens after the final norm" if self.normed else "tokens"

    @property
    def said(self) -> str:
        last = self.layers[-1]
        share, where = sum(self.shares[last]), "of the foreground" if self.foreground else "of the patches"
        own = "a basis of" if self.fitted else "a given basis, on"
        many = count_of(len(self.images), "image")
        return f"layer {last}: three components hold {percent(share)} of the variance {where}; {own} {many}"

    @property
    def details(self) -> dict[str, Any]:
        told = {"layers": list(self.layers), "shares": {str(i): share for i, share in self.shares.items()}}
        if self.foreground:
            counts = {str(i): [float(self.inside(i, n).mean()) for n in range(len(self.images))] for i in self.layers}
            told["foreground"] = counts
        return told

    @property
    def title(self) -> str:
        return f"Patch features of {self.model}, {span(list(self.layers), 'layer', 'layers')}"

    def figure(self, *, smooth: bool = False) -> Figure:
        """A row for each image, a column for each layer; `smooth`: not the true patches."""
        from vitreous.plot.features import colours_figure

        return colours_figure(self, smooth=smooth)


def features(
    model: AnyModel,
    images: Any,
    *,
    layers: Sequence[int] | None = (-1,),
    of: str = "tokens",
    norm: bool | None = None,
    foreground: bool = False,
    basis: Basis | str | Path | None = None,
    raw: bool = False,
    batch: int | None = None,
) -> Features:
    """Three principal components of the patch features of each layer (None: all), in one basis for all images.

    (x − m)·u₁…u₃, with m and the covariance Σ(x − m)(x − m)ᵀ/n over the patches of all images; u has its largest entry
    positive. `of`: tokens that leave the block, or queries, keys or values of its attention. `norm`: apply the model's
    final norm to the tokens (None: if it has one that fits). `foreground`: cut the first component by Otsu's rule, and
    take a second basis of the patches on the side that borders show less. `basis`: one that was made before. `raw`:
    keep the features themselves.
    """
    given = basis if basis is None or isinstance(basis, Basis) else Basis.load(basis)
    with streaming(model, images, layers, of, norm, batch) as stream:
        if given is not None:
            given.fits(stream.told, stream.layers)
            parts = any(given.layers[i].inside is not None for i in stream.layers)
            if foreground and not parts:
                raise OptionError("foreground: the given basis has none; make one with foreground, or leave it out")
            found, foreground = given, parts
        else:
            found = fitted(stream, foreground)
        whole = projected(stream, {i: one.whole for i, one in found.layers.items()})
        inner = {i: one.inside for i, one in found.layers.items() if one.inside is not None}
        return Features(
            **stream.about,
            foreground=foreground,
            fitted=given is None,
            basis=found,
            components=projected(stream, inner) if inner else whole,
            whole=whole,
            raw=raw_features(stream) if raw else None,
        )


def fitted(stream: Stream, foreground: bool) -> Basis:
    """A basis of the patches of all images, for each layer."""
    whole = covariances(stream)
    drawn = projected(stream, whole)
    if not foreground:
        return Basis({i: LayerBasis(one.ending(joined(drawn[i]))) for i, one in whole.items()}, stream.told)
    sides = {i: parted(one.ending(joined(drawn[i])), [p[..., 0] for p in drawn[i]]) for i, one in whole.items()}
    inside = covariances(stream, sides, drawn)
    inner = projected(stream, inside)
    bases = {}
    for i, side in sides.items():
        kept = [parts[side.foreground(first[..., 0])] for parts, first in zip(inner[i], drawn[i])]
        bases[i] = replace(side, inside=inside[i].ending(np.concatenate(kept)))
    return Basis(bases, stream.told)


def covariances(
    stream: Stream, sides: Mapping[int, LayerBasis] | None = None, drawn: Mapping[int, Drawn] | None = None
) -> dict[int, Components]:
    """The components of each layer, of all patches or of the foreground."""
    sums, start = {i: Covariance() for i in stream.layers}, 0
    for taken in stream.each("features, images"):
        for i, some in taken.items():
            for n, one in enumerate(some, start):
                rows = one.reshape(-1, one.shape[-1])
                if sides is not None and drawn is not None:
                    rows = rows[np.flatnonzero(sides[i].foreground(drawn[i][n][..., 0]))]
                sums[i].add(rows)
        start += len(some)
    return {i: one.components() for i, one in sums.items()}


def projected(stream: Stream, components: Mapping[int, Components]) -> dict[int, Drawn]:
    """The components of every patch, by layer."""
    found: dict[int, Drawn] = {i: [] for i in stream.layers}
    for taken in stream.each("components, images"):
        for i, some in taken.items():
            found[i] += [np.asarray(components[i].of(one).cpu().numpy(), np.float32) for one in some]
    return found


def raw_features(stream: Stream) -> dict[int, list[np.ndarray]]:
    found: dict[int, list[np.ndarray]] = {i: [] for i in stream.layers}
    for taken in stream.each("features, images"):
        for i, some in taken.items():
            found[i] += [one.float().cpu().numpy() for one in some]
    return found


def joined(parts: Sequence[np.ndarray]) -> Parts:
    return np.concatenate([one.reshape(-1, one.shape[-1]) for one in parts])
