"""Decoders: layers whose queries read the tokens of the layers before them, as in DETR; found by what depends on what.

In a decoder, queries that do not come from the image (learned ones) attend to each other and to the tokens. So of
each attention call

    encoder   queries and values come from the image, through no call of the decoder
    cross     queries are learned, or have passed through the decoder; values have not
    own       queries and values are learned, or have passed through the decoder
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from vitreous.capture.attention import Attention
from vitreous.capture.entries import Entry
from vitreous.capture.survey import Met
from vitreous.errors import CaptureError
from vitreous.models.data_flow import DataFlow, chains
from vitreous.models.readers import Readers, dependents, find_readers
from vitreous.models.survey_run import Seen

HIDDEN: Entry = ("none", 0)  # of a layer whose queries, keys and values are made of different tokens


@dataclass(frozen=True)
class Decoder:
    """The attention calls of a decoder, by their numbers in the forward pass."""

    own: tuple[int, ...]  # between queries
    cross: tuple[int, ...]  # from queries to the tokens of the encoder
    queries: int  # how many there are
    readers: Readers  # the queries whose results each query of the output reads: usually one

    def holds(self, call: Attention) -> bool:
        return call.number in self.own or call.number in self.cross


def find_decoder(seen: Seen, flow: DataFlow, numbers: list[int]) -> tuple[list[int], Decoder] | None:
    """The attention calls of the encoder, and the decoder behind them; None if the network is not built so."""
    if not flow.known or not seen.images.requires_grad:
        return None
    sorted_calls = sort_calls(seen, flow, numbers)
    if sorted_calls is None:
        return None
    encoder, own, cross = sorted_calls
    if not encoder or not cross or len(own) + len(cross) == 1 or len(chains(flow, encoder)) > 1:
        return None
    last, read = seen.calls[encoder[-1]], seen.calls[max(own + cross)]
    queries, tokens = read.shape[2], last.shape[2]
    sizes = [(encoder, tokens, tokens), (own, queries, queries), (cross, queries, tokens)]
    if not all(is_of(seen.calls[i], seen.count, n, m) for some, n, m in sizes for i in some):
        return None
    if any(dependents(values(seen.calls[i]), last.node, last.fold) != list(range(tokens)) for i in cross):
        return None
    output = seen.output if seen.output.ndim > 2 else seen.output[:, None]
    readers = find_readers(output, read.node, read.fold)
    return None if readers is None else (encoder, Decoder(tuple(own), tuple(cross), queries, readers))


def sort_calls(seen: Seen, flow: DataFlow, numbers: list[int]) -> tuple[list[int], list[int], list[int]] | None:
    """The calls of the encoder, those between queries, and those from queries to tokens."""
    encoder: list[int] = []
    own: list[int] = []
    cross: list[int] = []
    for i in numbers:
        call, decoded = seen.calls[i], sum(1 << j for j in own + cross)
        asked = call.q if call.q is not None else call.factors[0] if call.factors is not None else None
        if asked is None:
            return None
        query, value = (is_decoded(one, decoded, flow) for one in (asked, call.v))
        if value and not query:
            return None
        (own if value else cross if query else encoder).append(i)
        if not query and (own or cross):
            return None
    return encoder, own, cross


def is_decoded(tensor: Tensor, decoded: int, flow: DataFlow) -> bool:
    """Whether a tensor is learned, or has passed through the decoder."""
    if not flow.is_of_leaf(tensor.grad_fn):
        return True
    return bool(flow.below(tensor.grad_fn) & decoded)


def entry_of(met: Met) -> Entry:
    """Where the tokens that enter a layer are made; hidden where positions are added for queries and keys only."""
    return HIDDEN if met.entry[0] == "linear" else met.entry


def is_frozen(net: nn.Module) -> bool:
    return not all(p.requires_grad for p in net.parameters() if p.is_floating_point())


@contextmanager
def learning(net: nn.Module) -> Iterator[None]:
    """All weights have gradients, so that what depends on learned queries only has them too; then as before."""
    frozen = [p for p in net.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def values(call: Attention) -> Tensor:
    """V as tokens, [B M D]."""
    return call.v.transpose(1, 2).flatten(2)


def is_of(call: Attention, images: int, queries: int, keys: int) -> bool:
    """Whether a call has these sizes, and its attention gives its output."""
    b, _, n, m = call.shape
    if (b, n, m) != (images, queries, keys):
        return False
    try:
        call.verify()
    except CaptureError:
        return False
    return True
