"""What a class loses without a latent, by really running the model without it.

effect    y(x) − y(x − a_j·d_j)        the patch tokens of the layer lose the latent's part; y the logit or probability
control   y(x) − y(x − a_j·u)          as much is taken away along a random direction u, ‖u‖ = 1
first order  Σ_p a_j(x_p)·(d_j·∂y/∂x_p)   which latents are tried: the largest of these
tokens    y(all) − y(without the patches that have the latent), beside as many random patches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitreous._support.statistics import intervals
from vitreous.capture.attention import widen
from vitreous.evaluation.discover.tokens import Patches, patch_gradient, run_changed
from vitreous.trace.latents import Latents
from vitreous.trace.perturb.drop_tokens import ends_keeping
from vitreous.trace.perturb.dropped_runs import kept
from vitreous.trace.target import Class, Target
from vitreous.trace.trace import Trace

DRAWS = 4  # random sets of patches beside the patches of a latent
MOST = 0.5  # of the patches are removed at most

Both = tuple[Target, Target]  # a class by its logit and by its probability


def measured_by(trace: Trace, classes: Sequence[int]) -> Both:
    """The class of each image, by logit and by probability."""
    target, model = Class(tuple(classes)), trace.model
    return (
        target.graded(model.meaning, "logit", model.exclusive),
        target.graded(model.meaning, "probability", model.exclusive),
    )


def scores(trace: Trace, by: Both, run: object = None) -> Float[Tensor, "2 B"]:
    return torch.stack([trace.score(target, run).detach() for target in by])  # type: ignore[arg-type]


def first_order(trace: Trace, latents: Latents, patches: Patches, by: Both) -> Float[Tensor, "B K"]:
    """What the logit would lose without each latent, were the rest of the model linear."""
    own = latents.to(patches.new_zeros(0))
    gradient = patch_gradient(trace, latents.layer, by[0])
    return (own.encode(patches) * (gradient.to(own.decoder) @ own.decoder.mT)).sum(1)


def ablate(trace: Trace, latents: Latents, index: int, by: Both, seed: int) -> Float[Tensor, "4 B"]:
    """The effect on logit and probability without a latent, and the same for the control."""
    before = scores(trace, by)
    found = []
    for along in (latents.decoder[index], random_direction(latents, index, seed)):

        def change(patches: Patches, along: Tensor = along) -> Patches:
            own = latents.to(widen(patches).new_zeros(0))
            a = own.encode(widen(patches))[..., index, None]
            return patches - (a * along.to(a)).to(patches.dtype)

        found.append(before - scores(trace, by, run_changed(trace, latents.layer, change)))
    return torch.cat(found)


def random_direction(latents: Latents, index: int, seed: int) -> Float[Tensor, "D"]:
    chance = torch.Generator().manual_seed(1_000_003 * seed + index)
    return F.normalize(torch.randn(latents.decoder.shape[1], generator=chance), dim=0)


def remove(
    trace: Trace, by: Both, activations: Float[Tensor, "B P"], numbers: Sequence[int], seed: int
) -> Float[Tensor, "5 B"]:
    """The loss of logit and probability without the patches that have a latent, the same without random ones, and
    how many patches that are; NaN where none has it."""
    patches = activations.shape[1]
    found = torch.full((5, len(trace)), torch.nan, dtype=torch.float64)
    before = scores(trace, by)
    for i, row in enumerate(activations):
        gone = min(int((row > 0).sum()), int(MOST * patches))
        if gone == 0:
            continue
        chance = torch.Generator().manual_seed(1_000_003 * seed + numbers[i])
        orders = [row.argsort(descending=True, stable=True).cpu()]
        orders += [torch.randperm(patches, generator=chance) for _ in range(DRAWS)]
        keep = kept(trace, torch.stack([order[gone:].sort().values for order in orders]).to(row.device))
        rows = [i] * len(orders)
        ends = ends_keeping(trace, rows, keep)
        after = torch.stack([widen(target.of_rows(rows)(*ends)) for target in by])
        lost = before[:, i, None] - after
        values = [lost[0, 0], lost[1, 0], lost[0, 1:].mean(), lost[1, 1:].mean(), torch.tensor(gone)]
        found[:, i] = torch.stack([value.double().cpu() for value in values])
    return found


# ---------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Spread:
    """A mean over images and its 95 % bootstrap interval; NaN from fewer than two images."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Float[np.ndarray, "N"], seed: int = 0) -> Spread:
        known = np.asarray(values, np.float64)
        known = known[np.isfinite(known)]
        if len(known) == 0:
            return cls(float("nan"), float("nan"), float("nan"))
        low, high = intervals(known[None], seed)[:, 0]
        return cls(float(known.mean()), float(low), float(high))

    def __str__(self) -> str:
        if np.isnan(self.mean):
            return "—"
        ends = "" if np.isnan(self.low) else f" [{signed(self.low)}, {signed(self.high)}]"
        return f"{signed(self.mean)}{ends}"


def signed(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


@dataclass(frozen=True)
class Effect:
    """What one class loses without one latent."""

    number: int  # of the class
    label: str
    latent: int
    images: int
    predicted: float  # first order, logit
    logit: Spread
    control: Spread  # along a random direction, logit
    gain: Spread  # effect less control, paired
    probability: Spread
    removed: Spread | None = None  # logit lost without the latent's patches
    random: Spread | None = None  # without as many random ones
    removed_gain: Spread | None = None  # the difference, paired
    patches: float = float("nan")  # how many, on average


def top_latents(
    predicted: Float[Tensor, "N K"], classes: Int[Tensor, "N"], count: int
) -> list[tuple[int, list[int], list[int]]]:
    """Each class with its images and the latents that it should lose most without."""
    found = []
    for number in sorted(set(classes.tolist())):
        rows = (classes == number).nonzero()[:, 0].tolist()
        best = predicted[rows].mean(0).topk(min(count, predicted.shape[1])).indices.tolist()
        found.append((number, rows, best))
    return found
