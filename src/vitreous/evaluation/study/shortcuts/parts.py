"""The parts of an image: its most relevant patches, each with its relevance and its features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.attribute import attribute
from vitreous.declaration import Method
from vitreous.evaluation.study.kind import Scene
from vitreous.metrics.case import Case
from vitreous.metrics.shortcut.token_shortcut import covered
from vitreous.trace.apply import faults
from vitreous.trace.features import patch_features
from vitreous.trace.trace import Trace

NOTHING = "no patch speaks for the class: the map has no positive relevance"


def usual_layer(layers: int) -> int:
    """The block in the middle: its tokens know more than colours, and still tell of their own patch; late tokens are
    mixtures of the whole image, by which every patch of a class looks alike."""
    return (layers - 1) // 2


def features_of(trace: Trace, layer: int) -> Float[Tensor, "B P D"]:
    """The features of every patch; where a block has fewer tokens, those of the token that the patch is part of."""
    found = patch_features(trace, [layer])[layer]
    (h, w), (y, x) = trace.layout.grid, found.shape[1:3]
    rows, columns = (torch.arange(n, device=found.device) * m // n for n, m in ((h, y), (w, x)))
    return found[:, rows][:, :, columns].flatten(1, 2).float()


@dataclass(frozen=True, eq=False)
class Parts:
    """Of each image: its map, the places and shares of its parts, their features, and how far a mask covers them."""

    map: Float[np.ndarray, "B h w"]
    places: list[np.ndarray]
    shares: list[np.ndarray]
    features: dict[int, np.ndarray]
    inside: list[np.ndarray | None]
    outside: list[float | None]  # the share of all positive relevance
    errors: dict[int, str]


def parts_of(scene: Scene, declared: Method, values: dict[str, object], layer: int, most: int) -> Parts:
    """The `most` patches with the largest positive relevance, at most a quarter of all, each as a part of its own.

    A small mark is a few patches of much relevance, which the mean over a region or over the image would drown; a
    background is many patches that look alike, which the clusters put together again.
    """
    trace = scene.trace
    made = attribute(trace, declared, scene.target, values, strict=False)
    assert scene.target is not None
    maps = Case(trace, made.map, scene.target).patches
    positive = maps.flatten(1).clamp_min(0).double().nan_to_num(0, 0, 0)
    whole = positive.sum(1)
    shares = (positive / whole.clamp_min(1e-300)[:, None]).cpu().numpy()
    errors = faults(declared, made.map)
    errors |= {i: NOTHING for i in torch.nonzero(whole == 0)[:, 0].tolist() if i not in errors}
    with torch.no_grad():
        features = features_of(trace, layer).cpu().numpy()
    count = max(1, min(most, trace.layout.patches // 4))
    found = Parts(maps.cpu().numpy(), [], [], {}, [], [], errors)
    for i, share in enumerate(shares):
        order = np.argsort(-share, kind="stable")[:count]
        order = order[share[order] > 0]
        mask = scene.masks[i] if i < len(scene.masks) else None
        cover = None if mask is None else covered(trace, mask).numpy()
        found.places.append(order.astype(np.int32))
        found.shares.append(share[order].astype(np.float32))
        found.features[i] = features[i, order]
        found.inside.append(None if cover is None else cover[order].astype(np.float32))
        found.outside.append(None if cover is None else float((share * (1 - cover)).sum()))
    return found
