"""Outlier tokens: patches whose tokens are much longer than the others', and the units that make them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float

from vitreous._support.words import count_of, percent
from vitreous.errors import OptionError
from vitreous.inspect.outliers.measure import Images, Norms, Shares, Unit, norms_of, ratios_of, shares_of, units_of
from vitreous.inspect.outliers.mlps import find_mlps
from vitreous.inspect.view import AnyModel, View, refuse_view
from vitreous.models.origin import Origin
from vitreous.trace.apply import as_images, as_model, of_images, of_model
from vitreous.trace.tokens import readout_name
from vitreous.trace.trace import Trace
from vitreous.trace.views import Views

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIO = 2.0
MOST = 20


@dataclass(frozen=True, eq=False, kw_only=True)
class Registers(View):
    """Outlier tokens of some images, the attention that they take, and the hidden units behind them.

    An outlier is a patch whose token leaves the block `layer` with more than `ratio` times the median norm of the
    patches of its image. `onset` is the first block that at least half of the outliers leave so.
    """

    name = "registers"
    images: tuple[str, ...]
    shown: int  # which of them the figure shows
    ratio: float
    layer: int
    onset: int | None  # None: there are no outliers
    readout: str
    norms: Norms
    read_share: Shares  # of the attention of what the classifier reads, that the outliers take in each layer
    mean_share: Shares  # of the attention of all tokens
    tokens: int
    units: tuple[Unit, ...]  # by how much more active they are at outliers than at other patches, most first

    @property
    def ratios(self) -> Norms:
        """The norms against the median of the patches of the same image and layer."""
        return ratios_of(self.norms)

    @property
    def outliers(self) -> Bool[np.ndarray, "B h w"]:
        return np.asarray(self.ratios[:, self.layer] > self.ratio)

    @property
    def counts(self) -> Float[np.ndarray, "B L"]:
        """How many tokens leave each block with more than `ratio` times the median norm."""
        return np.asarray((self.ratios > self.ratio).sum((2, 3)), np.float32)

    @property
    def largest(self) -> Float[np.ndarray, "B L"]:
        """The largest norm against the median."""
        return np.asarray(self.ratios.max((2, 3)))

    @property
    def affected(self) -> Bool[np.ndarray, "B"]:
        """Which images have outliers."""
        return np.asarray(self.outliers.any((1, 2)))

    @property
    def even_share(self) -> float:
        """The share of attention that the outliers would take if all tokens took the same."""
        some = self.outliers[self.affected]
        return float(some.sum((1, 2)).mean() / self.tokens) if len(some) else 0.0

    def share(self, side: Shares) -> Float[np.ndarray, "L"]:
        """The mean over the images that have outliers; zero if none has."""
        some = side[self.affected]
        return np.asarray(some.mean(0) if len(some) else np.zeros(side.shape[1]), np.float32)

    @property
    def said(self) -> str:
        total, images = int(self.outliers.sum()), len(self.images)
        among = f" in {int(self.affected.sum())} of {images} images" if images > 1 else ""
        if not total:
            most = f"has {self.largest[:, self.layer].max():.2g} times the median norm"
            return f"no outliers: the longest token after layer {self.layer}{among and ', of all images,'} {most}"
        read = self.share(self.read_share)
        peak, longest = int(read.argmax()), self.largest[:, self.layer].max()
        return (
            f"{count_of(total, 'outlier')}{among} after layer {self.layer}, up to {longest:.2g} "
            f"times the median norm; they take up to {percent(read[peak])} of the attention of {self.readout} "
            f"(layer {peak}), and are {percent(self.even_share)} of the tokens"
        )

    @property
    def provenance(self) -> dict[str, Any]:
        return {**super().provenance, "units": self.details["units"]}

    @property
    def details(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "layer": self.layer,
            "onset": self.onset,
            "outliers": [
                {"image": name, "count": int(count), "largest": float(largest)}
                for name, count, largest in zip(
                    self.images, self.outliers.sum((1, 2)), self.largest[:, self.layer], strict=True
                )
            ],
            "largest": self.largest.max(0).tolist(),
            "read_share": self.share(self.read_share).tolist(),
            "mean_share": self.share(self.mean_share).tolist(),
            "even_share": self.even_share,
            "units": [{**asdict(unit), "rise": unit.rise} for unit in self.units],
        }

    def figure(self, *, cells: bool = False) -> Figure:
        """The norms of one image with its outliers marked, the attention that they take by layer, and the units."""
        from vitreous.plot.outliers import outliers_figure

        return outliers_figure(self, cells=cells)


def registers(
    model: AnyModel, images: Any, *, ratio: float | int = RATIO, layer: int | None = None, most: int = MOST
) -> Registers:
    """Find the outlier tokens of one or more images, the attention that they take, and the `most` units behind them.

    ‖t_n⁽ˡ⁾‖ > ratio · median_m ‖t_m⁽ˡ⁾‖; `layer`: after which block (None: the one with the most outliers). The units
    are inputs of the second linear layer of an MLP, up to the layer where outliers appear, ranked by the mean of their
    |activation| at outliers less that at other patches.
    """
    if not ratio > 1:
        raise OptionError(f"ratio={ratio}: give a number above 1")
    if most < 1:
        raise OptionError(f"most={most}: give at least 1")
    given = of_model(images, model) if isinstance(images, Trace) else None
    wrapped = as_model(model) if given is None else given.model
    of_images(wrapped, "inspect works")
    listed = as_images(images, wrapped.channels) if given is None else given.images
    first = Trace(wrapped, listed[:1])
    refuse_view(first, "registers")
    views = Views.of(listed, wrapped)
    with torch.inference_mode(False), torch.autocast(first.images.device.type, enabled=False), torch.no_grad():
        some = Images(wrapped, listed)
        norms = norms_of(some)
        above = ratios_of(norms) > ratio
        number = busiest(norms, ratio) if layer is None else first.layer_number(layer)
        outliers, onset = above[:, number], first_layer(above, number)
        read, mean = shares_of(some, outliers)
        mlps = [mlp for mlp in find_mlps(first).values() if onset is not None and mlp.layer <= onset]
        units = units_of(some, outliers, mlps, most)
    shown = int(ratios_of(norms)[:, number].max((1, 2)).argmax())
    return Registers(
        model=wrapped.name,
        image=views.name(shown),
        photo=views[shown],
        images=tuple(views.name(i) for i in range(len(listed))),
        shown=shown,
        ratio=float(ratio),
        layer=number,
        onset=onset,
        readout=readout_name(first.layout),
        norms=norms,
        read_share=read,
        mean_share=mean,
        tokens=first.layout.tokens,
        units=tuple(units),
        views=views,
        made_by=Origin.of(wrapped, first.size),
    )


def busiest(norms: Norms, ratio: float | int) -> int:
    """The layer with the most outliers; of several, or where there are none, the one with the largest ratios."""
    ratios = ratios_of(norms)
    counts, largest = (ratios > ratio).sum((0, 2, 3)), ratios.max((2, 3)).mean(0)
    return int(np.lexsort((largest, counts))[-1])


def first_layer(above: Bool[np.ndarray, "B L h w"], layer: int) -> int | None:
    """The first layer after which at least half of the outliers of `layer` are outliers."""
    outliers = above[:, layer]
    if not outliers.any():
        return None
    shares = [(above[:, i] & outliers).sum() / outliers.sum() for i in range(layer + 1)]
    return next(i for i, share in enumerate(shares) if share >= 0.5)
