"""A of one image after another on a CPU, in the same memory.

Products of one image read Q, K and V where the model left them, which those of several images would copy first.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import ROWS, widen
from vitreous.types import Heads, Keys

LEAST = 2**16  # numbers in A of one image, for which a loop over images pays off


class OneImage:
    """Forms A of one image at a time; each replaces the one before."""

    def __init__(self, q: Heads, k: Keys, scale: float, bias: Tensor | None) -> None:
        self.q, self.k, self.scale, self.bias = q.detach(), k.detach(), scale, bias
        self.scores = q.new_empty(q.shape[1], q.shape[2], k.shape[2])
        self.a = torch.empty_like(self.scores)

    def weights(self, image: int) -> Float[Tensor, "H N M"]:
        """A of this image, until the next is asked for."""
        torch.baddbmm(self.scores, self.q[image], self.k[image].mT, beta=0, alpha=self.scale, out=self.scores)
        if self.bias is not None:
            self.scores += self.bias[image if len(self.bias) > 1 else 0]
        return torch.softmax(self.scores, -1, out=self.a)


def one_by_one(q: Heads, k: Keys) -> bool:
    """Whether A is best formed for one image at a time: not by several threads, which share the heads unevenly."""
    fits = q.shape[1] * q.shape[2] * k.shape[2] >= LEAST and q.shape[2] <= ROWS
    return fits and not q.is_cuda and widen(q).dtype is q.dtype is k.dtype
