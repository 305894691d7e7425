"""What a network adds to its signal: biases, and any other constant, with what each contributes to the score.

    y = f(x) + c     c contributes Σ c ⊙ ∂y/∂f; with x·∂y/∂x of the signal itself, the contributions sum to the score

The mode is entered inside `Rules`, so that gradients are those of the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import widen
from vitreous.trace.rules.mode import carries, constant, spelled, tensors_in, words

Make = Callable[[], Tensor]  # makes the constant, in a shape that broadcasts with the result

LAST = {"linear": 2, "layer_norm": 3}  # a bias of the last axis, by its place among the arguments
SECOND = dict.fromkeys(words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d"), 2) | {"group_norm": 3}
AFFINE = words("add sub rsub cat concat concatenate stack where masked_fill addmm baddbmm addbmm")


@dataclass(frozen=True)
class Added:
    """The contribution of one constant, summed over channels, and the block in which it was added."""

    block: int
    values: Tensor


class Constants(TorchFunctionMode):
    """Note the constants of a forward pass from the first block on; each backward pass adds to `found`.

    `block`: the current block, set from outside; −1: before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = -1
        self.found: list[Added] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(map(constant, args))
        kwargs = {key: constant(value) for key, value in (kwargs or {}).items()}
        name, fresh, _ = spelled(func)
        make, axis = added(name, fresh, args, kwargs) if self.block >= 0 else (None, -1)
        out = func(*args, **kwargs)
        if make is not None and carries(out):
            out.register_hook(self.noting(self.block, make, axis))
        return out

    def noting(self, block: int, make: Make, axis: int) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            self.found.append(Added(block, (widen(grad) * make()).sum(axis)))

        return hook


def added(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Make | None, int]:
    """The constant that a function adds to its result, if any, and the axis of the channels."""
    if name in LAST or name in SECOND:
        place = LAST.get(name) or SECOND[name]
        bias = args[place] if len(args) > place else kwargs.get("bias")
        if bias is None:
            return None, -1
        axis = -1 if name in LAST else 1
        shape = (-1,) if name in LAST else (-1, *[1] * (args[0].ndim - 2))
        return (lambda: widen(bias).view(shape) if bias.ndim == 1 else widen(bias)), axis
    if name == "batch_norm":
        return without_signal(func, args, kwargs), 1
    if name in AFFINE and has_constant(args):
        return without_signal(func, args, kwargs), -1
    return None, -1


def has_constant(args: tuple[Any, ...]) -> bool:
    """Whether some of the arguments are no signal: a number, or a tensor."""
    return any(isinstance(arg, int | float) for arg in args) or not all(map(carries, tensors_in(args)))


def without_signal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Make:
    """The function of its constant arguments alone."""
    given, named = [quiet(arg) for arg in args], {key: quiet(value) for key, value in kwargs.items()}

    def make() -> Tensor:
        with torch.no_grad():
            return widen(func(*given, **named))

    return make


def quiet(value: Any) -> Any:
    """A signal as zeros that take no memory; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(quiet, value))
    return value.new_zeros(()).expand(value.shape) if carries(value) else value
