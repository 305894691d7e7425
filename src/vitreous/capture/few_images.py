"""A on a CPU, of a few images at a time.

One thread works on one image after another, whose A stays in its cache. Several threads divide the images and heads
among them, so they work on all images together, if memory allows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import ROWS
from vitreous.types import Heads, Keys, Weights

LEAST = 2**16  # numbers in A of one image, for which a loop over images pays off
WIDE = (torch.float32, torch.float64)
KEPT = 2**21  # numbers in A of all images that a forward pass keeps, at most, for each layer
ALL = slice(None)


class OneImage:
    """Forms A of one image at a time; each replaces the one before."""

    def __init__(self, q: Heads, k: Keys, scale: float, bias: Tensor | None) -> None:
        self.q, self.k, self.scale, self.bias = q.detach(), k.detach(), scale, bias
        self.scores = q.new_empty(q.shape[1], q.shape[2], k.shape[2])
        self.a = torch.empty_like(self.scores)

    def weights(self, part: slice) -> Float[Tensor, "1 H N M"]:
        """A of this image, until the next is asked for."""
        image = part.start or 0
        torch.baddbmm(self.scores, self.q[image], self.k[image].mT, beta=0, alpha=self.scale, out=self.scores)
        if self.bias is not None:
            self.scores += self.bias[image if len(self.bias) > 1 else 0]
        return torch.softmax(self.scores, -1, out=self.a)[None]


def few_images(count: int, alone: bool = False) -> list[slice]:
    """The images in the order in which they are worked on."""
    if count > 1 and (alone or torch.get_num_threads() == 1):
        return [slice(image, image + 1) for image in range(count)]
    return [ALL]


def at(values: Tensor, part: slice) -> Tensor:
    """The values of these images; of all, without a view of them."""
    return values if part is ALL else values[part]


def attend(
    q: Heads, k: Keys, v: Float[Tensor, "B H M width"], scale: float
) -> tuple[Weights, Float[Tensor, "B H N width"]]:
    """A and O of all images."""
    parts = few_images(len(q))
    if len(parts) > 1:
        a, out = q.new_empty(*q.shape[:3], k.shape[2]), q.new_empty(*q.shape[:3], v.shape[3])
        for part in parts:
            scores = torch.matmul(q[part] * scale, k[part].mT, out=a[part])
            out[part] = torch.softmax(scores, -1, out=scores) @ v[part]
        return a, out
    scores = q.new_empty(q.shape[:2].numel(), q.shape[2], k.shape[2])
    torch.baddbmm(scores, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale, out=scores)
    a = torch.softmax(scores, -1, out=scores).view(*q.shape[:3], -1)
    return a, a @ v


def keeps(q: Heads, k: Keys) -> bool:
    """Whether A is small enough to be kept."""
    return is_plain(q, k) and q.shape[:3].numel() * k.shape[2] <= KEPT


def one_by_one(q: Heads, k: Keys) -> bool:
    """Whether A, where it is not kept, is best formed for one image at a time."""
    return is_plain(q, k) and q.shape[1] * q.shape[2] * k.shape[2] >= LEAST


def is_plain(q: Heads, k: Keys) -> bool:
    """Whether A of an image is formed in one piece, on a CPU, in the precision of the model."""
    return q.dtype is k.dtype and q.dtype in WIDE and not q.is_cuda and q.shape[2] <= ROWS
