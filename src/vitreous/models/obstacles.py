"""Why token attention cannot be followed through a network, if it cannot."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vitreous.capture.attention import Attention
from vitreous.capture.between_tokens import between_tokens
from vitreous.errors import CaptureError
from vitreous.models.data_flow import DataFlow, chains
from vitreous.models.decoder import Decoder, find_decoder
from vitreous.models.layout import Layout, Read
from vitreous.models.survey_run import Seen, gradient
from vitreous.models.token_places import Places

SAMPLED = "reads its tokens at points between them (deformable attention), so that there is no attention between tokens"
UNREAD = "has queries that read no tokens of their own"


@dataclass(frozen=True)
class Obstacle:
    """The reason, as the end of a sentence: "attends in 7×7 windows"."""

    said: str
    separate: bool = False  # the layers do not form one chain, so that none of them is the last
    final: bool = False  # tokens are mixed in a way that has no weights


def find_obstacle(
    seen: Seen, flow: DataFlow, read: list[int], separate: Obstacle | None, layout: Layout, places: Places | None
) -> tuple[Obstacle | None, list[int], int | None]:
    """Why attention cannot be followed from token to token; the numbers of the layers and of the pool if it can.

    `read`: the attention calls that the output depends on; `separate`: they do not form one chain.
    """
    early = hidden(seen, flow, read, places)
    if early is not None:
        return early, [], None
    layers = [i for i in read if layout.is_layer(seen.calls[i], seen.count)]
    behind = [i for i in read if i > max(layers, default=-1)]
    pool = [i for i in behind if len(behind) == 1 and layers and is_pool(seen.calls[i], layers[-1], flow, seen.count)]
    others = [seen.calls[i] for i in read if i not in layers and i not in pool]
    padded = [one for one in layers if stream_tokens(seen, one) not in (None, layout.tokens)]
    if padded:
        said = f"attends over padded windows ({layout.tokens} tokens for {stream_tokens(seen, padded[0])})"
        return Obstacle(said), [], None
    if not others and head_by_head(seen, layout):
        return Obstacle("computes its heads one by one"), [], None
    told = told_apart(seen, read)
    square = [call for call in others if call.shape[2] == call.shape[3]]
    if told is False or (told is None and any(call.v.shape[-1] == layout.patches for call in square)):
        return Obstacle("attends between channels, not between tokens"), [], None
    if not layers and not others:
        return Obstacle("shows no attention between its tokens, only learned queries"), [], None
    if separate is not None:
        return separate, [], None
    if others:
        return other_shapes(others, layout.tokens, seen.count), [], None
    return unlike([seen.calls[i] for i in layers]), layers, next(iter(pool), None)


def hidden(seen: Seen, flow: DataFlow, read: list[int], places: Places | None) -> Obstacle | None:
    """What keeps attention or tokens from being seen at all."""
    if seen.survey.mixed:
        where = seen.survey.mixed[0] or "its own code"
        return Obstacle(f"changes its attention between softmax and values (in {where})")
    other = without_weights(seen, flow)
    if other is not None:
        return other
    if not seen.calls:
        return Obstacle("shows no attention (vitreous sees torch's sdpa, nn.MultiheadAttention and softmax @ values)")
    if not read:
        return Obstacle("computes attention that its output does not depend on", separate=True)
    if places is None and all(seen.calls[i].shape[2] == seen.calls[i].shape[3] for i in read):
        if told_apart(seen, read) is False:
            return Obstacle("attends between channels, not between tokens")
        return Obstacle("makes its tokens in a way that cannot be traced to patches of the image")
    return None


def without_weights(seen: Seen, flow: DataFlow) -> Obstacle | None:
    """Attention that never forms weights between tokens: deformable, or linear."""
    for where, grid in seen.survey.sampled:
        if flow.is_of_leaf(grid.grad_fn):
            said = f"samples points that it chooses itself (deformable attention, in {where or 'its own code'})"
            return Obstacle(f"{said}: there are no weights between tokens", final=True)
    for where, factors in seen.survey.linear:
        if all(flow.is_of_leaf(one.grad_fn) for one in factors):
            said = f"without a softmax (linear attention, in {where or 'its own code'})"
            return Obstacle(
                f"multiplies queries, keys and values {said}: there are no weights between tokens", final=True
            )
    return None


def is_pool(call: Attention, last: int, flow: DataFlow, images: int) -> bool:
    """Whether learned queries, which do not depend on the image, read the tokens behind the last layer."""
    query = call.q if call.q is not None else call.factors[0] if call.factors is not None else None
    learned = query is None or query.grad_fn is None or not flow.below(query.grad_fn) >> last & 1
    return learned and call.shape[0] in (1, images)


def stream_tokens(seen: Seen, number: int) -> int | None:
    """How many tokens [B h w D] enter a layer, if they come so: its attention may pad them."""
    met = seen.survey.entries[number]
    return None if met is None or met.tokens.ndim != 4 else met.tokens.shape[1] * met.tokens.shape[2]


def told_apart(seen: Seen, read: list[int]) -> bool | None:
    """Whether tokens attend to tokens, as far as it can be measured."""
    entries = [seen.survey.entries[i] for i in read]
    return between_tokens([seen.calls[i] for i in read], [None if met is None else met.tokens for met in entries])


def other_shapes(others: list[Attention], tokens: int, images: int) -> Obstacle:
    others = [call for call in others if call.shape[2:] != (tokens, tokens)] or others
    b, _, n, m = Counter(call.shape for call in others).most_common(1)[0][0]
    if b <= images:
        return Obstacle(f"changes its tokens on the way (layers of {n} queries and {m} keys for {tokens} tokens)")
    side = math.isqrt(n)
    return Obstacle(f"attends in {side}×{side} windows" if side * side == n else f"attends in windows of {n} tokens")


def read_chain(
    seen: Seen, flow: DataFlow, ends: list[Tensor], decodes: bool
) -> tuple[list[int], Obstacle | None, Decoder | None]:
    """The attention calls that the output depends on, and why they are not one chain, if they are not.

    Of an encoder and a decoder (looked for if `decodes`), the calls of the encoder, and the decoder.
    """
    every = flow.read() if flow.known else list(range(len(seen.calls)))
    read = [i for i in every if not flow.known or flow.of_leaf(i)]
    read, decoder = (find_decoder(seen, flow, every) if decodes else None) or (read, None)
    chain = one_chain(read, seen, flow, ends)
    return (read, chain, decoder) if isinstance(chain, Obstacle) else (chain, None, decoder)


def one_chain(numbers: list[int], seen: Seen, flow: DataFlow, ends: list[Tensor]) -> list[int] | Obstacle:
    """The layers, each fed by the one before it; of separate passes, the only one that the output depends on."""
    if not flow.known:
        return numbers
    separate = chains(flow, numbers)
    if len(separate) <= 1:
        return numbers
    grads = [gradient(ends, seen.calls[chain[-1]].node) for chain in separate]
    used = [chain for chain, grad in zip(separate, grads) if grad is not None and bool(grad.any())]
    if len(used) == 1:
        return used[0]
    sizes = Counter(map(len, used or separate))
    told = " and ".join(f"{times} of {size} attention calls" for size, times in sizes.items())
    said = f"runs separate passes or parallel branches in one forward pass ({told}, which do not feed one another)"
    return Obstacle(said, separate=True)


def unlike(calls: list[Attention]) -> Obstacle | None:
    """An attention that does not give the layer's output."""
    for call in calls:
        try:
            call.verify()
        except CaptureError as error:
            return Obstacle(f"hides part of its attention: {error}")
    return None


def head_by_head(seen: Seen, layout: Layout) -> bool:
    """Does a module attend several times in a row, each time with one head and nothing projected in between?"""
    numbers, entries = layer_numbers(seen, layout), seen.survey.entries
    return any(
        seen.calls[i].name == seen.calls[j].name and seen.calls[j].shape[1] == 1 and entries[j] is None
        for i, j in pairwise(numbers)
        if entries[numbers[0]] is not None
    )


def layer_numbers(seen: Seen, layout: Layout) -> list[int]:
    return [i for i, call in enumerate(seen.calls) if layout.is_layer(call, seen.count)]


def several_reads(
    seen: Seen, blocks: tuple[str, ...], layers: int, ends: list[Tensor], tokens: int
) -> Obstacle | tuple[Read, ...]:
    """The tokens that the output reads of several blocks, the last one last, with their weights; usually none."""
    read = seen.blocks.read(seen.output, blocks) if len(blocks) == layers else []
    if len(read) < 2:
        return ()
    streams = seen.blocks.streams(blocks)
    shapes = {tuple(stream.shape[:-1]) for stream in streams}
    if shapes not in ({(seen.count, tokens)}, {(tokens, seen.count)}):
        return Obstacle(f"reads the tokens of {len(read)} of its {layers} layers ({', '.join(map(str, read))})", True)
    sizes = [own_gradient(streams, layer, ends) for layer in read]
    sizes = [size.float().norm(dim=-1).mean(0 if size.shape[0] == seen.count else 1) for size in sizes]
    whole, least = sum(float(size.sum()) for size in sizes), 1e-4 * max(float(size.max()) for size in sizes)
    found = []
    for layer, size in zip(read, sizes):
        rows = tuple((size > least).nonzero().flatten().tolist())
        found.append((layer, rows, tuple((size[list(rows)] / whole).tolist())))
    return tuple(found)


def own_gradient(streams: list[Tensor], layer: int, ends: list[Tensor]) -> Tensor:
    """The gradient for the tokens behind a block, without what passes through the next one."""
    found = gradient(ends, streams[layer])
    assert found is not None
    if layer + 1 == len(streams):
        return found
    behind = gradient(ends, streams[layer + 1])
    (through,) = torch.autograd.grad(streams[layer + 1], [streams[layer]], behind, retain_graph=True)
    return found - through
