from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field

from vitreous._support.noise import normal
from vitreous._support.progress import steps
from vitreous.methods.gradient.channels import Reduce, keeps_sign, reduce_channels
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.trace.versions import input_grads
from vitreous.types import Images, Map


@method(
    cite="smilkov2017smoothgrad",
    targeted=True,
    signed=keeps_sign,
    costly=True,
    tried=[{"reduce": "sum"}],
    cheap={"samples": 2},
)
def smoothgrad(
    trace: Trace,
    target: Target,
    *,
    samples: Annotated[int, Field(ge=1, description="noisy copies of each image")] = 16,
    sigma: Annotated[float, Field(gt=0, description="noise, as a share of the image's range of values")] = 0.15,
    power: Annotated[Literal[1, 2], Field(description="2: the mean of the squared gradients")] = 1,
    reduce: Annotated[
        Reduce, Field(description="how the colour channels become one: only sum keeps the sign")
    ] = "abs-mean",
    seed: Annotated[int, Field(ge=0, description="another seed gives other noise")] = 0,
) -> Map:
    """The gradient averaged over noisy copies of the image; use it where the plain gradient is too noisy to read.

    1/n Σ ∂y/∂x at x + σ·(max x − min x)·ε
    """
    noise = unit_noise(trace, samples, seed)
    return reduce_channels(smooth_gradient(trace, target, noise, sigma, power), reduce)


def unit_noise(trace: Trace, samples: int, seed: int) -> Iterator[Images]:
    """Standard normal noise for the whole batch, sample by sample, from a sequence of each image's own."""
    keys, count = trace.keys(seed), trace.images[0].numel()
    for sample in steps(range(samples), samples, "smoothgrad"):
        yield normal(keys, count, sample).reshape(trace.images.shape)


def smooth_gradient(trace: Trace, target: Target, noise: Iterable[Images], sigma: float, power: int = 1) -> Images:
    """The mean (squared) gradient over the given noise."""
    fixed, images = target.fix(trace.output), trace.images
    flat = images.flatten(1)
    width = sigma * (flat.amax(1) - flat.amin(1)).float().view(-1, *[1] * (images.ndim - 1))
    total, count = torch.zeros_like(images, dtype=torch.float32), 0
    noisy = ((images + width * unit).to(images.dtype) for unit in noise)
    for grad in input_grads(trace, fixed, noisy):
        total += grad.float() if power == 1 else grad.float().square()
        count += 1
    return total / count
