"""How three colour channels become one number per pixel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from vitreous.types import Map

Reduce = Literal["abs-mean", "sum", "max-abs"]


def reduce_channels(values: Tensor, how: Reduce) -> Map:
    """[B channels Y X] to [B Y X]; of videos, [B T channels Y X] to [B T Y X]."""
    if how == "sum":
        return values.sum(-3)
    return values.abs().mean(-3) if how == "abs-mean" else values.abs().amax(-3)


def keeps_sign(options: Mapping[str, Any]) -> bool:
    return bool(options["reduce"] == "sum")
