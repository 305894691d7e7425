"""Run a model under a table of rules, and compute the relevance."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.errors import Unsupported
from vitreous.trace.ruled import Ruled, only_grad_under, ruled
from vitreous.trace.rules.mode import Table
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map


def relevance_map(trace: Trace, target: Target, table: Table | None, wrt: Literal["tokens", "image"]) -> Map:
    """x·∂y/∂x under the rules (None: the plain gradient), channels summed: of the patches at the first block, or of
    the pixels.
    """
    if wrt == "tokens":
        return on_grid(trace, token_relevance(trace, target, table)).sum(-1)
    return image_relevance(trace, target, table).sum(-3)


def on_grid(trace: Trace, tokens: Tensor) -> Float[Tensor, "B *frames h w D"]:
    """Arrange tokens [B N D], [B h w D] or [B D h w] on the patch grid of the first block."""
    if tokens.ndim == 4 and tokens.shape[0] == len(trace):
        for placed in (tokens, tokens.movedim(1, -1)):
            if covers((placed.shape[1], placed.shape[2]), trace.size):
                return placed
    elif tokens.ndim == 3 and tokens.shape[0] == len(trace):
        with suppress(Unsupported):
            return trace.to_patches(tokens)
    found = "×".join(map(str, tokens.shape[1:]))
    raise Unsupported(f"the first block of {trace.model.name} takes {found}, which is not a patch grid; use wrt=image")


def covers(grid: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether the grid divides an image of that size into square patches."""
    patch = -(-size[0] // grid[0])
    return grid == (-(-size[0] // patch), -(-size[1] // patch))


def token_relevance(trace: Trace, target: Target, table: Table | None) -> Tensor:
    """x·∂y/∂x of all tokens that enter the first block, [B N D] (or [B h w D])."""
    found = ruled(trace, table, seen=False, blocks=False)
    if found.first is None:
        raise Unsupported(f"the tokens that enter the first block of {trace.model.name} are not visible; use wrt=image")
    return trace.batch_first(relevance_of(found.first, trace, target, found))


def image_relevance(trace: Trace, target: Target, table: Table | None) -> Tensor:
    """x·∂y/∂x of the pixels, [B channels Y X]."""
    found = ruled(trace, table, seen=False, blocks=False)
    return relevance_of(found.run.images, trace, target, found)


def relevance_of(x: Tensor, trace: Trace, target: Target, found: Ruled) -> Tensor:
    grad = only_grad_under(trace, found, target, x)
    return widen(x.detach()) * widen(grad)
