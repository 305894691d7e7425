"""How the heads of a layer become one."""

from __future__ import annotations

from torch import Tensor

from vitreous.errors import OptionError


def fuse_heads(values: Tensor, heads: str | int) -> Tensor:
    """[B H …] to [B …]: the mean, the largest, the smallest, or one head."""
    if heads == "mean":
        return values.mean(1)
    if heads == "max":
        return values.amax(1)
    if heads == "min":
        return values.amin(1)
    assert isinstance(heads, int)
    if not 0 <= heads < values.shape[1]:
        raise OptionError(f"head {heads} is out of range: the layer has heads 0 to {values.shape[1] - 1}")
    return values[:, heads]
