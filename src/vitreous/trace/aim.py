"""The read-out of a region: which tokens a score at some places of the image is read from.

A model with an output for each place has no tokens that all outputs are read from. For one score y of one image, token
i of the last layer has the weight

    ρ_i = ‖∂y/∂O_i‖ / Σ_j ‖∂y/∂O_j‖

with O the output of the last attention. Where the tokens of several layers are read, the sum is over all of them, and
of the gradient only what does not pass through the next layer counts. O is then what leaves the block (DPT, BEiT), or,
where layers differ in their tokens (SegFormer, Swin), the output of each attention.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from vitreous.errors import Unsupported
from vitreous.models.layout import Layout, Read
from vitreous.models.obstacles import Obstacle, layer_numbers, several_reads
from vitreous.models.survey_run import Seen, gradient, surveyed
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace

LEAST = 1e-4  # of the largest weight: what is smaller is rounding


class Aimed(Trace):
    """A trace whose read-out is that of one target."""


def aimed(trace: Trace, target: Target, index: int) -> Aimed:
    """A trace of one image with the read-out of a target, which is fixed on the images of the trace."""
    inputs, one = trace.inputs.of_images([index]), target.of_image(index)
    own = Aimed(trace.model, trace.images[index : index + 1], inputs)
    own.autocast, own.crops = trace.autocast, trace.crops.of(index)
    layout = own.layout
    if layout.pooled or (layout.obstacle is not None and not layout.stages):
        return own
    with torch.inference_mode(False), torch.enable_grad():
        seen = surveyed(own.model.sampled(own.inputs), own.images.detach().clone().requires_grad_(), grad=True)
        own.layout = read_by(seen, one(seen.output, seen.output), layout, own.model.name)
    return own


def read_by(seen: Seen, score: Tensor, layout: Layout, name: str) -> Layout:
    """The layout with the read-out of a score [1]; unchanged if that depends on no token: its map will be empty."""
    if layout.stages:
        reads: tuple[Read, ...] | Obstacle = staged_reads(seen, score, layout, name)
    elif layout.reads:
        reads = several_reads(seen, layout.blocks, layout.layers, [score], layout.tokens)
    else:
        last = seen.calls[layer_numbers(seen, layout)[-1]]
        grad = gradient([score], last.node)
        size = torch.zeros(1) if grad is None else last.fold(grad).float().norm(dim=-1).mean((0, 1))
        reads = shared({layout.layers - 1: size})
    if isinstance(reads, Obstacle):
        raise Unsupported(
            f"{name} {reads.said}, which this target cannot be followed through; try gradient or occlusion"
        )
    if not reads:
        return layout
    earlier = tuple(read for read in reads if read[0] < layout.layers - 1 and read[1])
    (_, tokens, shares) = next((read for read in reads if read[0] == layout.layers - 1), (0, (), ()))
    return replace(layout, readout=tokens or (0,), share=shares or (0.0,), reads=earlier)


def shared(sizes: dict[int, Tensor]) -> tuple[Read, ...]:
    """Tokens with their weights, which sum to one over all layers."""
    most = max(float(size.max()) for size in sizes.values())
    whole = sum(float(size[size > LEAST * most].sum()) for size in sizes.values())
    found = []
    for layer, size in sizes.items():
        tokens = tuple((size > LEAST * most).nonzero().flatten().tolist())
        if tokens:
            found.append((layer, tokens, tuple((size[list(tokens)] / whole).tolist())))
    return tuple(found)


# ----------------------------------------------------------------------------------- layers that differ in their tokens


def staged_reads(seen: Seen, score: Tensor, layout: Layout, name: str) -> tuple[Read, ...]:
    """The places of every layer that a score is read from, other than through the next layer."""
    assert layout.numbers is not None
    calls = [seen.calls[number] for number in layout.numbers]
    met = {one.entry: one.tokens for recent in seen.survey.recent for one in recent}
    behind = [stream(met[entry]) for entry in layout.entries[1:]] if len(layout.entries) == len(calls) else []
    if len(behind) != len(calls) - 1:
        raise Unsupported(f"{name} has no visible tokens before its attention, which this target needs; try gradient")
    sizes = {}
    for layer, (call, stage) in enumerate(zip(calls, layout.stages)):
        grad = own_gradient(score, call.node, behind[layer] if layer < len(behind) else None)
        if grad is not None and stage.rows is not None:
            rows = stage.rows.arrange(call.fold(grad), seen.count).float().norm(dim=-1).mean(1)
            sizes[layer] = stage.scatter_queries(rows)[0].cpu()
    return shared(sizes) if sizes else ()


def stream(tokens: Tensor) -> GradientEdge:
    """Where the tokens that enter a layer come from, before they are normalised."""
    edge = get_gradient_edge(tokens)
    node = edge.node
    while node is not None and "View" in node.name():
        node = node.next_functions[0][0]  # type: ignore[assignment]
    before, number = node.next_functions[0] if node is not None and "Norm" in node.name() else (None, 0)
    return edge if before is None else GradientEdge(before, number)


def own_gradient(score: Tensor, node: Tensor, behind: GradientEdge | None) -> Tensor | None:
    """∂y/∂O without what passes through the next layer."""
    (whole,) = torch.autograd.grad(score.sum(), [node], retain_graph=True, allow_unused=True)
    if behind is None or whole is None:
        return whole
    (after,) = torch.autograd.grad(score.sum(), [behind], retain_graph=True, allow_unused=True)
    if after is None:
        return whole
    (through,) = torch.autograd.grad([behind], [node], [after], retain_graph=True, allow_unused=True)
    return whole if through is None else whole - through
