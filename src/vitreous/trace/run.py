"""Forward passes of a model: described by a `Run`, carried out by `perform`, recorded as `Finished` or `Stopped`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import Attention, same, widen
from vitreous.capture.attention_backward import Follower
from vitreous.capture.capture import Change, Forms
from vitreous.capture.narrowed_block import Fold
from vitreous.capture.recomputed import Call
from vitreous.errors import Unsupported
from vitreous.trace.again import Within
from vitreous.trace.further_rows import Extend
from vitreous.trace.target import Target
from vitreous.types import Images, Scores

Edit = Callable[[Tensor], Tensor]
NO_LAYER = 2**30  # a number that no layer has
AGAIN = "_vitreous_again"  # attribute of a score: its backward pass runs blocks again


@dataclass(frozen=True)
class Narrow:
    """Compute the last block only for the tokens that are used; its attention is then not recorded in full.

    `fold`: do not form keys and values. `tokens`: the number of tokens, if some were cut out.
    """

    fold: Fold | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Run:
    """Describes a forward pass. Start with one of the constructors and refine it:

    Run.to_output()              to the output, without gradients
    Run.to_last_attention()      only up to the last layer's attention
    Run.from_pixels()            differentiable from the pixels
    Run.from_layer(3)            differentiable from the tokens that enter layer 3's attention
    Run.watched_backward(f)      differentiable from layer 0; the backward pass shows A and ∂y/∂A to `f`
    """

    grad: bool = False
    layer: int | None = None  # where gradients begin; with `grad`, where tokens are noted
    edit: Edit = same  # applied to the tokens that enter that layer's attention
    ends: bool = False  # stop at the last layer's attention
    since: int = 0  # the first layer whose attention is kept
    forms: Forms | None = None  # computes the output of attention calls in place of the kernel
    change: Change | None = None  # gives the network another output of an attention than was recorded
    narrow: Narrow | None = None
    enter: Edit | None = None  # applied to the tokens that enter the block of `layer` (or the first block)
    leave: Edit | None = None  # applied to the tokens that leave the last block
    count: int | None = None  # the number of images after `enter` or `leave`
    extend: Extend | None = None  # rows to append after the last block
    extend_since: int = 0  # the first layer whose tokens it is given
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    rows: tuple[int, ...] | None = None  # the image whose inputs each row gets; None: row i, image i
    noise: bool = False  # the images are those of the layout run, with the inputs that they had there
    recompute: Within | None = None  # the context in which blocks that keep nothing are run again; None: they keep all

    @classmethod
    def to_output(cls) -> Run:
        return cls()

    @classmethod
    def to_last_attention(cls, *, since: int = 0, forms: Forms | None = None) -> Run:
        return cls(ends=True, since=since, forms=forms)

    @classmethod
    def from_pixels(cls) -> Run:
        return cls(grad=True)

    @classmethod
    def from_layer(cls, layer: int, edit: Edit = same) -> Run:
        return cls(layer=layer, edit=edit)

    @classmethod
    def watched_backward(cls, follower: Follower) -> Run:
        return cls(layer=0, forms=follower)

    def narrowed(self, narrow: Narrow | None) -> Run:
        """Narrow the last block, if allowed."""
        return replace(self, narrow=narrow)

    def unseen(self) -> Run:
        """Keep no attention."""
        return replace(self, since=NO_LAYER)

    def entering(self, change: Edit, count: int | None = None) -> Run:
        """Change the tokens that enter the block, possibly to `count` images."""
        return replace(self, enter=change, count=count)

    def leaving(self, change: Edit, count: int) -> Run:
        """Change the tokens that leave the last block to those of `count` images, of any number of tokens."""
        return replace(self, leave=change, count=count)

    def extended(self, extend: Extend, since: int = 0) -> Run:
        """Append rows made from the outputs of the blocks from layer `since` on; no gradient passes between these."""
        return replace(self, extend=extend, extend_since=since)

    def recomputed(self, within: Within | None) -> Run:
        """Keep only the tokens that enter each block, and run blocks again, in this context, when they are needed."""
        return replace(self, recompute=within)

    def of(self, rows: Sequence[int]) -> Run:
        """Say which image each row (of the images, or after `enter`, `leave` and `extend`) belongs to."""
        return replace(self, rows=tuple(rows))

    def inside(self, context: Callable[[], AbstractContextManager[Any]]) -> Run:
        """Run within a context of our own hooks (foreign hooks require complete forward passes)."""
        return replace(self, within=context)


@dataclass(frozen=True, eq=False)
class Stopped:
    """A forward pass that ended early, because nothing later was needed."""

    images: Images
    layers: tuple[Attention, ...]
    since: int = 0  # the first layer in `layers`
    again: tuple[Call, ...] = ()  # the blocks that can be run again, all but the last, if this was asked for


@dataclass(frozen=True, eq=False, kw_only=True)
class Finished(Stopped):
    """A forward pass that reached the output."""

    output: Float[Tensor, "rows *outputs"]
    embedding: Tensor  # the input of the classifier; the output itself if there is no classifier
    pool: Attention | None = None
    decoded: tuple[Attention, ...] = ()  # the attention calls of a decoder, first to last
    leaf: Tensor | None = None

    @property
    def entry(self) -> Tensor:
        """T, the tokens that enter a layer's attention, where gradients begin or which were noted."""
        assert self.leaf is not None, "this run was not made from a layer"
        return self.leaf


def rows_of_run(run: Finished, rows: slice) -> Finished:
    """The outputs of a forward pass for some of its images, without its layers and graph."""
    output = run.output[rows].detach()
    embedding = output if run.embedding is run.output else run.embedding[rows].detach()
    return Finished(run.images[rows].detach(), (), NO_LAYER, output=output, embedding=embedding)


def is_followed(record: Finished) -> bool:
    """Whether the backward pass visits the attention of all layers."""
    return record.leaf is not None and all(layer.followed for layer in record.layers)


def score_of(target: Target, run: Finished, rows: slice = slice(None)) -> Scores:
    """The score of the target, attached to the graph of the forward pass."""
    with torch.enable_grad():
        score = widen(target(run.output[rows], run.embedding[rows]))
    if run.again:
        setattr(score, AGAIN, True)
    return score


def gradients(y: Scores | list[Scores], wrt: Sequence[Tensor], keep: bool = True) -> tuple[Tensor, ...]:
    """∂Σy with respect to each tensor; `keep` retains the graph for another target."""
    ends = y if isinstance(y, list) else [y]
    if not all(end.requires_grad for end in ends):
        said = "the model runs without gradients (torch.inference_mode in its forward?); try attention or rollout"
        raise Unsupported(said)
    ones, again = [torch.ones_like(end) for end in ends], any(hasattr(end, AGAIN) for end in ends)
    with torch.autograd.set_multithreading_enabled(False) if again else nullcontext():  # blocks run in this thread
        found = torch.autograd.grad(ends, wrt, ones, retain_graph=keep, allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, wrt))
