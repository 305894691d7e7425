"""Does an attention weigh tokens against tokens? Shapes cannot tell: a head may be as wide as there are tokens.

In A = softmax(s·Q·Kᵀ) over tokens, the preference of query i for key n over key m, log Aᵢₙ − log Aᵢₘ, depends on the
tokens i, n and m. So its gradient for the tokens that enter the layer must change its place with the query and with
the key. It does not

    with i   in A = softmax over tokens of K, as linear attention has it: rows are channels
    with n   in A = softmax over channels of Q: columns are channels
    at all   in attention between channels: every token has a part in every entry

Of an A that is no softmax (heads mixed, two softmaxes combined) the preference is that of the scores Q·Kᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitreous.capture.attention import Attention, widen

FEWEST = 8  # tokens: below that, places cannot be told apart
CLEAR = 10  # times as large as elsewhere
LEAST = 1e-4  # of the largest


def between_tokens(calls: Sequence[Attention], entered: Sequence[Tensor | None]) -> bool | None:
    """Whether all square attentions weigh tokens against tokens; None where that cannot be told of any.

    Of fused attentions of one shape, only the first is asked: what is written out may be anything.
    """
    asked = {(i if call.door == "eager" else call.shape): i for i, call in reversed(list(enumerate(calls)))}
    told = [attends_tokens(calls[i], entered[i]) for i in asked.values()]
    return False if False in told else True if True in told else None


def attends_tokens(call: Attention, tokens: Tensor | None) -> bool | None:
    """Whether both queries and keys of a square attention are tokens; None where that cannot be told.

    `tokens`: what entered the layer, [B N D], [N B D] or [B h w D], in the autograd graph of the call.
    """
    _, _, n, m = call.shape
    if n != m or n < FEWEST or tokens is None or not tokens.requires_grad or call.only is not None:
        return None
    query, other_query, key, other_key, last = n - 1, 2 * n // 3, 0, n // 3, n // 6  # in the order of causal masks
    try:
        with torch.enable_grad():
            logs = preferences(call, [query, other_query])  # [B H 2 M]
        first = places(logs[:, :, 0, key] - logs[:, :, 0, last], tokens)
        moved = places(logs[:, :, 1, key] - logs[:, :, 1, last], tokens)
        changed = places(logs[:, :, 0, other_key] - logs[:, :, 0, last], tokens)
    except RuntimeError:  # no graph reaches the tokens
        return None
    if first is None or moved is None or changed is None:
        return None
    moves = differ(first, moved), differ(first, changed)
    product = call.given is None or call.factors is not None  # of Q and K: a constant one of them moves nothing
    return any(moves) if product else all(moves)


def preferences(call: Attention, queries: list[int]) -> Tensor:
    """log A of these queries, or what stands for it where A is no softmax."""
    rows = call.rows(queries)
    if not call.mixed:
        return rows.clamp_min(torch.finfo(rows.dtype).tiny).log()
    _, _, n, m = call.shape
    q, k = call.factors or (rows, rows)
    fits = q.ndim == k.ndim == 4 and (q.shape[-2], k.shape[-1]) == (n, m) and q.shape[-1] == k.shape[-2]
    return widen(q[:, :, queries]) @ widen(k) if fits else rows


def places(preference: Tensor, tokens: Tensor) -> Tensor | None:
    """The size of a preference's gradient at every token."""
    if not preference.requires_grad:
        return None
    (grad,) = torch.autograd.grad(preference.sum(), [tokens], retain_graph=True, allow_unused=True)
    return None if grad is None or not grad.any() else widen(grad).norm(dim=-1)


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether a place that matters here does not matter there."""
    return bool((one > CLEAR * other + LEAST * one.max()).any())
