"""∂y/∂x at several versions of the images of a trace: points of a path, noisy copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import widen
from vitreous.trace.run import gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Images


def input_grads(trace: Trace, target: Target, versions: Iterable[Images]) -> Iterator[Tensor]:
    """∂y/∂x at each of several versions of the batch, which share forward passes if small; fix the target first.

    `versions` is consumed lazily.
    """
    count, left = len(trace), iter(versions)
    most = max(1, batch_size(trace.layout.footprint[1], trace.images.device) // count)

    def grads(part: slice) -> Tensor:
        record = trace.from_pixels(torch.cat(some[part]))
        y = trace.score(target.of_rows(list(range(count)) * (part.stop - part.start)), record)
        (grad,) = gradients(y, [record.images], keep=False)
        return widen(grad).reshape(-1, count, *grad.shape[1:])

    while some := list(islice(left, most)):
        for grad in in_batches(grads, len(some), len(some)):
            yield from grad
