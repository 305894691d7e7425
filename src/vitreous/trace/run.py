"""Forward passes of a model: described by a `Run`, executed by `perform`, recorded as `Finished` or `Stopped`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitreous.capture.attention import Attention, same, widen
from vitreous.capture.attention_backward import CutAt, Follower, Unfrozen
from vitreous.capture.capture import Capture, Enough, Forms
from vitreous.capture.narrowed_block import Fold, NarrowedBlock, entering, own_thread
from vitreous.errors import ModelError, Unsupported
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.trace.target import Target
from vitreous.types import Images, Scores

Edit = Callable[[Tensor], Tensor]
Extend = Callable[[tuple[Tensor, ...]], Tensor]
NO_LAYER = 2**30  # a number that no layer has


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
    layer: int | None = None  # where gradients begin
    edit: Edit = same  # applied to the tokens that enter that layer's attention
    ends: bool = False  # stop at the last layer's attention
    since: int = 0  # the first layer whose attention is kept
    forms: Forms | None = None  # computes the output of attention calls in place of the kernel
    narrow: Narrow | None = None
    enter: Edit | None = None  # applied to the tokens that enter the block of `layer` (or the first block)
    leave: Edit | None = None  # applied to the tokens that leave the last block
    count: int | None = None  # the number of images after `enter` or `leave`
    extend: Extend | None = None  # rows to append after the last block
    extend_since: int = 0  # the first layer whose tokens it is given
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

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

    def inside(self, context: Callable[[], AbstractContextManager[Any]]) -> Run:
        """Run within a context of our own hooks (foreign hooks require complete forward passes)."""
        return replace(self, within=context)


@dataclass(frozen=True, eq=False)
class Stopped:
    """A forward pass that ended early, because nothing later was needed."""

    images: Images
    layers: tuple[Attention, ...]
    since: int = 0  # the first layer in `layers`


@dataclass(frozen=True, eq=False, kw_only=True)
class Finished(Stopped):
    """A forward pass that reached the output."""

    output: Float[Tensor, "rows *outputs"]
    embedding: Tensor  # the input of the classifier; the output itself if there is no classifier
    pool: Attention | None = None
    leaf: Tensor | None = None

    @property
    def entry(self) -> Tensor:
        """T, the tokens that enter a layer's attention, where gradients begin."""
        assert self.leaf is not None, "this run was not made from a layer"
        return self.leaf


def rows_of_run(run: Finished, rows: slice) -> Finished:
    """The outputs of a forward pass for some of its images, without its layers and graph."""
    output = run.output[rows].detach()
    embedding = output if run.embedding is run.output else run.embedding[rows].detach()
    return Finished(run.images[rows], (), NO_LAYER, output=output, embedding=embedding)


def perform(model: Model, layout: Layout, images: Images, how: Run, autocast: bool) -> Finished | Stopped:
    """Run the model."""
    device, rows = images.device.type, how.count or len(images)
    output = None
    if (how.grad or how.layer is not None) and not model.has_gradients:
        raise Unsupported(f"{model.name} has int8 weights, which pass no gradient on; try attention, occlusion or rise")
    if how.layer is not None and not layout.entries:
        raise Unsupported(f"{model.name} has no visible tokens before its attention, which this method needs")
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(how.grad))
        stack.enter_context(torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=autocast))
        still = stack.enter_context(model.still())
        stack.enter_context(how.within())
        if how.enter is not None:
            stack.enter_context(entering(block_of(model, layout, how.layer or 0), how.enter))
        if how.leave is not None:
            stack.callback(leaving(model, layout, how.leave).remove)
        if how.extend is not None:
            stack.enter_context(extending(model, layout, how.extend, how.extend_since))
        most = layout.calls if how.ends and not still.hooked else None
        stack.enter_context(suppress(Enough))
        seen = stack.enter_context(Capture(still.names, rows, since=how.since, most=most, forms=how.forms))
        if how.narrow is not None and not still.hooked:
            stack.enter_context(narrowed_block(model, layout, how.narrow, how.forms))
        cut = None if how.layer is None else CutAt(layout.entries[how.layer], seen, how.edit, layout.flat)
        stack.enter_context(cut if cut is not None else Unfrozen() if how.grad else nullcontext())
        output = run_extended(model, images) if how.extend is not None else model.run(images)
    layers = tuple(layout.arranged(call, rows) for call in seen.calls if layout.is_layer(call, rows))
    if output is None:
        return Stopped(images, layers, how.since)
    if len(output) != rows and how.extend is None:
        raise ModelError(f"{model.name} returns {len(output)} rows for {rows} images")
    pools = [call for call in seen.calls if layout.pooled and layout.is_pool(call, rows)]
    head = seen.linear if model.classifier is not False else None  # the last layer of a backbone is no classifier
    return Finished(
        images,
        layers,
        how.since,
        output=output,
        embedding=head[0] if head is not None and head[1] is output else output,
        pool=pools[-1] if pools else None,
        leaf=None if cut is None else cut.leaf,
    )


def run_extended(model: Model, images: Images) -> Tensor:
    """A forward pass with more rows behind its blocks than images."""
    try:
        return model.run(images)
    except Unsupported:
        raise
    except ModelError as error:
        raise Unsupported(
            f"{model.name} needs as many rows behind its blocks as it has images (it joins them with other inputs?), "
            "and this method adds some; try gae, rollout or gradcam"
        ) from error


def block_of(model: Model, layout: Layout, layer: int) -> nn.Module:
    """The block module of a layer."""
    if len(layout.blocks) != layout.layers:
        raise Unsupported(f"{model.name} {layout.no_blocks}, which this method needs; try gae, rollout or gradient")
    return model.module.get_submodule(layout.blocks[layer])


def narrowed_block(model: Model, layout: Layout, narrow: Narrow, forms: Forms | None) -> NarrowedBlock:
    """The narrowed last block; some tokens may have been cut out before."""
    read = layout.read_tokens
    assert read is not None
    gone = layout.tokens - (narrow.tokens or layout.tokens)
    return NarrowedBlock(
        block_of(model, layout, layout.layers - 1),
        [token if token < layout.prefix else token - gone for token in read],
        tokens=layout.tokens - gone,
        prefix=layout.prefix,
        patches=layout.patches - gone,
        axis=layout.batch_axis,
        fold=narrow.fold,
        show=forms.show if isinstance(forms, Follower) else None,
    )


def leaving(model: Model, layout: Layout, change: Edit) -> RemovableHandle:
    """A hook that changes the tokens that leave the last block, a module that may hold earlier layers too."""
    last, calls = block_of(model, layout, layout.layers - 1), 0

    def replaced(module: nn.Module, args: Any, out: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < layout.blocks.count(layout.blocks[-1]):
            return out
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return last.register_forward_hook(own_thread(replaced))


def extending(model: Model, layout: Layout, extend: Extend, since: int) -> ExitStack:
    """Hooks that collect the output of every block, detach blocks from each other, and append rows after the last."""
    blocks = [block_of(model, layout, i) for i in range(since, layout.layers)]
    taken: list[Tensor] = []  # [B N D] or [B h w D] each
    sent: list[Tensor] = []

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        got = args[0] if args else next(iter(kwargs.values()))
        if sent and got is not sent[-1]:
            raise Unsupported(f"{model.name} does not pass its tokens from block to block, which this method needs")

    def note(module: nn.Module, args: Any, out: Any) -> Any:
        stream = out[0] if isinstance(out, tuple) else out
        if not isinstance(stream, Tensor):
            raise Unsupported(f"{model.name} does not pass its tokens from block to block, which this method needs")
        taken.append(stream.movedim(layout.batch_axis, 0))
        if len(taken) < len(blocks):
            onward = stream.detach().requires_grad_()
        else:
            onward = torch.cat([stream, extend(tuple(taken)).movedim(0, layout.batch_axis)], layout.batch_axis)
        sent.append(onward)
        return (onward, *out[1:]) if isinstance(out, tuple) else onward

    stack = ExitStack()
    for block in dict.fromkeys(blocks):
        stack.callback(block.register_forward_pre_hook(own_thread(check), with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(own_thread(note)).remove)
    return stack


# ---------------------------------------------------------------------------------------------- gradients


def score_of(target: Target, run: Finished, rows: slice = slice(None)) -> Scores:
    """The score of the target, attached to the graph of the forward pass."""
    with torch.enable_grad():
        return widen(target(run.output[rows], run.embedding[rows]))


def gradients(y: Scores | list[Scores], wrt: Sequence[Tensor], keep: bool = True) -> tuple[Tensor, ...]:
    """∂Σy with respect to each tensor; `keep` retains the graph for another target."""
    ends = y if isinstance(y, list) else [y]
    if not all(end.requires_grad for end in ends):
        raise Unsupported(
            "the model runs without gradients (torch.inference_mode in its forward?); try attention or rollout"
        )
    found = torch.autograd.grad(ends, wrt, [torch.ones_like(end) for end in ends], retain_graph=keep, allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, wrt))
