"""One differentiable forward pass under a table of rules (or none), with the tokens and the attention of every layer.

A trace keeps one such pass for each table, so that several methods and targets share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitreous.capture.capture import ModuleNames
from vitreous.capture.narrowed_block import own_thread
from vitreous.capture.recomputed import copied
from vitreous.capture.shown import Visitor, shown
from vitreous.errors import Unsupported
from vitreous.models.blocks import tensor_of
from vitreous.models.data_flow import first_met, leaf_node
from vitreous.trace.big import is_big, sparing
from vitreous.trace.last_block import narrowing
from vitreous.trace.rules.constants import Constants
from vitreous.trace.rules.mode import Rules, Table, carries, warn_of
from vitreous.trace.run import Finished, Run, gradients
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.types import Row

Pair = tuple[Tensor, Tensor]  # tokens and their gradient, batch first
Visit = Callable[[int, Tensor, Tensor], None]  # the same, with the number of the block


@dataclass(frozen=True, eq=False)
class Ruled:
    """A forward pass under rules. Tokens are in the model's own axes and part of the autograd graph.

    `entering`, `leaving`: the tokens before and behind each block; empty if these are not modules that feed one
    another. `first`: the tokens that enter the first block, or the first layer if there are no blocks. `narrowed`: the
    last block ran only for the tokens that are read, so that what leaves it is incomplete. `constants`: what was added
    to the signal from the first block on, if it was asked for.
    """

    run: Finished
    rules: Rules | None
    entering: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]
    first: Tensor | None
    narrowed: bool
    constants: Constants | None = None


class Stream:
    """Notes the tokens that enter and leave some blocks during a forward pass."""

    def __init__(self, blocks: list[nn.Module], constants: Constants | None = None) -> None:
        self.blocks, self.constants = blocks, constants
        self.entering: dict[int, Tensor] = {}
        self.leaving: dict[int, Tensor] = {}

    def watched(self) -> ExitStack:
        stack = ExitStack()
        for number, block in enumerate(self.blocks):
            before, behind = own_thread(partial(self.enter, number)), own_thread(partial(self.leave, number))
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(behind).remove)
        return stack

    def enter(self, number: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Note the tokens and pass a copy on, since a block may add to its input in place."""
        tokens = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(tokens, Tensor):
            return None
        self.entering.setdefault(number, tokens)
        if self.constants is not None:
            self.constants.block = number
        copy = copied(tokens)
        return ((copy, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): copy})

    def leave(self, number: int, block: nn.Module, args: Any, out: Any) -> None:
        tokens = tensor_of(out)
        if tokens is not None:
            self.leaving.setdefault(number, tokens)

    def complete(self, images: Tensor) -> bool:
        """Whether everything passes from each block to the next: nothing of the image bypasses the tokens between."""
        every = range(len(self.blocks))
        if not all(carries(self.entering.get(i)) and carries(self.leaving.get(i)) for i in every):
            return False
        ends = [self.leaving[i].grad_fn for i in every]
        begins = [self.entering[i].grad_fn for i in every]
        stops = [*ends, leaf_node(images)]
        return all(begins[i] is ends[i - 1] or first_met(begins[i], stops) == [i - 1] for i in every[1:])


def ruled(
    trace: Trace,
    table: Table | None,
    *,
    whole: bool = False,
    constants: bool = False,
    seen: bool = True,
    blocks: bool = True,
) -> Ruled:
    """The forward pass of a trace under a table; None: with its plain gradient.

    `whole`: never narrow the last block. `constants`: note everything that is added to the signal. `seen=False`: the
    attention is not needed, so that a big model need not keep it. `blocks=False`: of the tokens of the blocks, only
    those that enter the first are needed.
    """
    narrow = narrowing(trace, fold=False)  # checked without the rules
    full = whole and narrow is not None
    spare = not (seen or constants) and (table is None or table.repeats) and is_big(trace)
    name = f"{'plain' if table is None else table.name}, whole={full}, constants={constants}, spare={spare}"
    how = Run.from_pixels().narrowed(None if full else narrow)
    how = how.unseen() if trace.once and not seen else how  # else, another method may need what this one does not
    noted = 1 if trace.once and not blocks else None

    def make() -> tuple[Finished, Ruled]:
        made = run_ruled(trace, table, how, Constants() if constants else None, spare, noted)
        return made.run, made

    kept: Ruled = trace.kept(name, make)[1]
    return kept


def run_ruled(
    trace: Trace, table: Table | None, how: Run, constants: Constants | None, spare: bool, noted: int | None
) -> Ruled:
    """`noted`: the tokens of so many blocks are noted; None: of all."""
    layout, images = trace.layout, trace.images.detach().clone().requires_grad_()
    blocks = layout.blocks or layout.flat_blocks
    has_blocks = bool(blocks) and len(blocks) == layout.layers
    found_in = trace.model.module.get_submodule
    stream = Stream([found_in(block) for block in blocks[:noted]] if has_blocks else [], constants)
    how = how.inside(stream.watched).of(range(len(trace)))
    with mode(trace, table, has_blocks) as rules, constants or nullcontext():
        record = trace.run(images, sparing(trace, how, lambda: rules or nullcontext()) if spare else how)
    found = stream.entering.get(0)
    if rules is not None and not has_blocks:
        found, rules.entered = rules.entered, None
    every = range(layout.layers) if has_blocks and noted is None and stream.complete(images) else range(0)
    return Ruled(
        record,
        rules,
        tuple(stream.entering[i] for i in every),
        tuple(stream.leaving[i] for i in every),
        found if carries(found) else None,
        how.narrow is not None,
        constants,
    )


def mode(trace: Trace, table: Table | None, has_blocks: bool = True) -> Rules | nullcontext[None]:
    """The rules as a context; without blocks, the tokens before the first layer are noted."""
    entries = trace.layout.entries
    entry = None if has_blocks or not entries else entries[0]
    return nullcontext() if table is None else Rules(table, ModuleNames(trace.model.module), entry)


# ------------------------------------------------------------------------------------------------------- gradients


def grads_under(trace: Trace, found: Ruled, target: Target, wrt: list[Tensor]) -> tuple[Tensor, ...]:
    """∂y with respect to each tensor of the pass; functions without a rule are named in a warning."""
    grads = gradients(trace.score(target, found.run), wrt)
    if found.rules is not None:
        warn_of(found.rules, trace.facts, trace.model.name)
    return grads


def only_grad_under(trace: Trace, found: Ruled, target: Target, wrt: Tensor) -> Tensor:
    """The same of one tensor; a trace for one map does not keep the pass."""
    grad = trace.only_grad(trace.score(target, found.run), wrt)
    if found.rules is not None:
        warn_of(found.rules, trace.facts, trace.model.name)
    return grad


def token_grads(trace: Trace, found: Ruled, target: Target, tokens: tuple[Tensor, ...]) -> list[Pair]:
    """Some of the tokens of the pass with their gradients, [B N D] (or [B h w D]), in one backward pass."""
    for one in tokens:
        refuse_other_axes(trace, one)
    grads = grads_under(trace, found, target, list(tokens))
    return [(trace.batch_first(t.detach()), trace.batch_first(grad)) for t, grad in zip(tokens, grads)]


def show_grads(trace: Trace, found: Ruled, target: Target, tokens: tuple[Tensor, ...], visit: Visit) -> None:
    """Pass each of these tokens (first to last) with its gradient to `visit` as soon as the backward pass has it, so
    that there is one gradient at a time.
    """
    left = dict(enumerate(tokens))

    def show(number: int, grad: Tensor) -> None:
        one = left.pop(number)
        visit(number, trace.batch_first(one.detach()), trace.batch_first(grad))

    for one in tokens:
        refuse_other_axes(trace, one)
    with ExitStack() as stack:
        for number, one in enumerate(tokens):
            stack.callback(one.register_hook(partial(show, number)).remove)  # type: ignore[no-untyped-call]
        grads_under(trace, found, target, [tokens[0]])
    for number, one in list(left.items()):  # the score does not depend on these
        show(number, torch.zeros_like(one))


def refuse_other_axes(trace: Trace, tokens: Tensor) -> None:
    """Raise if a block takes something with four axes that is no grid of tokens, such as [B D h w]."""
    count = math.prod(tokens.shape[1:3])
    grid, _ = trace.layout.orders.get(count, (trace.layout.grid, ()))
    if tokens.ndim > 4 or (tokens.ndim == 4 and tuple(tokens.shape[1:3]) != grid):
        found = "×".join(map(str, tokens.shape[1:]))
        said = f"a block of {trace.model.name} takes {found}, which is not a grid of tokens"
        raise Unsupported(f"{said}. Try attn_lrp, cp_lrp or gradcam.")


def entering_blocks(trace: Trace, found: Ruled) -> tuple[Tensor, ...]:
    """The tokens that enter each block; raise if the blocks do not show them."""
    if found.entering:
        return found.entering
    said = f"{trace.model.name} does not pass its tokens from block to block, each a module of its own"
    raise Unsupported(f"{said}, which this method needs. Try attn_lrp or cp_lrp.")


def follow_ruled(trace: Trace, found: Ruled, target: Target, visit: Visitor) -> None:
    """Pass A and A ⊙ ∂y/∂A of every layer to `visit`, by rows, from the last layer to the first."""
    layers = found.run.layers
    grads = grads_under(trace, found, target, [layer.node for layer in layers])
    for layer, grad in reversed(list(zip(layers, grads))):
        visit(shown(layer, grad))


def received(trace: Trace, found: Ruled) -> list[Float[Tensor, "B N"]]:
    """ᾱ of every layer: the attention that each token receives, averaged over heads and all queries."""
    tokens = trace.layout.tokens
    even: Row = trace.images.new_full((len(trace), tokens), 1 / tokens)
    return [layer.read(even.to(layer.wide)).mean(1).detach() for layer in found.run.layers]


def entry_grad_ruled(trace: Trace, table: Table, target: Target, layer: int) -> Pair:
    """T, the tokens that enter a layer's attention, and ∂y/∂T under the rules; gradients run to that layer only."""
    number = trace.layer_number(layer)

    def make() -> tuple[Finished, Rules]:
        if not trace.layout.entries:
            raise Unsupported(f"{trace.model.name} has no visible tokens before its attention, which this method needs")
        how = Run.from_layer(number).unseen().narrowed(narrowing(trace, fold=False))
        with Rules(table, ModuleNames(trace.model.module)) as rules:
            return trace.run(trace.images, how), rules

    record, rules = trace.kept(f"{table.name} from layer {number}", make)
    (grad,) = gradients(trace.score(target, record), [record.entry])
    warn_of(rules, trace.facts, trace.model.name)
    return trace.batch_first(record.entry.detach()), trace.batch_first(grad)
