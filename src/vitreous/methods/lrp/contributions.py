"""What the score of one image consists of under the Libra gradient: tokens × gradient, and biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous.capture.attention import sum_of, widen
from vitreous.errors import Unsupported
from vitreous.trace.batched_targets import beginning
from vitreous.trace.ruled import Pair, entering_blocks, ruled, token_grads
from vitreous.trace.rules.constants import Added
from vitreous.trace.rules.libra import LIBRA
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

CLOSE, HALF = {torch.float32: 1e-3, torch.float64: 1e-6}, 5e-2  # errors of a complete sum, by precision


@dataclass(frozen=True)
class Contributions:
    """Σ h·∂y/∂h of any block's tokens, plus the biases from that block on, is the score."""

    pairs: list[Pair]  # the tokens that enter each block, and their gradients
    added: list[Added]
    score: float  # Σ output ⊙ ∂y/∂output: the logit, for a class

    def error(self, layer: int = 0) -> float:
        """The sum of all contributions from a block on, less the score; zero up to rounding."""
        return float(sum_of(part.sum() for part in self.parts(layer))) - self.score

    def size(self, layer: int = 0) -> float:
        """The sum of their absolute values, with which an error is compared."""
        return float(sum_of(part.abs().sum() for part in self.parts(layer)))

    def parts(self, layer: int) -> Iterator[Tensor]:
        tokens, grad = self.pairs[layer]
        yield (tokens * grad).sum(-1)
        yield from (one.values for one in self.added if one.block >= layer)


def contributions(trace: Trace, target: Target) -> Contributions:
    """All contributions to the score of the only image of a trace; raise if they do not sum to it."""
    assert len(trace) == 1, "the tokens of one image can be told apart in any layout of the axes"
    found = ruled(trace, LIBRA, constants=True)
    assert found.constants is not None
    found.constants.found.clear()
    pairs = token_grads(trace, found, target, entering_blocks(trace, found))
    ends = found.run.output, found.run.embedding
    score = sum_of((widen(end.detach()) * widen(start)).sum() for end, start in zip(ends, beginning(target, *ends)))
    parts = Contributions(pairs, list(found.constants.found), float(score))
    off = abs(parts.error()) / (parts.size() or 1.0)
    if not off <= (HALF if trace.autocast else CLOSE.get(trace.model.dtype, HALF)):
        said = f"tokens and biases of {trace.model.name} do not sum to its score (they are off by {off:.1%})"
        raise Unsupported(f"{said}: some function has no rule that conserves relevance. Try bias=False.")
    return parts


def bias_map(trace: Trace, added: list[Added]) -> Map:
    """The contributions of all biases, each at its token; those behind the read-out at the tokens that are read."""
    total = trace.images.new_zeros(1, *trace.layout.cells, dtype=torch.float32)
    for one in added:
        total = total + placed(trace, one.values)
    return total


def placed(trace: Trace, values: Tensor) -> Map:
    """Values of the tokens of one image, [N], [H N], [N H], [h w] or one number, on the patch grid."""
    layout, row = trace.layout, values.squeeze()
    if tuple(row.shape) == layout.cells:
        return row[None]
    if row.ndim == 2:  # by head
        row = row.sum(0) if layout.to_grid(row[:1, :, None]) is not None else row.sum(1)
    found = layout.to_grid(row.reshape(1, -1, 1))
    if found is not None:
        return found[..., 0]
    if row.numel() == 1 and layout.readout:
        return trace.map(trace.readout * row)
    if row.numel() == len(layout.read_tokens or ()):  # the last block ran for these tokens only
        whole = row.new_zeros(1, layout.tokens)
        whole[0, list(layout.readout)] = row.flatten()
        return trace.map(whole)
    told = "×".join(map(str, values.shape))
    raise Unsupported(f"{trace.model.name} has biases ({told}) that cannot be matched with its tokens. Try bias=False.")
