"""An attention that a module computes in parts, each over some of the tokens, and then puts together.

Packed sequences and windows are often split by their lengths (Qwen2.5 vision): one call for each part, then
`torch.cat`. Together they are one attention over all tokens whose mask forbids everything between the parts:

    A = diag(A₁, A₂, …)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import Attention

CAT = {torch.cat, torch.concat, torch.concatenate}


def parts_of(args: tuple[Any, ...]) -> list[Tensor]:
    """What a `torch.cat` puts together, if that is several tensors [1 …]."""
    given = list(args[0]) if args and isinstance(args[0], list | tuple) else []
    alone = all(isinstance(one, Tensor) and one.ndim == 4 and one.shape[0] == 1 for one in given)
    return given if len(given) > 1 and alone else []


def join(calls: Sequence[Attention], parts: Sequence[Tensor], out: Tensor) -> Attention | None:
    """These calls as one, if `out` is their outputs put together along the tokens; None if it is not."""
    first, sizes = calls[0], [call.shape[2] for call in calls]
    plain = all(call.q is not None and call.bias is None and call.only is None for call in calls)
    square = all(call.shape[:2] == (1, first.shape[1]) and call.shape[2] == call.shape[3] for call in calls)
    if not plain or not square or any(call.scale != first.scale for call in calls):
        return None
    tokens = 1 if tuple(out.shape[1:3]) == (sum(sizes), first.shape[1]) else 2
    if not all(same(call.node, part, tokens) for call, part in zip(calls, parts)):
        return None
    q, k, v = (torch.cat(each, 2) for each in zip(*((call.q, call.k, call.v) for call in calls)))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(q.device)
    apart = torch.zeros(len(owner), len(owner), dtype=q.dtype, device=q.device)
    bias = apart.masked_fill_(owner[:, None] != owner, -torch.inf)[None, None]
    whole = Attention(first.name, first.door, out, v, q, k, first.scale, bias, keys=k, number=first.number)
    whole.fold = turned if tokens == 1 else whole.fold
    whole.parts = len(calls)
    return whole


def same(node: Tensor, part: Tensor, tokens: int) -> bool:
    """Whether a part is the output of an attention [1 H n d], or that with its tokens first."""
    expected = node.transpose(1, 2) if tokens == 1 else node
    return part.shape == expected.shape and torch.equal(part.detach(), expected.detach())


def turned(t: Tensor) -> Tensor:
    return t.transpose(1, 2)
