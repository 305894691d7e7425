"""One recorded attention call: queries, keys, values and output; A itself is computed on demand.

O = A·V,   A = softmax(s·Q·Kᵀ + bias),   ∂y/∂A = ∂y/∂O · Vᵀ
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.errors import CaptureError
from vitreous.types import HeadRows, Heads, Keys, Row, Weights

if TYPE_CHECKING:
    from vitreous.capture.triton_kernels import Fused

FUSED = (torch.float16, torch.bfloat16)  # not float32, for which tensor cores are not precise enough
WIDEST = 128  # maximum width of a head
ROWS = 512  # rows of A that are formed at a time
CACHE = 2**20  # bytes of A that are formed at a time on a CPU
MOST = 2**21  # the same of one image, of which at least so many rows:
LEAST = 32


def same(t: Tensor) -> Tensor:
    return t


@dataclass(eq=False)
class Attention:
    """One attention call. A is never stored; it is recomputed on demand, in full or by rows."""

    name: str  # the module that called it: "blocks.3.attn"
    door: str  # sdpa, mha or eager
    node: Tensor  # O in the model's own axes, part of the autograd graph
    v: Keys
    q: Heads | None = None
    k: Keys | None = None
    scale: float = 1.0
    bias: Tensor | None = None  # [B|1 H|1 N|1 M], added to the scores
    given: Weights | None = None  # A, if the model itself formed it
    followed: bool = False  # whether its backward visits A and ∂y/∂A (attention_backward.py)
    number: int = -1  # which attention call of the forward pass this is
    only: list[int] | None = None  # the rows of O that were computed (narrowed_block.py); None: all
    keys: Tensor | None = None  # K in the autograd graph (for the eager door: in the model's own axes)
    factors: tuple[Tensor, Tensor] | None = None  # if A was given: the factors of its scores
    parts: int = 1  # of how many calls it was put together (joined.py)
    mixed: bool = False  # A is a changed softmax: heads mixed, two softmaxes combined; of any sign, with any sum
    fold: Callable[[Tensor], Tensor] = field(default=same, repr=False)  # the model's axes -> [B H N d]

    @property
    def out(self) -> Heads:
        return self.fold(self.node)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes B, H, N, M of A."""
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
        """Only these rows of A: [B H rows M], at least float32."""
        index = run_of(index)
        if self.given is not None:
            return widen(self.given[:, :, index])
        assert self.q is not None and self.k is not None
        scores = (widen(self.q[:, :, index]) * self.scale) @ widen(self.k).mT  # [B H rows M]
        if self.bias is not None:
            bias = self.bias if self.bias.shape[-2] == 1 else self.bias[..., index, :]
            scores = scores + widen(bias)
        return scores.softmax(-1)

    def chunks(self, tokens: list[int] | None = None) -> Iterator[tuple[slice | list[int], Weights]]:
        """The rows of A of these tokens (None: of all tokens), some at a time."""
        if tokens is not None:
            yield tokens, self.rows(tokens)
            return
        for index in self.spans():
            yield index, self.rows(index)

    def pieces(self) -> Iterator[tuple[slice, Attention]]:
        """Slices of a few images, so that their A stays in the CPU cache; without O."""
        b, h, n, m = self.shape
        size = b if self.v.is_cuda else max(1, CACHE // (4 * h * min(n, ROWS) * m))
        for images in [slice(start, start + size) for start in range(0, b, size)]:
            q, k, given = (None if t is None else t[images] for t in (self.q, self.k, self.given))
            bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[images]
            part = Attention(self.name, self.door, self.node, self.v[images], q, k, self.scale, bias, given)
            part.mixed = self.mixed
            yield images, part

    def folded(self, arrange: Callable[[Tensor], Tensor]) -> Attention:
        """The same with the leading axes of Q, K, V, A and O arranged in another way."""
        b, h, n, m = self.shape
        bias = None if self.bias is None else arrange(self.bias.expand(b, h, n, m))
        q, k, given = (None if t is None else arrange(t) for t in (self.q, self.k, self.given))
        fold = self.fold
        return replace(
            self, v=arrange(self.v), q=q, k=k, bias=bias, given=given, factors=None, fold=lambda t: arrange(fold(t))
        )

    def spans(self) -> list[slice]:
        """All rows of A, `ROWS` at a time, or fewer where they are long."""
        _, h, n, m = self.shape
        size = ROWS if self.v.is_cuda else min(ROWS, max(LEAST, MOST // (4 * h * m)))
        return [slice(start, start + size) for start in range(0, n, size)]

    def read(self, weights: Float[Tensor, "B N"], tokens: list[int] | None = None) -> HeadRows:
        """Σᵢ weightsᵢ·Aᵢ for every head; only the rows of `tokens` are formed (None: all rows)."""
        if self.fusible:
            rows = slice(None) if tokens is None else run_of(tokens)
            return self.fused(rows=rows).read(weights[:, rows])
        row = weights[:, None, None]  # [B 1 1 N]
        if tokens is not None:
            return (row[..., run_of(tokens)] @ self.rows(tokens))[:, :, 0]
        parts = [sum_of(row[i][..., n] @ a for n, a in part.chunks()) for i, part in self.pieces()]
        return torch.cat(parts)[:, :, 0]

    @property
    def fusible(self) -> bool:
        """Whether sums over A can be computed without forming A (triton_kernels.py)."""
        return self.q is not None and self.bias is None and fusible(self.q)

    def fused(self, grad: Tensor | None = None, rows: slice | list[int] = slice(None)) -> Fused:
        """Sums over these rows of A, or with ∂y/∂O [B H N d] (of one or more targets) over A ⊙ ∂y/∂A."""
        from vitreous.capture.triton_kernels import Fused

        assert self.q is not None and self.k is not None
        if grad is None:
            return Fused(self.q[:, :, rows].detach(), self.k.detach(), self.scale)
        q = self.q if self.only is None else self.q[:, :, run_of(self.only)]
        return Fused(q.detach(), self.k.detach(), self.scale, self.v.detach(), grad)

    def weights_grad(self, grad: Tensor, index: slice | list[int] = slice(None)) -> Weights:
        """These rows of ∂y/∂A, from ∂y/∂O as autograd returns it for `node`."""
        return self.out_rows(grad, index) @ widen(self.v).mT

    def out_rows(self, out: Tensor, index: slice | list[int]) -> Heads:
        """These rows of O or ∂y/∂O, [B H rows d]; all computed rows if only some were computed."""
        folded = self.fold(out)
        return widen(folded if self.only is not None else folded[:, :, index])

    @torch.no_grad()
    def error(self) -> Row:
        """max |A·V − O| / max |O| for each image and head; zero up to rounding if the capture is correct."""
        out = widen(self.out)
        off = torch.zeros(self.shape[:2], dtype=out.dtype, device=out.device)
        for i, a in self.chunks(self.only):
            off = torch.maximum(off, (a @ widen(self.v) - self.out_rows(self.node, i)).abs().amax((-1, -2)))
        return off / out.abs().amax((-1, -2)).clamp_min(torch.finfo(out.dtype).tiny)

    def projected(self) -> tuple[Heads, Keys, float] | None:
        """Q, K and s with A = softmax(s·Q·Kᵀ), also if the model multiplied them itself; None if not recorded.

        In that case s is fitted: the slope of log A over Q·Kᵀ, both with their row means subtracted.
        """
        if self.q is not None and self.k is not None:
            return self.q, self.k, self.scale
        if self.given is None or self.factors is None or self.mixed:
            return None
        if any(t.ndim != self.node.ndim for t in self.factors):
            return None
        q, k = (widen(self.fold(t)) for t in self.factors)
        b, h, n, m = self.shape
        for kt in (k, k.mT):  # multiplied as Kᵀ, or as K by an einsum
            if q.shape[:3] == (b, h, n) and kt.shape == (b, h, q.shape[-1], m):
                s = self.fitted((q @ kt).detach())
                if s is not None:
                    return q, kt.mT, s
        return None

    def fitted(self, scores: Weights) -> float | None:
        """s with A = softmax(s·scores), if there is one."""
        assert self.given is not None
        a = widen(self.given.detach())
        x, y = (t - t.mean(-1, keepdim=True) for t in (scores, a.clamp_min(1e-30).log()))
        s = float((x * y).sum() / (x * x).sum().clamp_min(1e-30))
        return s if ((scores * s).softmax(-1) - a).abs().max() < 1e-3 else None

    def verify(self, tolerance: float | None = None) -> None:
        """Raise unless A·V equals the layer's output."""
        limit = tolerance or {torch.float64: 1e-10, torch.float32: 1e-4}.get(self.node.dtype, 3e-2)
        worst = self.error().max().item()
        if not worst <= limit:
            raise CaptureError(
                f"the attention captured in {self.name or 'the model'} does not reproduce its output "
                f"(the relative error of A·V is {worst:.1e}); please report this model"
            )


def folding(ndim: int, images: int) -> Callable[[Tensor], Tensor]:
    """Reshape [B·H n d] (or windows [B W H n d]) to [B H n d]."""
    if ndim == 3:
        return lambda t: t.reshape(images if t.shape[0] % images == 0 else t.shape[0], -1, *t.shape[1:])
    if ndim > 4:
        return lambda t: t.flatten(0, -4)
    return same


def fusible(q: Tensor) -> bool:
    """Whether there are kernels for queries of this type and width."""
    return q.is_cuda and q.dtype in FUSED and q.shape[-1] <= WIDEST and triton()


@cache
def triton() -> bool:
    """Whether kernels can be compiled for this GPU."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (7, 0)


def widen(t: Tensor) -> Tensor:
    """Cast to at least float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    close = 1e-4 if other.dtype in (torch.float32, torch.float64) else 5e-2
    alike = one.shape == other.shape
    return alike and bool((widen(one) - widen(other)).abs().max() <= close * widen(other).abs().max())


def run_of(tokens: slice | list[int]) -> slice | list[int]:
    """A slice if the tokens are consecutive; unlike an index list, it needs no copy to the GPU, hence no wait."""
    if isinstance(tokens, slice) or tokens != list(range(tokens[0], tokens[-1] + 1) if tokens else ()):
        return tokens
    return slice(tokens[0], tokens[-1] + 1) if tokens else slice(0, 0)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total


def rows_of(mask: Tensor | None, rows: list[int]) -> Tensor | None:
    """The mask of these queries only."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., run_of(rows), :]
