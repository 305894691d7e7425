"""Outputs that have a vector for each place of the image, [B C Y X]: segmentation, depth and other maps.

A network of mask queries scores class c at place p by the queries that mark the place: Σ_q softmax(class)[q, c] ·
sigmoid(mask)[q, p], without the last class, "no object".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import ModelError

KEYS = ("predicted_depth", "out")  # of the dictionaries that networks return
STRETCH = 1.3  # how much the proportions of the places may differ from those of the image


def find_places(raw: Mapping[str, Any]) -> Tensor | None:
    """The scores at places among named outputs, [B C Y X]; None if there are none."""
    classes, masks = raw.get("class_queries_logits"), raw.get("masks_queries_logits")
    if classes is not None and masks is not None:
        return by_queries(classes, masks)
    masks = raw.get("pred_masks")
    if masks is not None and raw.get("pred_boxes") is None:
        found: Tensor = masks.flatten(1, 2) if masks.ndim == 5 else masks  # of each prompt, its masks
        return found
    named: Tensor | None = next((raw[key] for key in KEYS if isinstance(raw.get(key), Tensor)), None)
    return named[:, None] if named is not None and named.ndim == 3 else named


def by_queries(classes: Tensor, masks: Tensor) -> Tensor:
    """Σ_q softmax(class)[q, c] · sigmoid(mask)[q, p].

    As exp(x − logsumexp x) and a convolution: a softmax, or a product, would be taken for attention.
    """
    shares = (classes - classes.logsumexp(-1, keepdim=True)).exp()[..., :-1].mT  # [B C Q]
    found = F.conv2d(masks.sigmoid().flatten(0, 1)[None], shares.flatten(0, 1)[..., None, None], groups=len(masks))
    return found.reshape(*shares.shape[:2], *masks.shape[-2:])


def is_plane(raw: Tensor, size: tuple[int, int] | None) -> bool:
    """Whether [B Y X] is one number for each pixel."""
    return tuple(raw.shape[1:]) == size


def as_places(raw: Tensor, name: str, size: tuple[int, int] | None) -> Tensor:
    """[B C Y X]; raise if the last two axes are not as high and wide as the image is."""
    if raw.ndim == 3:
        return raw[:, None]
    if size is None or is_alike(raw.shape[2:], size):
        return raw
    said = f"{name} returns {list(raw.shape)}: its last two axes are not places of a {size[0]}×{size[1]} image"
    if is_alike(raw.shape[1:3], size):
        raise ModelError(f"{said}; put the classes first: Model(net, forward=lambda x: net(x).permute(0, 3, 1, 2))")
    raise ModelError(f"{said}; say how to read it, e.g. Model(net, forward=lambda x: net(x).mean((2, 3)))")


def is_alike(shape: Sequence[int], size: tuple[int, int]) -> bool:
    """Whether two rectangles have about the same proportions; a single row or column may have been rounded."""
    (high, wide), (y, x) = shape, size
    ratio = (high * x) / max(1, wide * y)
    return 1 / STRETCH <= ratio <= STRETCH or abs(high - wide * y / x) <= 1 or abs(wide - high * x / y) <= 1
