"""The last block for the tokens that the head reads, and for no others.

A CLS logit needs one query of the last attention and one row of its MLP. So the last block runs twice: over all tokens
up to its attention, which gives keys and values, and then over the tokens that are read, whose queries meet those keys.
No anatomy is assumed but that everything in a block except its attention treats each token alone; whether that holds is
found out once for each model, beside the whole run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitreous.attention import run_of, widen
from vitreous.errors import ModelError, Unsupported

if TYPE_CHECKING:
    from vitreous.trace import Trace

Known = WeakKeyDictionary[nn.Module, dict[tuple[int, int], bool]]
_tails: Known = WeakKeyDictionary()


class Reached(BaseException):
    """Raised inside the last block where its attention begins."""


class Tail(ExitStack):
    """A context in which the last block computes what is read of it; other rows that leave it are zero.

    `read`: the tokens that are read, of `tokens` in all, of which the patches begin behind `prefix`.
    """

    def __init__(self, block: nn.Module, read: list[int], tokens: int, prefix: int, patches: int, axis: int) -> None:
        super().__init__()
        self.read, self.tokens, self.axis = read, tokens, axis
        inside = [token - prefix for token in read if prefix <= token < prefix + patches]
        self.rows = {patches: inside, tokens: read}
        self.whole: tuple[Any, ...] | None = None  # what all tokens brought to the attention
        self.state = "before"  # … then "whole", "read", "after"
        self.callback(block.register_forward_pre_hook(own_thread(self.enter), with_kwargs=True).remove)
        self.callback(block.register_forward_hook(own_thread(self.leave)).remove)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """All tokens up to the attention, then go on with those that are read."""
        self.state = "whole"
        try:
            block.forward(*args, **kwargs)
        except Reached:
            self.state = "read"
            return tuple(map(self.narrow, args)), {name: self.narrow(value) for name, value in kwargs.items()}
        raise Unsupported("the last block shows no attention")

    def narrow(self, value: Any) -> Any:
        """What belongs to the tokens that are read: of the tokens themselves, rotations, masks."""
        if isinstance(value, tuple | list):
            return type(value)(self.narrow(one) for one in value)
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if value.ndim == 3 and value.shape[1 - self.axis] == self.tokens:
            return value[self.place(self.read)]
        rows = self.rows.get(value.shape[-2])
        return value if rows is None else value[..., run_of(rows), :]

    def place(self, tokens: list[int]) -> Any:
        """Where these tokens are in the model's own axes."""
        return (slice(None), run_of(tokens)) if self.axis == 0 else run_of(tokens)

    def leave(self, block: nn.Module, args: Any, out: Any) -> Any:
        """Rows of nothing for the tokens that nobody reads."""
        self.state = "after"
        part = out[0] if isinstance(out, tuple) else out
        shape = list(part.shape)
        shape[1 - self.axis] = self.tokens
        whole = part.new_zeros(shape)
        whole[self.place(self.read)] = part
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def attention(self, *brought: Any) -> tuple[Any, ...]:
        """What all tokens brought to the attention; in the first of the two runs it ends here."""
        if self.state == "whole":
            self.whole = brought
            raise Reached
        assert self.whole is not None
        return self.whole


def own_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that leaves runs of the same network in other threads as they are."""
    mine = threading.get_ident()

    def called(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == mine else None

    return called


def tails(trace: Trace) -> bool:
    """May the last block of this model be run for the tokens that are read?"""
    return known(trace, _tails, can_tail)


def can_tail(trace: Trace) -> bool:
    """Do the output and its gradient stay as they are?"""
    layout = trace.layout
    if trace.read_tokens is None or not layout.probed or len(set(layout.blocks)) != layout.layers:
        return False
    image, cut = trace.images[:1], layout.layers - 1 if layout.entries else None
    outputs: list[Tensor] = []
    grads: list[Tensor] = []
    for tail in (True, False):
        try:
            run = trace.run(image, cut=cut, tail=tail)
        except (ModelError, RuntimeError, IndexError):
            return False
        assert run.output is not None
        outputs.append(run.output.detach())
        if run.entry is not None and run.output.requires_grad:
            along = torch.linspace(-1, 1, run.output.shape[1], device=image.device).to(run.output.dtype)
            grads += torch.autograd.grad([run.output], [run.entry], [along[None]])
    return near(*outputs) and (len(grads) != 2 or near(*grads))


def known(trace: Trace, found: Known, find: Callable[[Trace], bool]) -> bool:
    """What was found out about a model at this image size; found out once."""
    of_model = found.setdefault(trace.model.module, {})
    if trace.size not in of_model:
        of_model[trace.size] = find(trace)
    return of_model[trace.size]


def near(one: Tensor, other: Tensor) -> bool:
    """The same but for rounding."""
    close = 1e-4 if other.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((widen(one) - widen(other)).abs().max() <= close * widen(other).abs().max())
