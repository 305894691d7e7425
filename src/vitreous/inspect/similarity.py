"""Patch-to-patch similarity: which patches of the same image, and of others, have the features of one patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous._support.words import count_of
from vitreous.errors import OptionError
from vitreous.inspect.flow import Pixel, Place, patch_at, token_of
from vitreous.inspect.stream import Stream, stacked, streaming
from vitreous.inspect.view import AnyModel, Seen, View, span
from vitreous.models.stages import covering

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 2**31  # bytes of a matrix


@dataclass(frozen=True, eq=False, kw_only=True)
class Similarity(View):
    """The cosine of the features of one patch of the first image with those of every patch of all images."""

    name = "similarity"
    apart = ("maps", "matrix")
    images: tuple[str, ...]
    layers: tuple[int, ...]
    of: str
    normed: bool
    centred: bool  # the mean of all patches was subtracted first
    patch: Place  # on the patch grid of the model
    places: tuple[Place, ...]  # the same on the grid of each layer
    maps: Mapping[int, list[Float[np.ndarray, "h w"]]]  # by layer, one for each image
    matrix: Mapping[int, list[Float[np.ndarray, "h w y x"]]] | None = None  # of every patch of the first image

    def best(self, layer: int, index: int) -> tuple[Place, float]:
        """The most similar patch of an image and its cosine; in the first image, other than the patch itself."""
        map = self.maps[layer][index].copy()
        if index == 0:
            map[self.places[self.layers.index(layer)]] = -np.inf
        row, column = (int(i) for i in np.unravel_index(int(map.argmax()), map.shape))
        return (row, column), float(map[row, column])

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        found = {f"similarity_{i}": stacked(self.maps[i]) for i in self.layers}
        for i, some in ({} if self.matrix is None else self.matrix).items():
            found[f"matrix_{i}"] = stacked([one.transpose(2, 3, 0, 1) for one in some])  # [B y x h w]
        return found

    @property
    def said(self) -> str:
        last = self.layers[-1]
        told = []
        for index, name in enumerate(self.images[:3]):
            (row, column), cosine = self.best(last, index)
            told.append(f"{name} at {row},{column} ({cosine:.2f})")
        more = len(self.images) - len(told)
        others = f", and {count_of(more, 'image')} more" if more else ""
        return f"patch {self.patch[0]},{self.patch[1]} of {self.images[0]}, layer {last}: {'; '.join(told)}{others}"

    @property
    def details(self) -> dict[str, Any]:
        best = {
            str(i): [dict(zip(("patch", "cosine"), self.best(i, n))) for n in range(len(self.images))]
            for i in self.layers
        }
        return {"patch": list(self.patch), "layers": list(self.layers), "best": best}

    @property
    def title(self) -> str:
        where = span(list(self.layers), "layer", "layers")
        return f"Patches like {self.patch[0]},{self.patch[1]} of {self.images[0]} in {where} of {self.model}"

    def figure(self, *, cells: bool = False) -> Figure:
        """A row for each image, a column for each layer; the patch and its best matches are framed."""
        from vitreous.plot.features import similarity_figure

        return similarity_figure(self, cells=cells)


def similarity(
    model: AnyModel,
    images: Any,
    *,
    patch: Place | None = None,
    at: Pixel | None = None,
    layers: Sequence[int] | None = (-1,),
    of: str = "tokens",
    norm: bool | None = None,
    centred: bool = False,
    matrix: bool = False,
    batch: int | None = None,
) -> Similarity:
    """How similar every patch of all images is to one patch of the first, by layer (None: all).

    x·y / ‖x‖‖y‖; `patch`: row and column on the patch grid; `at`: a pixel (x, y) of the first image. `centred`: the
    mean of all patches of all images is subtracted first. `matrix`: also of every other patch of the first image.
    """
    if (patch is None) == (at is None):
        raise OptionError("give patch=(row, column) or at=(x, y): one of them")
    with streaming(model, images, layers, of, norm, batch) as stream:
        place = patch_at(Seen(stream.first, stream.views), at) if at is not None else patch
        assert place is not None
        token_of(stream.first.layout, place)  # in range?
        means = mean_features(stream) if centred else {}
        asked: dict[int, Tensor] = {}
        maps: dict[int, list[np.ndarray]] = {i: [] for i in stream.layers}
        whole: dict[int, list[np.ndarray]] = {i: [] for i in stream.layers}
        for taken in stream.each("similarity, images"):
            for i, some in taken.items():
                units = [unit(one, means.get(i)) for one in some]
                asked.setdefault(i, units[0])
                row, column = on_layer(stream, place, asked[i])
                maps[i] += [plain(one @ asked[i][row, column]) for one in units]
                if matrix:
                    refuse_large(asked[i], len(stream))
                    whole[i] += [plain(torch.einsum("hwd,yxd->hwyx", asked[i], one)) for one in units]
        return Similarity(
            **stream.about,
            centred=centred,
            patch=place,
            places=tuple(on_layer(stream, place, asked[i]) for i in stream.layers),
            maps=maps,
            matrix=whole if matrix else None,
        )


def unit(features: Float[Tensor, "h w D"], mean: Float[Tensor, "D"] | None) -> Float[Tensor, "h w D"]:
    """Vectors of length one."""
    moved = features if mean is None else features - mean
    return F.normalize(moved, dim=-1)


def plain(values: Tensor) -> np.ndarray:
    return values.float().cpu().numpy()


def mean_features(stream: Stream) -> dict[int, Float[Tensor, "D"]]:
    """The mean of all patches of all images, by layer."""
    sums: dict[int, Tensor] = {}
    counts = dict.fromkeys(stream.layers, 0)
    dtype = torch.float32
    for taken in stream.each("features, images"):
        for i, some in taken.items():
            for one in some:
                rows, dtype = one.reshape(-1, one.shape[-1]), one.dtype
                total = rows.sum(0, dtype=torch.float32 if rows.device.type == "mps" else torch.float64)
                sums[i] = sums[i] + total if i in sums else total
                counts[i] += len(rows)
    return {i: (total / counts[i]).to(dtype) for i, total in sums.items()}


def on_layer(stream: Stream, place: Place, features: Float[Tensor, "h w D"]) -> Place:
    """The patch on the grid of a layer, whose patches may be merged."""
    fine, own = stream.first.layout.grid, features.shape[:2]
    row, column = (int(covering(many, few)[i]) for i, many, few in zip(place, fine, own))
    if min(row, column) < 0:
        raise OptionError(f"patch {place[0]},{place[1]} is left over where patches are merged; choose another")
    return row, column


def refuse_large(features: Float[Tensor, "h w D"], images: int) -> None:
    """Raise if the similarity of all patches to all takes too much memory."""
    size = 4 * features[..., 0].numel() ** 2 * images
    if size > MOST:
        said = f"the similarity of all patches of {count_of(images, 'image')} takes {size / 2**30:.1f} GiB a layer"
        raise OptionError(f"matrix: {said}; give fewer images")
