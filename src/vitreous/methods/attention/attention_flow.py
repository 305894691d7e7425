from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from vitreous._support.progress import steps
from vitreous.capture.attention import Attention
from vitreous.methods.common import check_start, need_positive, trim, whole
from vitreous.registry import method
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Map

if TYPE_CHECKING:
    from scipy.sparse import csr_array

UNIT = 2**30  # SciPy uses 32-bit integers: capacities are rounded to multiples of 1/UNIT


@method(cite="abnar2020quantifying", attention=True, alone=True)
def attention_flow(
    trace: Trace,
    target: Target,
    *,
    heads: Annotated[Literal["mean", "min", "max"], Field(description="how the heads of a layer become one")] = "mean",
    discard: Annotated[
        float, Field(ge=0, lt=1, description="share of each layer's smallest attentions that is set to zero")
    ] = 0.0,
    residual: Annotated[float, Field(ge=0, le=1, description="weight of the skip connection")] = 0.5,
    start_layer: Annotated[int, Field(ge=0, description="first layer of the network of flows")] = 0,
) -> Map:
    """The maximum flow from each patch to the tokens that the classifier reads, with attention as capacities; a slow
    alternative to rollout.

    max-flow from (patch, first layer) to the read-out in the layered graph with capacities r·I + (1−r)·Ā⁽ˡ⁾, rows
    normalised, and ρ behind the last layer. Capacities are rounded to 2⁻³⁰, so a flow is off by at most 2⁻³¹ for each
    edge of its narrowest cut. One flow for each patch, each through L·N² edges.
    """
    check_start(trace, start_layer)
    need_positive(trace, "attention_flow", trace.attention[start_layer:])
    read = trace.readout.double().cpu().numpy()  # [B N]
    keep = trace.layout.readout
    pipes = [capacities(layer, heads, discard, residual, keep) for layer in trace.attention[start_layer:]]
    patches = trace.layout.patch_tokens
    found = [flows([one[b] for one in pipes], read[b], patches) for b in range(len(trace))]
    return torch.from_numpy(np.stack(found)).to(trace.images.device).reshape(-1, *trace.layout.cells)


def capacities(layer: Attention, heads: str, discard: float, residual: float, keep: tuple[int, ...]) -> Any:
    """r·I + (1−r)·Ā, rows normalised: [B N M]."""
    a = trim(whole(layer, heads), discard, keep).double().cpu().numpy()
    mixed = residual * np.eye(a.shape[1]) + (1 - residual) * a
    return mixed / mixed.sum(-1, keepdims=True).clip(1e-30)


def flows(pipes: list[Any], read: Any, sources: Iterable[int]) -> Any:
    """The maximum flow from each source to the read-out."""
    from scipy.sparse.csgraph import maximum_flow

    graph, first, sources = network(pipes[1:], read), whole_numbers(pipes[0]), list(sources)
    last, tokens = graph.shape[0] - 1, len(read)
    found = []
    for source in steps(sources, len(sources), "attention_flow, patches"):
        graph.data[:tokens] = first[:, source]
        found.append(maximum_flow(graph, 0, last).flow_value / UNIT)
    return np.array(found)


def network(pipes: list[Any], read: Any) -> csr_array:
    """Node 0 is the source, whose N edges are filled in later; then N nodes after each layer; last, the read-out."""
    from scipy.sparse import csr_array

    tokens, depth = len(read), len(pipes)
    pipes = [*pipes[:-1], *(pipe * (read > 0)[:, None] for pipe in pipes[-1:])]  # tokens not read lead nowhere
    nodes = 1 + np.arange((depth + 1) * tokens).reshape(depth + 1, 1, tokens)
    inner = np.broadcast_to(nodes[1:], (depth, tokens, tokens)).ravel()
    ends = np.concatenate([nodes[0, 0], inner, np.full(tokens, nodes[-1, 0, -1] + 1)])
    width = np.concatenate([np.ones(tokens), *(pipe.T.ravel() for pipe in pipes), read])
    leaving = np.repeat([tokens, 1, 0], [1 + depth * tokens, tokens, 1])  # edges of each node
    starts = np.concatenate([[0], np.cumsum(leaving)])
    graph = csr_array((whole_numbers(width), ends, starts), shape=(len(leaving), len(leaving)))
    graph.eliminate_zeros()
    return graph


def whole_numbers(width: Any) -> Any:
    return np.rint(width * UNIT).astype(np.int32)
