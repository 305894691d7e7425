"""Blocks run again with another attention, and the score that a single token would get from all that follows them.

A row of equal tokens reaches the output as one token alone, whatever reads it: CLS, a mean, or an attention pool.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import Attention, near, widen
from vitreous.capture.capture import Capture, ModuleNames
from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import ModelError, Unsupported
from vitreous.methods.attention.value_runs import Block, Projection, Projections, Swap, again, need_blocks
from vitreous.trace.run import Finished, Run, rows_of_run
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Map, Tokens

Make = Callable[[Attention], Heads]
SPACE = 8  # times the bytes of a row that reading it takes
MOST = 2**14  # rows read at a time


@dataclass(frozen=True, eq=False)
class Readings:
    """Outputs and embeddings of rows of equal tokens, each read alone."""

    output: Float[Tensor, "rows *outputs"]
    embedding: Tensor


@dataclass(frozen=True, eq=False)
class Recorded:
    """A forward pass with its last blocks, and one row of equal tokens that was read along with it."""

    run: Finished
    blocks: list[Block]  # of the layers from `since` on
    token: Float[Tensor, "1 D"]
    reading: Float[Tensor, "1 *outputs"]


def recorded(trace: Trace, method: str, since: int) -> Recorded:
    """The forward pass of the images, with the blocks from layer `since` on."""
    need_blocks(trace, method, "grad_eclip or gae")
    count, blocks, tokens = len(trace), Blocks(trace, since), []

    def one_more(streams: tuple[Tensor, ...]) -> Tensor:
        """A row of equal tokens: the mean token of the first image."""
        last = streams[-1][:1]
        mean = last.flatten(1, -2).mean(1)  # [1 D]
        tokens.append(mean)
        return mean.view(1, *[1] * (last.ndim - 2), -1).expand_as(last)

    def run() -> tuple[Finished, Any]:
        how = Run.to_output() if trace.inputs else Run.to_output().inside(blocks.watched)
        whole = trace.run(trace.images, how.extended(one_more).of([*range(count), 0]))
        if trace.inputs:  # the blocks of that run had a row more
            trace.run(trace.images, Run.to_output().unseen().inside(blocks.watched))
        own = rows_of_run(whole, slice(count))
        return own, Recorded(own, blocks.found(method), widen(tokens[0]), whole.output[count:])

    found: Recorded = trace.kept(f"blocks since {since}", run)[1]
    return found


class Blocks:
    """Records the calls of blocks in their order; a module may be the block of several layers."""

    def __init__(self, trace: Trace, since: int) -> None:
        self.trace, self.since = trace, since
        self.calls: list[Block | None] = []

    def watched(self) -> ExitStack:
        stack = ExitStack()
        for module in dict.fromkeys(self.trace.block(i) for i in range(self.trace.layout.layers)):
            stack.callback(module.register_forward_pre_hook(own_thread(self.enter), with_kwargs=True).remove)
        return stack

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        early = len(self.calls) < self.since
        self.calls.append(None if early else Block(module, self.trace.batch_axis, args, kwargs))

    def found(self, method: str) -> list[Block]:
        layout, name = self.trace.layout, self.trace.model.name
        kept = [block for block in self.calls if block is not None]
        if len(self.calls) != layout.layers or any(block.entered.shape[1] != layout.tokens for block in kept):
            said = f"{method} needs blocks that run once for each layer and are given all {layout.tokens} tokens"
            raise Unsupported(f"{said}, and those of {name} are not. Try grad_eclip or gae.")
        return kept


# ------------------------------------------------------------------------------------------- with another attention


class Reformed(Swap):
    """A mode in which the attention of all tokens returns what `make` forms from its queries, keys and values."""

    def __init__(self, names: ModuleNames, trace: Trace, make: Make) -> None:
        Capture.__init__(self, names, len(trace))
        self.tokens, self.make = trace.layout.tokens, make

    def keep(self, call: Attention) -> None:
        if call.shape[2:] != (self.tokens, self.tokens):
            Capture.keep(self, call)
            return
        self.heads = self.make(call)
        super().keep(call)


def with_attention(trace: Trace, block: Block, make: Make) -> tuple[Tokens, Attention, Projection | None]:
    """The output of a block with another attention, that attention, and the projection of its output."""
    with again(trace, block) as names:
        seen = Reformed(names, trace, make)
        readers = Projections(seen)
        with readers, seen:
            out = block.run(block.entered)
    call = seen.calls[-1]
    found = readers.found.get(call, [])
    return out, call, found[0] if len(found) == 1 else None


def own_values(method: str, call: Attention) -> Heads:
    """V, as if every token attended to itself alone."""
    if call.v.shape != call.out.shape:
        name = call.name or "the last layer"
        raise Unsupported(f"{method} puts values in place of attention, and those of {name} have another shape")
    return call.v


# ---------------------------------------------------------------------------------------------- each token on its own


def read_alone(trace: Trace, known: Recorded, tokens: Tokens) -> Readings:
    """What the network makes of each patch token alone, row by row: B × patches rows."""
    layout = trace.layout
    chosen = tokens[:, layout.patch_tokens].flatten(0, 1)
    rows = torch.cat([known.token, chosen])  # the first is known
    images = [image for image in range(len(trace)) for _ in range(layout.patches)]
    short = layout.prefix + layout.suffix + 1
    for length in (short, layout.tokens):
        with suppress(ModelError, RuntimeError, IndexError):
            found = read_rows(trace, rows, [0, *images], length)
            if near(found.output[:1], known.reading):
                return Readings(found.output[1:], found.embedding[1:])
    raise Unsupported(f"{trace.model.name} reads no token on its own, which this method needs. Try grad_eclip or gae.")


def read_rows(trace: Trace, rows: Float[Tensor, "rows D"], images: list[int], length: int) -> Readings:
    """Outputs and embeddings of rows of `length` equal tokens; `images`: to which each belongs."""

    def read(part: slice) -> Finished:
        change = partial(alike, rows[part], length, trace.batch_axis)
        how = Run.to_output().unseen().leaving(change, part.stop - part.start)
        return trace.run(trace.images[:1], how.of(images[part]))

    size = batch_size(SPACE * length * rows[0].nbytes, rows.device, MOST)
    parts = in_batches(read, len(rows), min(size, len(rows)))
    return Readings(torch.cat([part.output for part in parts]), torch.cat([part.embedding for part in parts]))


def alike(rows: Float[Tensor, "rows D"], length: int, axis: int, stream: Tensor) -> Tensor:
    """Equal tokens in the shape of a stream; a grid of tokens keeps its size."""
    shape = stream.movedim(axis, 0).shape[1:-1]
    shape = torch.Size([length]) if len(shape) == 1 else shape
    made = rows.view(len(rows), *[1] * len(shape), -1).expand(-1, *shape, -1)
    return made.movedim(0, axis).to(stream.dtype).contiguous()


def scored(trace: Trace, found: Readings, target: Target) -> Map:
    """The score of a target, fixed before, that each patch token would get alone."""
    count = len(found.output) // len(trace)
    rows = [image for image in range(len(trace)) for _ in range(count)]
    return widen(target.of_rows(rows)(found.output, found.embedding)).reshape(-1, *trace.layout.cells)
