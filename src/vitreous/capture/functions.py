"""The torch functions by which attention is recognised, and the marks left on tensors between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NORMS = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}
SDPA = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
KEEPS = {F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16}
KEEPS |= {Tensor.contiguous, Tensor.clone, torch.clone, torch.nan_to_num, Tensor.nan_to_num}

TAG = "_vitreous_softmax"  # on a tensor that is a softmax ("soft"), or was made from one and changed ("mixed")
FACTORS = "_vitreous_factors"  # on a tensor made from a product: its two factors, which may be Q and Kᵀ
WHOLE = "_vitreous_whole"  # on some rows of Q or A: all rows, their mask, and which rows these are (narrowed_block.py)


def linear_parts(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of F.linear, however they are passed."""
    return input, weight, bias


class Enough(BaseException):
    """Raised inside a model once everything asked for has been seen (no `except Exception` of a model catches it)."""
