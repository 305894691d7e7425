"""A method as Quantus calls it; Quantus is not imported."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import nn

from vitreous.bridges.captum import enlarged
from vitreous.declaration import ConfiguredMethod
from vitreous.models.model import Model


def quantus_explain(
    model: Model | nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    method: str | ConfiguredMethod | None = None,
    device: Any = None,
    **options: Any,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An `explain_func` of Quantus: maps at the size of the images, [B 1 Y X].

    `inputs`: preprocessed images [B C Y X]; `targets`: the class of each, None: top-1. The method and its options come
    from `explain_func_kwargs`: {"method": "rollout", "discard": 0.9}. `device`: where to move the images; by default
    to that of the model.
    """
    wrapped = model if isinstance(model, Model) else Model(model)
    images = torch.as_tensor(inputs).to(device=device or wrapped.device, dtype=wrapped.dtype)
    maps = enlarged(wrapped, images, method, targets, options)
    return cast("np.ndarray[Any, np.dtype[np.float32]]", maps[:, None].cpu().numpy())
