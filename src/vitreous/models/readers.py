"""Which tokens each query of an output reads, and which item depends on which token: measured by gradient.

Every item has a number in binary. The gradient of all items, summed with the signs of one digit, is at a token plus or
minus the gradient of their plain sum if one item only depends on the token; the signs spell the number of that item.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitreous._support.precision import doubled
from vitreous.models.token_places import PURE

NONE, MANY = -1, -2  # no item depends on a token, or several do

Readers = tuple[tuple[int, ...], ...]  # the tokens that each query reads


def dependents(items: Tensor, node: Tensor, fold: Callable[[Tensor], Tensor]) -> list[int] | None:
    """The item [B N …] that depends on each token of an attention's output `node`; None without a graph between them.

    `fold`: the axes of `node` -> [B H M d].
    """
    count, random = items.shape[1], torch.Generator().manual_seed(3)
    each = (items * torch.randn(items.shape[1:], generator=random).to(items)).transpose(0, 1).flatten(1).sum(1)  # [N]
    numbers = torch.arange(count, device=items.device)
    digits = [numbers >> k & 1 for k in range(max(1, (count - 1).bit_length()))]
    try:
        signs = [torch.ones_like(numbers), *(1 - 2 * digit for digit in digits)]
        found = [at_tokens((each * sign).sum(), node, fold) for sign in signs]
    except RuntimeError:  # the network runs without gradients
        return None
    plain, *coded = [one for one in found if one is not None]
    if len(coded) < len(digits):
        return None
    energy = plain.square().sum((0, 1, 3))  # [M]
    ratio = torch.stack([(code * plain).sum((0, 1, 3)) for code in coded]) / energy.clamp_min(1e-300)
    read, pure = energy > 0, (ratio.abs() > PURE).all(0)
    number = torch.stack([(sign < 0).long() << k for k, sign in enumerate(ratio)]).sum(0)
    return torch.where(~read, NONE, torch.where(pure & (number < count), number, MANY)).tolist()


def at_tokens(end: Tensor, node: Tensor, fold: Callable[[Tensor], Tensor]) -> Tensor | None:
    grad = torch.autograd.grad(end, [node], retain_graph=True, allow_unused=True)[0]
    return None if grad is None else doubled(fold(grad))


def find_readers(output: Tensor, node: Tensor, fold: Callable[[Tensor], Tensor]) -> Readers | None:
    """The tokens behind the last attention that each query [B Q …] reads: its own, behind those that all of them read.

    None where some query has no token of its own.
    """
    found = dependents(output, node, fold)
    if found is None:
        return None
    shared = tuple(token for token, item in enumerate(found) if item == MANY)
    own: list[tuple[int, ...]] = [() for _ in range(output.shape[1])]
    for token, item in enumerate(found):
        if item >= 0:
            own[item] += (token,)
    return tuple((*shared, *tokens) for tokens in own) if all(own) else None


def reader_weights(readers: Readers, tokens: int, queries: list[tuple[int, ...]]) -> Tensor:
    """ρ of these queries of each image, [B N]: every token that a query reads weighs the same."""
    weights = torch.zeros(len(queries), tokens)
    for row, some in zip(weights, queries):
        for query in some:
            row[list(readers[query])] += 1 / (len(readers[query]) * len(some))
    return weights
