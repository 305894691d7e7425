"""Other tokens behind the last block than the network made: of other images, or of further rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import ModelError, Unsupported

Extend = Callable[[tuple[Tensor, ...]], Tensor]


def run_extended(name: str, call: Callable[[], Tensor]) -> Tensor:
    """A forward pass with more rows behind its blocks than images."""
    try:
        return call()
    except Unsupported:
        raise
    except ModelError as error:
        raise Unsupported(
            f"{name} needs as many rows behind its blocks as it has images (it joins them with other inputs?), "
            "and this method adds some; try gae, rollout or gradcam"
        ) from error


def leaving(last: nn.Module, times: int, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """A hook that changes the tokens that leave the last block, a module that may hold earlier layers too."""
    calls = 0

    def replaced(module: nn.Module, args: Any, out: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < times:
            return out
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    return last.register_forward_hook(own_thread(replaced))


def is_normed(tokens: Tensor, before: Tensor) -> bool:
    """Whether tokens are those of a leaf behind one layer norm, as between an encoder and the blocks of its pool."""
    made = tokens.grad_fn
    if made is None or not made.name().startswith("NativeLayerNorm"):
        return False
    return getattr(made.next_functions[0][0], "variable", None) is before


def extending(name: str, blocks: Sequence[nn.Module], axis: int, extend: Extend, count: int) -> ExitStack:
    """Hooks that collect the output of every block, detach blocks from each other, and append rows after the last.

    `count`: the rows of the images themselves; further ones, which have inputs of their own, are replaced.
    """
    taken: list[Tensor] = []  # [B N D] or [B h w D] each
    sent: list[Tensor] = []

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        got = args[0] if args else next(iter(kwargs.values()))
        if sent and got is not sent[-1] and not is_normed(got, sent[-1]):
            said = f"{name} does not pass its tokens from block to block, which this method needs"
            raise Unsupported(f"{said}; try gae, rollout or gradient")

    def note(module: nn.Module, args: Any, out: Any) -> Any:
        stream = out[0] if isinstance(out, tuple) else out
        if not isinstance(stream, Tensor):
            said = f"{name} does not pass its tokens from block to block, which this method needs"
            raise Unsupported(f"{said}; try gae, rollout or gradient")
        own = stream.narrow(axis, 0, count)
        taken.append(own.movedim(axis, 0))
        if len(taken) < len(blocks):
            onward = stream.detach().requires_grad_()
        else:
            onward = torch.cat([own, extend(tuple(taken)).movedim(0, axis)], axis)
        sent.append(onward)
        return (onward, *out[1:]) if isinstance(out, tuple) else onward

    stack = ExitStack()
    for block in dict.fromkeys(blocks):
        stack.callback(block.register_forward_pre_hook(own_thread(check), with_kwargs=True).remove)
        stack.callback(block.register_forward_hook(own_thread(note)).remove)
    return stack
