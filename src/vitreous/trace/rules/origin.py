"""Where a tensor comes from: the layers that made it, found in autograd's graph.

A layer is any function that mixes channels, tokens or pixels: a linear layer, a convolution, a product, a norm, a pool.
Functions that rearrange a tensor or change each value by itself are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from vitreous.trace.rules.gradient import ACTIVATIONS, GATES
from vitreous.trace.rules.mode import SHAPE, words

PASSED = SHAPE | ACTIVATIONS | GATES
PASSED |= words("add sub rsub mul div neg positive pow rsqrt reciprocal identity share slice alias unsafe_view to_copy")
PASSED |= words("copy_slices index_put reshape_alias unsafe_split view_as_complex view_as_real im2_col col2_im")
LEAF = "accumulate_grad"  # of the pixels: parameters carry no signal


def is_residual(a: Tensor, b: Tensor) -> bool:
    """Whether a + b joins a tensor and what layers made of it, as in x + f(norm(x)).

    Not so the parts of a function that is written out, such as a rotary embedding, q·cos + rotated(q)·sin, which come
    from one layer; nor the sum of two outputs, of which neither was made from the other.
    """
    if a.shape != b.shape:
        return False
    one, other = layers_of(a), layers_of(b)
    return not one & other and (is_made_from(other, one) or is_made_from(one, other))


def is_embedding(x: Tensor) -> bool:
    """Whether no layer lies between the pixels and x, which a layer is about to read."""
    return all(named(node.name()) == LEAF for node in layers_of(x))


def layers_of(t: Tensor) -> set[Node]:
    """The last layers on every path to t; the leaf, if there are none."""
    found, seen, left = set[Node](), set[Node](), [get_gradient_edge(t).node]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        name = named(node.name())
        if name in PASSED:
            before = list(sources(node))
            left += before[-1:] if name == "copy" else before  # the first source of a copy is what it overwrites
        else:
            found.add(node)
    return found


def is_made_from(late: set[Node], early: set[Node]) -> bool:
    """Whether a path leads from a layer in `early` to one in `late`; nodes are numbered as they are made."""
    oldest, seen, left = min(map(number, early)), set[Node](), list(late)
    while left:
        node = left.pop()
        if node in early:
            return True
        if node not in seen and number(node) >= oldest:
            seen.add(node)
            left += sources(node)
    return False


def sources(node: Node) -> Iterator[Node]:
    return (before for before, _ in node.next_functions if before is not None)


def number(node: Node) -> int:
    """The place of a node in the order of the forward pass; −1 for a leaf."""
    return -1 if named(node.name()) == LEAF else int(node._sequence_nr())


@cache
def named(node: str) -> str:
    """The function of a node: to_copy for ToCopyBackward0."""
    plain = re.sub(r"Backwards?\d*$", "", node.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
