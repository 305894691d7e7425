"""Principal components of patch features as colours: one basis for many images, kept in a file and used again.

The covariance of the features is accumulated in float64 over batches, so that its size does not depend on how many
images there are, nor its value, up to rounding, on their order or on the size of a batch.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from vitreous._support.arrays import save_arrays
from vitreous._support.marks import MEMBER, upgraded
from vitreous._support.statistics import otsu
from vitreous.errors import InputError, one_line

COUNT = 3  # components: red, green and blue
ENDS = (0.01, 0.99)  # of each component over all patches: where its colour ends
VIEW = "feature basis"  # what the mark of its file says
Parts = Float[np.ndarray, "... 3"]


class Covariance:
    """Mean and scatter of rows that come in batches.

    M₂ ← M₂ + Σ (x − x̄)(x − x̄)ᵀ + (x̄ − m)(x̄ − m)ᵀ · n b / (n + b) for b more rows, in float64
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.scatter: Tensor | None = None

    def add(self, rows: Float[Tensor, "b D"]) -> None:
        """Take more rows into account."""
        if len(rows):
            x = (rows if rows.device.type != "mps" else rows.cpu()).double()
            mean = x.mean(0)
            x = x - mean
            self._join(len(x), mean, x.mT @ x)

    def join(self, other: Covariance) -> None:
        """Take the rows of another into account."""
        if other.mean is not None and other.scatter is not None:
            self._join(other.count, other.mean, other.scatter)

    def _join(self, b: int, mean: Tensor, scatter: Tensor) -> None:
        if self.mean is None or self.scatter is None:
            self.count, self.mean, self.scatter = b, mean, scatter
            return
        away, total = mean - self.mean, self.count + b
        self.scatter = self.scatter + scatter + torch.outer(away, away) * (self.count * b / total)
        self.mean = self.mean + away * (b / total)
        self.count = total

    def components(self) -> Components:
        """The directions of largest variance; the largest entry of each is positive."""
        assert self.mean is not None and self.scatter is not None, "there are no rows"
        scatter = self.scatter.cpu()
        values, vectors = torch.linalg.eigh(scatter)
        axes = vectors.flip(1)[:, :COUNT].mT.contiguous()  # [3 D]
        size = values.flip(0)[:COUNT].clamp_min(0)
        largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
        axes = axes * torch.where(largest < 0, -1.0, 1.0)
        share = size / scatter.trace().clamp_min(1e-300)
        missing = COUNT - len(axes)  # features of one or two channels
        axes, share = F.pad(axes, (0, 0, 0, missing)), F.pad(share, (0, missing))
        ends = np.zeros((2, COUNT))
        return Components(self.mean.cpu().numpy(), axes.numpy(), share.numpy(), ends)


@dataclass(frozen=True, eq=False)
class Components:
    """A mean, three directions, the share of the variance along each, and where their colours end."""

    mean: Float[np.ndarray, "D"]
    axes: Float[np.ndarray, "3 D"]
    share: Float[np.ndarray, "3"]
    ends: Float[np.ndarray, "2 3"]

    def of(self, features: Float[Tensor, "*n D"]) -> Float[Tensor, "*n 3"]:
        """(x − m)·u of each direction u."""
        device = features.device if features.device.type != "mps" else torch.device("cpu")
        x = features.to(device).double() - torch.from_numpy(self.mean).to(device)
        return x @ torch.from_numpy(self.axes).to(device).mT

    def ending(self, parts: Parts) -> Components:
        """The same with colours that end where nearly all of these do."""
        flat = parts.reshape(-1, COUNT)
        ends = np.quantile(flat, ENDS, axis=0) if len(flat) else np.zeros((2, COUNT))
        return Components(self.mean, self.axes, self.share, ends)

    def colours(self, parts: Parts) -> Float[np.ndarray, "... 3"]:
        """Red, green and blue in 0…1."""
        low, high = self.ends
        span = np.where(high > low, high - low, 1.0)
        return np.asarray(np.where(high > low, np.clip((parts - low) / span, 0, 1), 0.5), np.float32)


@dataclass(frozen=True, eq=False)
class LayerBasis:
    """The basis of one layer; with a foreground, also where it begins and a basis of what is inside."""

    whole: Components
    inside: Components | None = None
    cut: float = 0.0
    side: int = 1  # 1: the foreground is above the cut; −1: below

    @property
    def shown(self) -> Components:
        """The components that colours stand for."""
        return self.whole if self.inside is None else self.inside

    def foreground(self, first: Float[np.ndarray, "*n"]) -> Bool[np.ndarray, "*n"]:
        """Whether each patch is foreground, by its first component."""
        return np.asarray(self.side * (first - self.cut) > 0)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        found = {name: getattr(self.whole, name) for name in FIELDS}
        if self.inside is not None:
            found |= {f"inside_{name}": getattr(self.inside, name) for name in FIELDS}
            found["cut"] = np.array([self.cut, self.side])
        return found

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> LayerBasis:
        whole = Components(**{name: arrays[name] for name in FIELDS})
        if "cut" not in arrays:
            return cls(whole)
        inside = Components(**{name: arrays[f"inside_{name}"] for name in FIELDS})
        return cls(whole, inside, float(arrays["cut"][0]), int(arrays["cut"][1]))


FIELDS = ("mean", "axes", "share", "ends")


def parted(whole: Components, first: list[Float[np.ndarray, "h w"]]) -> LayerBasis:
    """A foreground by Otsu's cut of the first component of all patches: the side that borders of images show less."""
    everything = np.concatenate([one.ravel() for one in first])
    cut = float(otsu(everything[None])[1][0])
    border = np.concatenate([np.concatenate([one[0], one[-1], one[:, 0], one[:, -1]]) for one in first])
    above = float((border > cut).mean()) - float((everything > cut).mean())
    return LayerBasis(whole, None, cut, -1 if above > 0 else 1)


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, eq=False)
class Basis:
    """The bases of some layers of a model, and what they were made of. `save` it, and give it to other images."""

    layers: Mapping[int, LayerBasis]
    told: Mapping[str, Any]  # the model, its weights, what the features are

    def save(self, path: str | Path) -> Path:
        """Write an .npz file."""
        file = Path(path)
        if file.suffix.lower() != ".npz":
            raise InputError(f"{file}: a basis is written as .npz; give a name that ends so")
        arrays = {f"{name}_{i}": array for i, one in self.layers.items() for name, array in one.arrays.items()}
        save_arrays(file, arrays, {"view": VIEW, **self.told, "layers": list(self.layers)})
        return file

    @classmethod
    def load(cls, path: str | Path) -> Basis:
        """Read what `save` wrote."""
        file = Path(path)
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
                told = upgraded(json.loads(str(stored[MEMBER])), file) or {}
                if told.get("view") != VIEW:
                    raise InputError(f"{file} holds no basis of features; write one with --save-basis or Basis.save")
                layers = {}
                for i in told["layers"]:
                    own = {name.removesuffix(f"_{i}"): stored[name] for name in stored.files if name.endswith(f"_{i}")}
                    layers[int(i)] = LayerBasis.of(own)
                return cls(layers, told)
        except FileNotFoundError:
            raise InputError(f"{file}: no such file") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{file} is not a basis written by vitreous ({one_line(error, 80)})") from None

    def fits(self, told: Mapping[str, Any], layers: list[int]) -> None:
        """Raise unless it is of this model, these features and these layers."""
        for name, what in (("model", "model"), ("digest", "weights"), ("of", "features"), ("normed", "norm")):
            mine, other = self.told.get(name), told.get(name)
            if mine != other:
                raise InputError(f"the basis is of another model or other features ({what}: {mine}, here {other})")
        missing = [i for i in layers if i not in self.layers]
        if missing:
            known = ", ".join(map(str, self.layers))
            raise InputError(f"the basis has no layer {missing[0]}; it has {known}. Choose these, or make another.")
