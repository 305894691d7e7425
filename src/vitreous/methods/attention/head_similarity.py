"""CASS: how much each head's attention resembles the saliency of a class."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitreous._support.spread import pooled
from vitreous.capture.attention import sum_of
from vitreous.errors import OptionError, Unsupported
from vitreous.methods.gradient.smoothgrad import smooth_gradient, unit_noise
from vitreous.models.model import Model
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

Space = Literal["patch", "pixel"]
SMOOTH = {2: "bilinear", 3: "trilinear"}  # by the number of axes


def cass(
    model: Model | nn.Module | str | None,
    images: Any,
    target: Any = None,
    saliency: Map | None = None,
    *,
    space: Space = "patch",
    samples: int = 16,
    sigma: float = 0.15,
    seed: int = 0,
) -> Float[Tensor, "B L H"]:
    """The class-wise attention similarity score of every head, for each image.

    `saliency`: a ready φ [B h w] in place of |SmoothGrad|; `space="pixel"` compares at the image's resolution.
    """
    from vitreous.registry import METHODS
    from vitreous.trace.apply import as_model, choose, of_model, refuse

    declared = METHODS["cass_attention"]
    values = declared.check({"space": space, "samples": samples, "sigma": sigma, "seed": seed})
    trace = of_model(images, model) if isinstance(images, Trace) else Trace(as_model(model), images)
    refuse(trace, declared)
    chosen = choose(trace, target, declared)
    with torch.inference_mode(False), torch.no_grad():
        phi = (
            class_saliency(trace, chosen, **values) if saliency is None else torch.as_tensor(saliency).to(trace.images)
        )
        return similarities(trace, phi, space)


def class_saliency(trace: Trace, target: Target, *, space: str, samples: int, sigma: float, seed: int) -> Map:
    """φ = |SmoothGrad|, the mean over channels; summed over each patch in patch space."""
    grad = smooth_gradient(trace, target, unit_noise(trace, samples, seed), sigma).abs().mean(-3)  # [B Y X]
    return pool_patches(grad, trace.layout.cells) if space == "patch" else grad


def pool_patches(values: Map, cells: tuple[int, ...]) -> Float[Tensor, "B *cells"]:
    """The sum over each patch, or over each tubelet."""
    area = values[0].numel() / math.prod(cells)
    return pooled(values, cells) * area


def similarities(trace: Trace, phi: Map, space: str) -> Float[Tensor, "B L H"]:
    """cos(φ, ρᵀA) of every head, patches only."""
    wanted = trace.layout.cells if space == "patch" else trace.extent
    if tuple(phi.shape) != (len(trace), *wanted):
        raise OptionError(
            f"the saliency has shape {list(phi.shape)}; {[len(trace), *wanted]} is needed in {space} space"
        )
    heads = sorted({layer.shape[1] for layer in trace.attention})
    if len(heads) > 1:
        said = f"layers of {' and '.join(map(str, heads))} heads, which cannot be put into one table"
        raise Unsupported(f"{trace.model.name} has {said}. Try gae or rollout.")
    return torch.stack([similarity(trace, i, phi, space) for i in range(len(trace.attention))], 1)


def similarity(trace: Trace, layer: int, phi: Map, space: str) -> Float[Tensor, "B H"]:
    rows = head_maps(trace, layer)  # [B H h w]
    if space == "pixel":
        rows = F.interpolate(rows, trace.extent, mode=SMOOTH[len(trace.extent)], align_corners=False)
    return F.cosine_similarity(rows.flatten(2), phi.to(rows).flatten(1)[:, None], dim=-1)


def head_maps(trace: Trace, layer: int) -> Float[Tensor, "B H *frames h w"]:
    """ρᵀA of every head of a layer, as maps."""
    rows = trace.read_layer(trace.attention[layer]).detach()  # [B H M]
    b, heads, _ = rows.shape
    return trace.map(rows.flatten(0, 1)).reshape(b, heads, *trace.layout.cells)


def weighted_heads(trace: Trace, scores: Float[Tensor, "B L H"]) -> Map:
    """Σ_{l,h} S_lh · ρᵀA⁽ˡ⁾ₕ."""
    layers = range(scores.shape[1])
    return sum_of(torch.einsum("bh,bh...->b...", scores[:, i], head_maps(trace, i)) for i in layers)
