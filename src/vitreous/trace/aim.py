"""The read-out of a region: which tokens a score at some places of the image is read from.

A model with an output for each place has no tokens that all outputs are read from. For one score y of one image, token
i of the last layer has the weight

    ρ_i = ‖∂y/∂O_i‖ / Σ_j ‖∂y/∂O_j‖

with O the output of the last attention. Where the tokens of several layers are read (DPT, BEiT), O is what leaves each
of these blocks, the gradient is what does not pass through the next block, and the sum is over all of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vitreous.errors import Unsupported
from vitreous.models.layout import Layout
from vitreous.models.obstacles import Obstacle, layer_numbers, several_reads
from vitreous.models.survey_run import Seen, gradient, surveyed
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace


class Aimed(Trace):
    """A trace whose read-out is that of one target."""


def aimed(trace: Trace, target: Target, index: int) -> Aimed:
    """A trace of one image with the read-out of a target, which is fixed on the images of the trace."""
    own, one = Aimed(trace.model, trace.images[index : index + 1]), target.of_image(index)
    own.autocast, own.frames = trace.autocast, trace.frames.of(index)
    if own.layout.pooled or own.layout.obstacle is not None:
        return own
    with torch.inference_mode(False), torch.enable_grad():
        seen = surveyed(own.model, own.images.detach().clone().requires_grad_(), grad=True)
        own.layout = read_by(seen, one(seen.output, seen.output), own.layout, own.model.name)
    return own


def read_by(seen: Seen, score: torch.Tensor, layout: Layout, name: str) -> Layout:
    """The layout with the read-out of a score [1]."""
    if layout.reads:
        reads = several_reads(seen, layout.blocks, layout.layers, [score], layout.tokens)
        if isinstance(reads, Obstacle) or not reads:
            raise Unsupported(f"{name}: the layers that this target is read from could not be found; try gradient")
        *earlier, (_, tokens, shares) = reads
        return replace(
            layout, readout=tokens or (0,), share=shares or (0.0,), reads=tuple(read for read in earlier if read[1])
        )
    last = seen.calls[layer_numbers(seen, layout)[-1]]
    grad = gradient([score], last.node)
    size = None if grad is None else last.fold(grad).float().norm(dim=-1).mean((0, 1))
    if size is None or not size.any():
        return layout  # the score depends on no token: the map will be empty, and refused
    tokens = tuple(size.nonzero().flatten().tolist())
    return replace(layout, readout=tokens, share=tuple((size[list(tokens)] / size.sum()).tolist()))
