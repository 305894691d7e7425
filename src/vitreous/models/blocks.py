"""The modules that hold a network's layers, and which of them the output reads."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from vitreous.capture.attention import Attention
from vitreous.capture.narrowed_block import own_thread
from vitreous.models.data_flow import Node, first_met


class BlockOutputs(ExitStack):
    """A context that notes where in the autograd graph each item of a list of modules ends, each time it runs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.ends: dict[str, list[Node]] = {}
        for name, parent in net.named_modules():
            if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) > 1:
                for key, item in parent.named_children():
                    self._note(f"{name}.{key}" if name else key, item)

    def _note(self, name: str, item: nn.Module) -> None:
        def note(module: nn.Module, args: Any, out: Any) -> None:
            made = out[0] if isinstance(out, tuple | list) and out else out
            self.ends.setdefault(name, []).append(made.grad_fn if isinstance(made, Tensor) else None)

        self.callback(item.register_forward_hook(own_thread(note)).remove)

    def run_once(self, blocks: tuple[str, ...]) -> bool:
        """Whether each of these runs exactly once in a forward pass, as far as is known."""
        return all(len(self.ends.get(block, [None])) == 1 for block in blocks)

    def read(self, output: Tensor, blocks: tuple[str, ...]) -> list[int]:
        """The blocks whose output is read other than by the next one; empty: unknown."""
        ends = [self.ends.get(block, [None])[0] for block in blocks]
        return [] if None in ends or output.grad_fn is None else first_met(output.grad_fn, ends)


def blocks_of(net: nn.Module, calls: list[Attention]) -> tuple[str, ...]:
    """The module that holds each layer, in order, once each; none where the network itself attends."""
    names = list(dict.fromkeys(call.name for call in calls))
    blocks = [item_of(net, name) or child_of(names, name) for name in names]
    runs = not any(isinstance(net.get_submodule(block), nn.ModuleList) for block in blocks)
    return tuple(dict.fromkeys(block for block in blocks if block)) if runs else ()


def item_of(net: nn.Module, name: str) -> str:
    """The innermost ancestor that is one of several items of a ModuleList or Sequential; of nested lists, the list."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        parent = net.get_submodule(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) > 1:
            above = net.get_submodule(".".join(parts[: end - 2])) if end > 1 else None
            nested = isinstance(parent, nn.ModuleList) and isinstance(above, nn.ModuleList)
            return ".".join(parts[: end - 1] if nested else parts[:end])
    return ""


def child_of(names: list[str], name: str) -> str:
    """The child, on the way to `name`, of what all names have in common; of a single name, its parent."""
    if len(names) == 1:
        return name.rpartition(".")[0] or name
    parts = [n.split(".") for n in names]
    common = next(i for i in range(len(name)) if len({tuple(p[: i + 1]) for p in parts}) > 1)
    return ".".join(name.split(".")[: common + 1])
