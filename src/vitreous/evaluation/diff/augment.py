"""Changes of an image that leave its reason as it was, each undone on the map: the noise of a model's own maps.

Nine of them: mirrored; shifted by one patch to the right, left, down and up; contrast · 0.8 and · 1.2; Gaussian noise
of a fifth of the image's standard deviation, drawn twice. Mirroring and shifts are undone patch by patch; where a shift
has moved patches out of the image, those beside them stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous._support.noise import image_keys, normal
from vitreous.trace.trace import Trace
from vitreous.types import Images, Map

CONTRAST, NOISE = 0.2, 0.2  # as shares of the contrast, and of the standard deviation of an image
STEPS = ((0, 1), (0, -1), (1, 0), (-1, 0))  # patches down and to the right
Undo = Callable[[Map], Map]


def augmented(trace: Trace, seed: int) -> Iterator[tuple[str, Images, Undo]]:
    """The images of a trace, each time changed in one way, and how the map is put back; no shift of a single row."""
    images = trace.images.float()
    yield "mirrored", images.flip(-1), lambda found: found.flip(-1)
    for down, right in STEPS:
        if trace.layout.grid[0 if down else 1] > 1:
            y, x = (size // count for size, count in zip(trace.size, trace.layout.grid))
            moved = shift(images, down * y, right * x)
            yield f"shifted {down},{right}", moved, lambda found, d=down, r=right: shift(found, -d, -r)  # type: ignore[misc]
    mean = images.mean((2, 3), keepdim=True)
    for factor in (1 - CONTRAST, 1 + CONTRAST):
        yield f"contrast {factor}", mean + factor * (images - mean), same
    scale = NOISE * images.flatten(1).std(1)[:, None]
    keys = image_keys(trace.images, seed)
    for turn in range(2):
        drawn = normal(keys, images[0].numel(), turn) * scale
        yield f"noise {turn}", images + drawn.view_as(images), same


def same(found: Map) -> Map:
    return found


def shift(values: Float[Tensor, "... Y X"], down: int, right: int) -> Float[Tensor, "... Y X"]:
    """Moved by so many rows and columns; what enters repeats the edge."""
    y, x = values.shape[-2:]
    edges = (abs(right), abs(right), abs(down), abs(down))
    flat = values.reshape(-1, 1, y, x)
    wide = F.pad(flat, edges, mode="replicate")
    top, left = abs(down) - down, abs(right) - right
    return wide[..., top : top + y, left : left + x].reshape(values.shape)


def maps_under(trace: Trace, seed: int, explain: Callable[[Trace], Map]) -> Float[Tensor, "B K h w"]:
    """The maps of the changed images, put back."""
    found = []
    for _, images, undo in augmented(trace, seed):
        own = trace.like(images.to(trace.images))
        found.append(undo(explain(own)))
    return torch.stack(found, 1)
