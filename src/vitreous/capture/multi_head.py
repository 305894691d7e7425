"""Run F.multi_head_attention_forward (nn.MultiheadAttention) so that its attention can be recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def unpacked(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attend: Callable[..., Tensor],
    weights: Callable[[], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """torch's own function, run with globals in which `attend` computes its attention.

    `weights` returns A afterwards, for models that request it (for them torch itself would not use sdpa).
    """
    given = SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    wanted, averaged = given.arguments["need_weights"], given.arguments["average_attn_weights"]
    given.arguments["need_weights"] = False
    ours = dict(func.__globals__, has_torch_function=lambda _: False, scaled_dot_product_attention=attend)
    run = FunctionType(func.__code__, ours, func.__name__, func.__defaults__, func.__closure__)
    out, _ = run(*given.args, **given.kwargs)
    if not wanted:
        return out, None
    found = weights().to(out.dtype)
    found = found.mean(1) if averaged else found
    return out, found[0] if out.ndim == 2 else found
