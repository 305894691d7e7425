"""Keep only the tokens that enter each block of a forward pass; compute a block again when its backward pass comes.

Autograd keeps what every function of a network needs for its backward: for each block, many times its tokens. Inside
`Recomputed`, blocks keep nothing. When the backward pass asks for the first tensor of a block, the block is run once
more on the tokens that entered it: the same functions, so the same tensors in the same order. The graph is the usual
one, so that hooks on its tensors, rules and several targets work as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vitreous.capture.capture import Capture
from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import CaptureError

ORIGINAL = "_vitreous_original"  # attribute of a copy that a block is given: the tensor itself
Again = Callable[[bool], AbstractContextManager[Capture]]  # a context in which a block runs as it did before


def copied(tokens: Tensor) -> Tensor:
    """A copy for a block, which may add to its input in place; it knows the original."""
    copy = tokens.clone()
    setattr(copy, ORIGINAL, tokens)
    return copy


class Call:
    """One call of a block: what it was given, and what it kept for its backward.

    `again` makes the context in which it is run again; if it is given True, one that records the block's attention and
    ends there.
    """

    def __init__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: Again) -> None:
        self.block, self.again = block, again
        self.args, self.kwargs = tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}
        self.versions = self.versions_now()
        self.dropped: list[tuple[torch.Size, torch.dtype]] = []
        self.found: dict[int, Tensor] = {}  # by index: computed again, and not yet used

    def drop(self, tensor: Tensor) -> int:
        """Called where autograd keeps a tensor."""
        self.dropped.append((tensor.shape, tensor.dtype))
        return len(self.dropped) - 1

    def run(self, attention: bool = False) -> Capture:
        """Run the block again, on a copy of its tokens."""
        if self.versions_now() != self.versions:
            raise CaptureError(self.said("the tokens that entered a block were overwritten behind it"))
        with self.again(attention) as seen:
            self.block.forward(*map(given, self.args), **{name: given(value) for name, value in self.kwargs.items()})
        return seen

    def compute(self) -> None:
        """Find everything that was dropped."""
        found: list[tuple[Tensor, int]] = []
        with saved_tensors_hooks(lambda tensor: found.append((tensor.detach(), tensor._version)), unused):
            self.run()
        if [(tensor.shape, tensor.dtype) for tensor, _ in found] != self.dropped:
            raise CaptureError(self.said("a block that is run again on the same tokens does something else"))
        if any(tensor._version != version for tensor, version in found):
            raise CaptureError(self.said("a block overwrites what its gradient needs"))
        self.found = {index: tensor for index, (tensor, _) in enumerate(found)}

    def versions_now(self) -> list[int]:
        return [value._version for value in (*self.args, *self.kwargs.values()) if is_stream(value)]

    def said(self, what: str) -> str:
        return f"{what} ({type(self.block).__name__}); with more memory it runs once: vitreous.limit_memory('64GB')"


class Recomputed(ExitStack):
    """A context in which these blocks keep nothing for their backward but the tokens that enter them.

    `state` returns what makes the context of a block, as it is when the block begins.
    """

    def __init__(self, blocks: list[nn.Module], state: Callable[[], Again]) -> None:
        super().__init__()
        self.blocks, self.state = blocks, state
        self.calls: list[Call] = []
        self._open: list[saved_tensors_hooks] = []
        self._computed: list[Call] = []  # the one whose tensors were computed last

    def __enter__(self) -> Recomputed:
        super().__enter__()
        self.callback(self.close_all)
        for block in dict.fromkeys(self.blocks):
            enter, leave = own_thread(self.enter), own_thread(self.leave)
            self.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            self.callback(block.register_forward_hook(leave, prepend=True, always_call=True).remove)
        return self

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Keep what a block is given, and drop what it keeps, until `leave`."""
        args, kwargs = tuple(map(safe, args)), {name: safe(value) for name, value in kwargs.items()}
        call = Call(block, args, kwargs, self.state())
        self.calls.append(call)
        computed = self._computed

        def find(index: int) -> Tensor:
            if index not in call.found:
                for other in computed:
                    other.found.clear()
                call.compute()
                computed[:] = [call]
            return call.found.pop(index)

        hooks = saved_tensors_hooks(call.drop, find)
        hooks.__enter__()
        self._open.append(hooks)
        return args, kwargs

    def leave(self, *_: Any) -> None:
        self._open.pop().__exit__()

    def close_all(self) -> None:
        """After an error inside a block."""
        while self._open:
            self._open.pop().__exit__()


def unused(_: None) -> Tensor:
    raise AssertionError("a block that was run again has no backward")


def safe(value: Any) -> Any:
    """A copy of the tokens, unless it is one already."""
    return copied(value) if is_stream(value) and not hasattr(value, ORIGINAL) else value


def kept(value: Any) -> Any:
    """What is kept of an argument: of the tokens, their values."""
    if not is_stream(value):
        return value
    original: Tensor = getattr(value, ORIGINAL)
    return original.detach().requires_grad_(original.requires_grad)


def given(value: Any) -> Any:
    """What a block that is run again gets for it."""
    return value.clone() if is_stream(value) else value


def is_stream(value: Any) -> bool:
    """Whether an argument of a block holds activations, which a block may overwrite."""
    return isinstance(value, Tensor) and value.is_floating_point() and not isinstance(value, nn.Parameter)
