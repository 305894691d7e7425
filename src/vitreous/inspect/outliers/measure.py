"""Measurements of a set of images: the norms of tokens, the attention that some of them take, the units behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitreous._support.memory import in_batches
from vitreous._support.precision import widest
from vitreous.capture.attention import Attention, widen
from vitreous.inspect.outliers.mlps import Mlp, watch_units
from vitreous.models.model import Model
from vitreous.trace.apply import images_at_once
from vitreous.trace.block_outputs import watch_blocks
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace

T = TypeVar("T")
Norms = Float[np.ndarray, "B L h w"]
Outliers = Bool[np.ndarray, "B h w"]
Shares = Float[np.ndarray, "B L"]


@dataclass(frozen=True, eq=False)
class Images:
    """A model and images, run a few at a time."""

    model: Model
    images: Any  # a tensor, or a list

    def __len__(self) -> int:
        return len(self.images)

    def each(self, work: Callable[[Trace, slice], T], what: str) -> list[T]:
        """Do something with a trace of a few images after the other."""

        def run(part: slice) -> T:
            return work(Trace(self.model, self.images[part]), part)

        return in_batches(run, len(self), images_at_once(self.model, self.images), what)


def norms_of(images: Images) -> Norms:
    """‖token‖ of each patch as it leaves each block."""

    def work(trace: Trace, part: slice) -> np.ndarray:
        taken: dict[int, Tensor] = {}

        def keep(layer: int, tokens: Tensor) -> None:
            taken[layer] = torch.linalg.vector_norm(widen(trace.to_patches(tokens)), dim=-1)

        trace.run(trace.images, Run.to_output().unseen().inside(partial(watch_blocks, trace, keep)))
        stacked = torch.stack([taken[layer] for layer in range(trace.layout.layers)], 1)
        return stacked.float().cpu().numpy()

    return np.concatenate(images.each(work, "norms, images"))


def ratios_of(norms: Norms) -> Norms:
    """The norms against the median of the patches of the same image and layer."""
    median = np.median(norms.reshape(*norms.shape[:2], -1), -1)[..., None, None]
    return np.asarray(norms / np.maximum(median, np.finfo(np.float32).tiny), np.float32)


# ---------------------------------------------------------------------------------------------------------- attention


def shares_of(images: Images, outliers: Outliers) -> tuple[Shares, Shares]:
    """The share of attention that the outliers take in each layer: of the read-out's, and of all tokens' on average."""

    def work(trace: Trace, part: slice) -> tuple[np.ndarray, np.ndarray]:
        marked = on_tokens(trace, outliers[part])  # [B N]
        pairs = [shares_in(trace, layer, marked.to(layer.wide)) for layer in trace.attention]
        read, mean = (torch.stack(side, 1).float().cpu().numpy() for side in zip(*pairs))
        return read, mean

    parts = images.each(work, "attention, images")
    read, mean = (np.concatenate(side) for side in zip(*parts))
    return read, mean


def on_tokens(trace: Trace, outliers: Outliers) -> Float[Tensor, "B N"]:
    """One for each token that is an outlier, else zero."""
    marked = torch.zeros(len(outliers), trace.layout.tokens, device=trace.images.device)
    marked[:, trace.layout.patch_tokens] = torch.from_numpy(outliers).flatten(1).to(marked)
    return marked


def shares_in(trace: Trace, layer: Attention, marked: Float[Tensor, "B N"]) -> tuple[Tensor, Tensor]:
    """ρᵀA·m and 1ᵀA·m / N of each image, averaged over the heads; m: the marked tokens."""
    read = (trace.read_layer(layer).mean(1) * marked).sum(1)
    even = torch.full_like(marked, 1 / marked.shape[1])
    return read, (layer.read(even).mean(1) * marked).sum(1)


# -------------------------------------------------------------------------------------------------------------- units


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A hidden unit of an MLP, by its mean |activation|."""

    layer: int
    unit: int
    outliers: float  # at outliers
    others: float  # at the other patches of the same images
    adds: float  # `rise` times the norm of its weights: how far it lengthens the outliers

    @property
    def rise(self) -> float:
        """By how much outliers exceed the others; units are ranked by it."""
        return self.outliers - self.others

    @property
    def times(self) -> float:
        return self.outliers / self.others if self.others > 0 else float("inf")


@dataclass(eq=False)
class Sums:
    """Sums of |activation| of the units of one layer."""

    at: dict[bool, Tensor] = field(default_factory=dict)  # by whether the patch is an outlier

    def add(self, size: Float[Tensor, "B h w U"], outliers: Bool[Tensor, "B h w"]) -> None:
        for side, mask in ((True, outliers), (False, ~outliers)):
            part = (size * mask[..., None]).sum((0, 1, 2), dtype=widest(size.device))
            self.at[side] = self.at[side] + part if side in self.at else part


def units_of(images: Images, outliers: Outliers, mlps: Sequence[Mlp], most: int) -> list[Unit]:
    """The units with the largest rise, first to last; only images with outliers are counted."""
    some = np.flatnonzero(outliers.any((1, 2)))
    if not len(some) or not mlps:
        return []
    chosen = images.images[some] if isinstance(images.images, Tensor) else [images.images[i] for i in some]
    marked, sums = outliers[some], {mlp.layer: Sums() for mlp in mlps}

    def work(trace: Trace, part: slice) -> None:
        where = torch.from_numpy(marked[part]).to(trace.images.device)

        def keep(layer: int, hidden: Tensor) -> None:
            sums[layer].add(widen(trace.to_patches(hidden)).abs(), where)

        watching = partial(watch_units, trace, {mlp.layer: mlp for mlp in mlps}, keep)
        trace.run(trace.images, Run.to_output().unseen().inside(watching))

    Images(images.model, chosen).each(work, "units, images")
    return ranked(images.model, mlps, sums, int(marked.sum()), int((~marked).sum()), most)


def ranked(
    model: Model, mlps: Sequence[Mlp], sums: dict[int, Sums], outliers: int, others: int, most: int
) -> list[Unit]:
    found = []
    for mlp in mlps:
        inside, outside = sums[mlp.layer].at[True] / outliers, sums[mlp.layer].at[False] / max(others, 1)
        weight: Tensor = model.module.get_submodule(mlp.name).weight  # type: ignore[assignment]
        adds = (inside - outside).cpu() * torch.linalg.vector_norm(weight.detach().double().cpu(), dim=0)
        for unit in (inside - outside).topk(min(most, mlp.units)).indices.tolist():
            sizes = {"outliers": float(inside[unit]), "others": float(outside[unit]), "adds": float(adds[unit])}
            found.append(Unit(layer=mlp.layer, unit=unit, **sizes))
    return sorted(found, key=lambda one: -one.rise)[:most]
