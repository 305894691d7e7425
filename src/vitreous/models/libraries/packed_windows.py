"""Towers of transformers that pack the patches of all images into one sequence, run with one attention call a layer.

The tower itself cuts the sequence at its lengths (an image, or a window of it) and calls attention for each part. Here
all parts of a layer go through one call, [parts H n d], shorter ones padded with keys that are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "vitreous_flash_attention_2"  # a name by which towers hand the whole sequence over, with its lengths


@contextmanager
def windows_at_once(tower: nn.Module) -> Iterator[None]:
    """Run the tower so; its setting is restored."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = tower.config
    before = config._attn_implementation_internal
    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        del ALL_ATTENTION_FUNCTIONS[NAME]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention within the parts of a packed sequence [1 H S d]; [1 S H d]."""
    assert cu_seq_lens_q is not None
    ends = cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    most = max(lengths)
    place = torch.arange(most, device=query.device)
    inside = place < torch.tensor(lengths, device=query.device)[:, None]  # [parts most]
    slots = (place + torch.tensor(ends[:-1], device=query.device)[:, None]).clamp_max(query.shape[2] - 1)
    mask = None if bool(inside.all()) else inside[:, None, None, :]
    q, k, v = (t[0][:, slots].transpose(0, 1) for t in (query, key, value))  # [parts H most d]
    if mask is not None:  # what pads a part is made of no token
        q, k, v = (t * inside[:, None, :, None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2)[inside][None], None
