"""One attention call: queries, keys, values and output; A itself only when it is asked for.

O = A·V,   A = softmax(s·Q·Kᵀ + bias),   ∂y/∂A = ∂y/∂O · Vᵀ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.errors import CaptureError
from vitreous.types import HeadRows, Heads, Keys, Row, Weights

ROWS = 512  # how many rows of A are formed at a time where all are read


def same(t: Tensor) -> Tensor:
    return t


@dataclass(eq=False)
class Attention:
    """One attention call. A is never kept: it is computed anew, whole or by rows, when it is asked for."""

    name: str  # the module that called it: "blocks.3.attn"
    door: str  # sdpa, mha or eager
    node: Tensor  # O as the model made it: what autograd knows
    v: Keys
    q: Heads | None = None
    k: Keys | None = None
    scale: float = 1.0
    bias: Tensor | None = None  # [B|1 H|1 N|1 M], added to the scores
    given: Weights | None = None  # A, where the model itself formed it
    followed: bool = False  # does its backward show A and ∂y/∂A (follow.py)?
    keys: Tensor | None = None  # what autograd knows as K (for the eager door: in the model's own axes)
    fold: Callable[[Tensor], Tensor] = field(default=same, repr=False)  # the model's axes -> [B H N d]

    @property
    def out(self) -> Heads:
        return self.fold(self.node)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, N, M."""
        a = self.given if self.given is not None else cast(Tensor, self.q)
        return a.shape[0], a.shape[1], a.shape[2], self.v.shape[2]

    @property
    def wide(self) -> torch.dtype:
        """The precision in which A is computed: at least float32."""
        return torch.promote_types(self.v.dtype, torch.float32)

    @property
    def weights(self) -> Weights:
        return self.rows(slice(None))

    def rows(self, index: slice | list[int]) -> Weights:
        """These rows of A, nothing else: [B H rows M], at least float32."""
        if self.given is not None:
            return widen(self.given[:, :, index])
        assert self.q is not None and self.k is not None
        scores = (widen(self.q[:, :, index]) * self.scale) @ widen(self.k).mT  # [B H rows M]
        if self.bias is not None:
            bias = self.bias if self.bias.shape[-2] == 1 else self.bias[..., index, :]
            scores = scores + widen(bias)
        return scores.softmax(-1)

    def chunks(self, tokens: list[int] | None = None) -> Iterator[tuple[slice | list[int], Weights]]:
        """The rows of A of these tokens (None: of all), `ROWS` at a time."""
        if tokens is not None:
            yield tokens, self.rows(tokens)
            return
        for start in range(0, self.shape[2], ROWS):
            index = slice(start, start + ROWS)
            yield index, self.rows(index)

    def read(self, weights: Float[Tensor, "B N"], tokens: list[int] | None = None) -> HeadRows:
        """Σᵢ weightsᵢ·Aᵢ for every head; only the rows of `tokens` are formed (None: of all)."""
        row = weights[:, None, None]  # [B 1 1 N]
        return sum_of(row[..., i] @ a for i, a in self.chunks(tokens))[:, :, 0]

    def weights_grad(self, grad: Tensor, index: slice | list[int] = slice(None)) -> Weights:
        """∂y/∂A (these rows) from ∂y/∂O (as autograd gives it for `node`)."""
        return widen(self.fold(grad)[:, :, index]) @ widen(self.v).mT

    @torch.no_grad()
    def error(self) -> Row:
        """max |A·V − O| over max |O|, for each image and head: zero but for rounding, or the capture is wrong."""
        out = widen(self.out)
        off = torch.zeros(self.shape[:2], dtype=out.dtype, device=out.device)
        for i, a in self.chunks():
            off = torch.maximum(off, (a @ widen(self.v) - out[:, :, i]).abs().amax((-1, -2)))
        return off / out.abs().amax((-1, -2)).clamp_min(torch.finfo(out.dtype).tiny)

    def verify(self, tolerance: float | None = None) -> None:
        """Raise unless A·V is what the layer itself returned."""
        limit = tolerance or {torch.float64: 1e-10, torch.float32: 1e-4}.get(self.node.dtype, 3e-2)
        worst = self.error().max().item()
        if not worst <= limit:
            raise CaptureError(
                f"the attention seen in {self.name or 'the model'} does not reproduce its output "
                f"(A·V is off by {worst:.1e} of its size); please report this model"
            )


def widen(t: Tensor) -> Tensor:
    """At least float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total
