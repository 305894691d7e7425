"""What depends on what in one forward pass, read from its autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Node = Any  # a node of torch's autograd graph


class DataFlow:
    """The graph between an output and some marked tensors of the same forward pass, in the order they were made."""

    def __init__(self, output: Tensor, marked: Sequence[Tensor], leaf: Tensor | None = None) -> None:
        self.output, self.tensor = output.grad_fn, output
        self.leaf = leaf if leaf is not None and leaf.requires_grad else None
        self.marks: dict[Node, int] = {}
        if leaf is not None and leaf.requires_grad:
            self.marks[leaf_node(leaf)] = 1 << len(marked)
        for number, tensor in enumerate(marked):
            if tensor.grad_fn is not None:
                self.marks[tensor.grad_fn] = self.marks.get(tensor.grad_fn, 0) | 1 << number
        self._below: dict[Node, int] = {}
        self._nodes = [tensor.grad_fn for tensor in marked]

    @property
    def known(self) -> bool:
        """Whether there is a graph; not where the network runs without gradients."""
        return self.output is not None

    def read(self) -> list[int]:
        """The marked tensors that the output depends on."""
        found = self.below(self.output)
        return [number for number in range(len(self._nodes)) if found >> number & 1]

    def of_leaf(self, number: int) -> bool:
        """Whether a marked tensor depends on the leaf; an attention over another input does not."""
        node = self._nodes[number]
        known = 1 << len(self._nodes) in self.marks.values()
        return not known or self.is_of_leaf(node)

    def is_of_leaf(self, node: Node) -> bool:
        """Whether what a node made depends on the leaf."""
        return node is not None and bool(self.below(node) >> len(self._nodes) & 1)

    def feeds(self, one: int, other: int) -> bool:
        """Whether a marked tensor depends on an earlier one."""
        return bool(self.below(self._nodes[other]) >> one & 1)

    def through(self, one: int, other: int, following: int | None = None) -> bool:
        """Whether the output takes what lies between two marked tensors only through the later one and its residual.

        All that it takes from the first passes a point that the later one depends on; the last of these points are the
        tokens before it. All ways from there must meet again before the `following` one, or, behind the last, where a
        residual is added to tokens.
        """
        inside = reached(self._nodes[other])
        between = [node for node in self._above(self._nodes[one]) if node in inside]
        if not between:
            return False
        joined = self._dominators[between[-1]]
        if joined is None or joined in inside:
            return True
        if following is None:
            return "Add" in joined.name() and len(joined._input_metadata[0].shape) > 2
        return joined in reached(self._nodes[following]) or not self._reads(joined, between[-1], following)

    def _reads(self, node: Node, tokens: Node, following: int) -> bool:
        """Whether a gradient goes from a node to the tokens on a way that the following marked tensor is not on."""
        if self.leaf is None:
            return True
        gone: list[Tensor | None] = []
        handle = node.register_hook(lambda passed, _: gone.extend(passed))
        try:
            torch.autograd.grad(self.tensor.square().sum(), [self.leaf], retain_graph=True, allow_unused=True)
        finally:
            handle.remove()
        ways = [reached(source) for source, _ in node.next_functions]
        aside = [tokens in way and self._nodes[following] not in way for way in ways]
        return any(grad is not None and bool(grad.any()) for grad, beside in zip(gone, aside) if beside)

    def _above(self, node: Node) -> Iterator[Node]:
        """The nodes that all ways from the output to this one lead through, the nearest first."""
        above = self._dominators.get(node)
        while above is not None:
            yield above
            above = self._dominators[above]

    @cached_property
    def _dominators(self) -> dict[Node, Node]:
        """For every node, the last one before it that all ways from the output lead through."""
        order = downwards(self.output)
        place = {node: number for number, node in enumerate(order)}
        found: dict[Node, Node] = {self.output: None}
        for node in order:
            for source, _ in node.next_functions:
                if source is not None:
                    found[source] = node if source not in found else common(found, place, found[source], node)
        return found

    def below(self, start: Node) -> int:
        """The marked tensors at or below a node, as bits."""
        left = [start]
        while left:
            node = left[-1]
            if node in self._below:
                left.pop()
                continue
            inputs = [source for source, _ in node.next_functions if source is not None]
            unknown = [source for source in inputs if source not in self._below]
            if unknown:
                left += unknown
                continue
            found = self.marks.get(node, 0)
            for source in inputs:
                found |= self._below[source]
            self._below[node] = found
            left.pop()
        return self._below[start]


def reached(start: Node) -> set[Node]:
    """All nodes at or below one."""
    seen: set[Node] = set()
    left = [start]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [source for source, _ in node.next_functions]
    return seen


def downwards(start: Node) -> list[Node]:
    """All nodes at or below one, each before what it depends on."""
    done: list[Node] = []
    seen: set[Node] = set()
    left: list[tuple[Node, bool]] = [(start, False)]
    while left:
        node, finished = left.pop()
        if finished:
            done.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            left.append((node, True))
            left += [(source, False) for source, _ in node.next_functions]
    return done[::-1]


def common(above: dict[Node, Node], place: dict[Node, int], one: Node, other: Node) -> Node:
    """The last node that the ways to both lead through."""
    while one is not other:
        if place[one] > place[other]:
            one = above[one]
        else:
            other = above[other]
    return one


def leaf_node(leaf: Tensor) -> Node:
    """Where the autograd graph of a leaf begins."""
    with torch.enable_grad():
        view = leaf.view_as(leaf).grad_fn
    return None if view is None else view.next_functions[0][0]


def first_met(start: Node, stops: Sequence[Node]) -> list[int]:
    """Which of these nodes are met on some way down from `start` that leads through none of the others."""
    numbers = {node: number for number, node in enumerate(stops)}
    met: set[int] = set()
    seen: set[Node] = set()
    left = [start]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in numbers:
            met.add(numbers[node])
        else:
            left += [source for source, _ in node.next_functions]
    return sorted(met)


def chains(flow: DataFlow, numbers: Iterable[int]) -> list[list[int]]:
    """Cut a sequence of marked tensors wherever one does not depend on the one before it."""
    found: list[list[int]] = []
    for number in numbers:
        if found and flow.feeds(found[-1][-1], number):
            found[-1].append(number)
        else:
            found.append([number])
    return found
