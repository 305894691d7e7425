"""Value zeroing by running the whole network, in double precision, once for every layer and every token."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous import Layout

PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}
SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
MHA = inspect.signature(F.multi_head_attention_forward)


class Zeroed(TorchFunctionMode):
    """In one layer of N tokens, nobody attends to one token: its column of A is zero, as if its value were."""

    def __init__(self, tokens: int, layer: int, token: int | None) -> None:
        super().__init__()
        self.tokens, self.layer, self.token = tokens, layer, token
        self.seen = -1
        self.soft: list[Any] = []
        self.mixed: Tensor | None = None  # A·V
        self.projected: Tensor | None = None  # what the first linear layer after it gives

    def attend(self, a: Tensor) -> Tensor:
        """A, perhaps without a column."""
        if a.shape[-2:] != (self.tokens, self.tokens):
            return a
        self.seen += 1
        if self.seen == self.layer and self.token is not None:
            a = a.clone()
            a[..., self.token] = 0
        return a

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self.seen
        if func is F.scaled_dot_product_attention:
            out = self.sdpa(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            out = self.mha(MHA.bind(*args, **kwargs).arguments)
            if before < self.seen == self.layer:
                self.mixed = self.projected = out
            return out, None
        elif func in PRODUCTS and any(x is s for x in args for s in self.soft):
            out = func(*(self.attend(x) if any(x is s for s in self.soft) else x for x in args), **kwargs)
        else:
            out = func(*args, **kwargs)
            from_soft = any(x is s for x in args for s in self.soft)
            if func in SOFTMAX or (from_soft and isinstance(out, Tensor) and out.shape == args[0].shape):
                self.soft.append(out)
        if before < self.seen == self.layer:
            self.mixed = out
        elif func is F.linear and self.seen == self.layer and self.projected is None:
            self.projected = out
        return out

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, scale: Any = None, **rest: Any) -> Tensor:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        return self.attend((scores if attn_mask is None else scores + attn_mask).softmax(-1)) @ v

    def mha(self, given: dict[str, Any]) -> Tensor:
        """Self-attention of tokens [N B D]; other attention (a pool) is left to torch."""
        if given["query"].shape != given["key"].shape:
            return F.multi_head_attention_forward(**{**given, "need_weights": False})[0]
        n, b, width = given["query"].shape
        h = given["num_heads"]
        qkv = F.linear(given["query"], given["in_proj_weight"], given["in_proj_bias"])
        q, k, v = (t.reshape(n, b, h, width // h).permute(1, 2, 0, 3) for t in qkv.chunk(3, -1))
        a = self.attend((q @ k.mT * (width // h) ** -0.5).softmax(-1))
        out = (a @ v).permute(2, 0, 1, 3).reshape(n, b, width)
        return F.linear(out, given["out_proj_weight"], given["out_proj_bias"])


def doubled(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net).double().eval()


def run(forward: Any, image: Tensor, block: nn.Module, layout: Layout, layer: int, token: int | None) -> Any:
    """What entered and what left a block [N D], and the mode that watched."""
    seen: dict[str, Tensor] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["in"] = (args[0] if args else next(iter(kwargs.values()))).clone()

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        seen["out"] = (out[0] if isinstance(out, tuple) else out).clone()

    hooks = [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
    try:
        with torch.no_grad(), Zeroed(layout.tokens, layer, token) as mode:
            forward(image)
    finally:
        for hook in hooks:
            hook.remove()
    axis = 1 if layout.sequence_first else 0
    return *(seen[side].select(axis, 0) for side in ("in", "out")), mode


def changes(forward: Any, image: Tensor, block: nn.Module, layout: Layout, layer: int) -> Tensor:
    """C [N N] of one layer; `forward` runs the doubled network on one image."""
    whole = run(forward, image, block, layout, layer, None)[1]
    columns = []
    for token in range(layout.tokens):
        zeroed = run(forward, image, block, layout, layer, token)[1]
        columns.append(1 - torch.cosine_similarity(whole, zeroed, dim=-1, eps=0))
    return torch.stack(columns, 1)


def rolled(matrices: list[Tensor], read: Tensor) -> Tensor:
    """ρᵀ of the product, whole matrices."""
    product = torch.eye(len(read), dtype=torch.float64)
    for c in matrices:
        product = (c / c.sum(1, keepdim=True)) @ product
    return read.double() @ product
