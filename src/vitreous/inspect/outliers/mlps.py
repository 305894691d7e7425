"""The hidden units of a network's MLPs: the inputs of the second linear layer of each block, found by a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from vitreous.capture.attention import Attention, near
from vitreous.capture.narrowed_block import own_thread
from vitreous.trace.block_outputs import Keep
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace


@dataclass(frozen=True)
class Mlp:
    """The second linear layer of a block."""

    layer: int
    name: str  # of the linear layer, in the network
    units: int  # its inputs
    flat: bool  # its tokens are all tokens of the block, in the same axes, not on a grid
    axis: int  # of the images in its activations


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a linear layer."""

    name: str
    linear: nn.Linear
    x: Tensor


def find_mlps(trace: Trace) -> dict[int, Mlp]:
    """The MLP of each layer whose block has one: its last two linear layers, one after the other, behind attention."""
    calls: dict[int, list[Call]] = {}
    names = {id(module): name for name, module in trace.model.module.named_modules()}

    def hooks() -> ExitStack:
        stack = ExitStack()
        for layer in range(trace.layout.layers):
            for module in trace.block(layer).modules():
                if isinstance(module, nn.Linear):
                    note = partial(noted, calls.setdefault(layer, []), names[id(module)])
                    stack.callback(module.register_forward_pre_hook(own_thread(note)).remove)
        return stack

    seen = trace.run(trace.images[:1], Run.to_output().inside(hooks))
    shape = (1, trace.layout.tokens) if trace.batch_axis == 0 else (trace.layout.tokens, 1)
    found = ((layer, mlp_of(layer, calls.get(layer, []), one, shape)) for layer, one in enumerate(seen.layers))
    return {layer: mlp for layer, mlp in found if mlp is not None}


def noted(calls: list[Call], name: str, linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
    calls.append(Call(name, linear, args[0]))


def mlp_of(layer: int, calls: list[Call], attention: Attention, shape: tuple[int, int]) -> Mlp | None:
    """The MLP of a block that called these linear layers; None if they do not end with one. `shape`: of its tokens."""
    if len(calls) < 2:
        return None
    before, last = calls[-2:]
    units = last.linear.in_features
    whole = type(last.linear).forward is nn.Linear.forward and [one.name for one in calls].count(last.name) == 1
    pair = before.linear.out_features in (units, 2 * units) and before.linear.in_features <= units  # 2: gated
    if not whole or not pair or last.x.ndim not in (3, 4) or is_attended(last.x, attention):
        return None
    axis = 0 if last.x.ndim == 4 or last.x.shape[0] == 1 else 1
    return Mlp(layer, last.name, units, tuple(last.x.shape[:-1]) == shape, axis)


def is_attended(x: Tensor, attention: Attention) -> bool:
    """Whether these are what the heads return, so that the layer that takes them belongs to the attention."""
    heads = attention.fold(attention.node).transpose(1, 2).flatten(2)  # [B N H·d]
    return any(x.shape == one.shape and near(x, one) for one in (heads, heads.transpose(0, 1)))


# ------------------------------------------------------------------------------------------------------------ watching


def watch_units(trace: Trace, mlps: Mapping[int, Mlp], keep: Keep) -> ExitStack:
    """A context in which the activations of the hidden units of these layers are shown."""

    def note(mlp: Mlp, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        keep(mlp.layer, args[0].movedim(mlp.axis, 0))

    stack = ExitStack()
    for mlp in mlps.values():
        linear = trace.model.module.get_submodule(mlp.name)
        stack.callback(linear.register_forward_pre_hook(own_thread(partial(note, mlp))).remove)
    return stack
