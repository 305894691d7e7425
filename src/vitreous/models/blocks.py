"""The modules that hold a network's layers, and which of them the output reads."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from vitreous.capture.attention import Attention
from vitreous.capture.narrowed_block import own_thread
from vitreous.models.data_flow import Node, first_met


class BlockOutputs(ExitStack):
    """A context that notes where in the autograd graph each item of a list of modules begins and ends, in each run."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.ends: dict[str, list[tuple[Node, Tensor | None]]] = {}
        for name, parent in net.named_modules():
            if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) > 1:
                for key, item in parent.named_children():
                    self._note(f"{name}.{key}" if name else key, item)

    def _note(self, name: str, item: nn.Module) -> None:
        def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            self.ends.setdefault(name, []).append((node_of(given), tensor_of(out)))

        self.callback(item.register_forward_hook(own_thread(note), with_kwargs=True).remove)

    def run_once(self, blocks: tuple[str, ...]) -> bool:
        """Whether each of these runs exactly once in a forward pass, as far as is known."""
        return all(len(self.ends.get(block, [None])) == 1 for block in blocks)

    def flat(self, blocks: tuple[str, ...]) -> bool:
        """Whether these return tokens [N D], without an axis of images."""
        found = [out for block in blocks for _, out in self.ends.get(block, []) if out is not None]
        return bool(found) and all(out.ndim == 2 for out in found)

    def read(self, output: Tensor, blocks: tuple[str, ...]) -> list[int]:
        """The blocks whose output is read other than by the next one; empty: unknown, as no block feeds the next."""
        ends = [self.ends.get(block, [(None, None)])[0] for block in blocks]
        nodes = [node_of(out) for _, out in ends]
        chain = all(made is given for made, (given, _) in zip(nodes, ends[1:]))
        known = chain and output.grad_fn is not None and None not in nodes
        return first_met(output.grad_fn, nodes) if known else []

    def streams(self, blocks: tuple[str, ...]) -> list[Tensor]:
        """What each of these blocks returned."""
        found = [self.ends[block][0][1] for block in blocks]
        return [out for out in found if out is not None]


def tensor_of(given: Any) -> Tensor | None:
    """A tensor, or the first of several."""
    first = given[0] if isinstance(given, tuple | list) and given else given
    return first if isinstance(first, Tensor) else None


def node_of(given: Any) -> Node:
    """Where in the graph it was made."""
    first = tensor_of(given)
    return None if first is None else first.grad_fn


def blocks_of(net: nn.Module, calls: list[Attention]) -> tuple[str, ...]:
    """The module that holds each layer, in order, once each; none where the network itself attends."""
    names = list(dict.fromkeys(call.name for call in calls))
    items = [item_of(net, name) for name in names]
    least = 1 if any(items) else 2  # beside other lists, a list of one item holds a block too
    blocks = [item or item_of(net, name, least) or child_of(names, name) for item, name in zip(items, names)]
    runs = not any(isinstance(net.get_submodule(block), nn.ModuleList) for block in blocks)
    return tuple(dict.fromkeys(block for block in blocks if block)) if runs else ()


def item_of(net: nn.Module, name: str, least: int = 2) -> str:
    """The innermost ancestor that is one of several items of a ModuleList or Sequential; of nested lists, the list.

    `least`: how many items there must be.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        parent = net.get_submodule(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) >= least:
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
