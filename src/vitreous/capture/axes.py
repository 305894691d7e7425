"""From a model's own axes to [B H N d], and masks as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import same
from vitreous.capture.functions import TAG


def folding(ndim: int, images: int) -> Callable[[Tensor], Tensor]:
    """From [B·H n d] (or windows [B W H n d]) to [B H n d]."""
    if ndim == 3:
        return lambda t: t.reshape(images if t.shape[0] % images == 0 else t.shape[0], -1, *t.shape[1:])
    if ndim > 4:
        return lambda t: t.flatten(0, -4)
    return same


def einsum_axes(args: tuple[Any, ...]) -> Any:
    """a, v, and how to bring a, v and the result to [B H N M], [B H M d] and [B H N d] (None: it cannot be done)."""
    equation, operands = args[0], args[1:]
    failed = (None, None, None, None, None)
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return failed
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if hasattr(operands[1], TAG):
        operands, terms = operands[::-1], terms[::-1]
    a, v = operands
    if not isinstance(a, Tensor) or not hasattr(a, TAG):
        return failed
    shared = [c for c in terms[0] if c in terms[1] and c in result]
    keys = [c for c in terms[0] if c in terms[1] and c not in result]
    queries = [c for c in terms[0] if c not in terms[1] and c in result]
    width = [c for c in terms[1] if c not in terms[0] and c in result]
    if not (len(shared) in (1, 2) and len(keys) == len(queries) == len(width) == 1) or terms[0][-1] != keys[0]:
        return a, v, None, None, None

    def order(term: str, last: list[str]) -> Callable[[Tensor], Tensor]:
        axes = [term.index(c) for c in shared + last]
        return lambda t: t.permute(axes) if len(axes) == 4 else t.permute(axes).unsqueeze(1)

    return a, v, order(terms[0], queries + keys), order(terms[1], keys + width), order(result, queries + width)


def additive(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """sdpa's mask as numbers to add to the scores."""
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return mask
