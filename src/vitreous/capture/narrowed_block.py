"""Compute the last block only for the tokens that are used after it.

A CLS logit needs one query of the last attention and one row of its MLP. So the block runs twice: over all tokens up to
its attention, which gives keys and values, and then over the tokens that are used, whose queries attend to those keys.

If queries, keys and values are linear layers of the same tokens x, keys and values need not be formed (`Fold`):

    q·(W_k·x_n + b_k) = (W_kᵀ·q)·x_n + a constant that softmax cancels
    Σ_n a_n·(W_v·x_n + b_v) = W_v·(Σ_n a_n·x_n) + b_v
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import rows_of, run_of
from vitreous.capture.capture import SDPA, WHOLE, linear_parts
from vitreous.capture.multi_head import SIGNATURE, unpacked
from vitreous.capture.unfused import MATMUL, TAG, Soft, operands, soft_of
from vitreous.errors import Unsupported
from vitreous.types import Heads, Tokens, Weights

Linear = tuple[Tensor, Tensor | None]  # a weight and a bias
Show = Callable[[list[int], Tensor, Tensor], None]  # receives the tokens that are used, their A and ∂y/∂A


class Reached(BaseException):
    """Raised inside the last block where its attention begins."""


@dataclass(frozen=True)
class Fold:
    """Where a block's queries, keys and values come from: the n-th linear layer in it, from this row on."""

    calls: tuple[int, ...]
    rows: tuple[int, ...]
    axis: int = 0  # the axis of the images in the input of these layers

    def parts(self, linears: list[Linear], width: int) -> list[Linear]:
        """The weights and biases of q, k and v; `width`: of all heads together."""
        found = [(linears[call], slice(row, row + width)) for call, row in zip(self.calls, self.rows)]
        return [(weight[part], None if bias is None else bias[part]) for (weight, bias), part in found]


class NarrowedBlock(TorchFunctionMode):
    """A context in which the last block computes only the tokens that are used; all other rows of its output are zero.

    `read`: the tokens that are used, out of `tokens`; the patches start after `prefix` tokens. With `fold`, keys and
    values are never formed, and `show` receives A and ∂y/∂A in the backward pass.
    """

    def __init__(
        self,
        block: nn.Module,
        read: list[int],
        *,
        tokens: int,
        prefix: int,
        patches: int,
        axis: int,
        fold: Fold | None = None,
        show: Show | None = None,
    ) -> None:
        super().__init__()
        self.block, self.read, self.tokens, self.axis, self.fold, self.show = block, read, tokens, axis, fold, show
        self.linears: list[Linear] = []  # linear layers of the block before its attention
        self.left = 0  # how many of them are still to come in this run of the block, if some are folded
        self.x: Tokens | None = None  # their input
        inside = [token - prefix for token in read if prefix <= token < prefix + patches]
        self.rows = {patches: inside, tokens: read}
        self.whole: tuple[Any, ...] | None = None  # the attention's inputs from all tokens
        self.state = "before"  # then "whole", "read", "after"
        self._hooks = ExitStack()

    def __enter__(self) -> NarrowedBlock:
        before = self.block.register_forward_pre_hook(own_thread(self.enter), with_kwargs=True)
        behind = self.block.register_forward_hook(own_thread(self.leave))
        self._hooks.callback(before.remove)
        self._hooks.callback(behind.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.state in ("before", "after"):
            return func(*args, **kwargs)
        if func in SDPA:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(func, args, kwargs)
        if func is F.linear and self.fold is not None and self.left > 0:
            return self.linear(*linear_parts(*args, **kwargs))
        if func in MATMUL and is_weights(soft_of(operands(func, args, kwargs)[0])):
            return self.product(func, *operands(func, args, kwargs))
        return func(*args, **kwargs)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run all tokens up to the attention, then continue with those that are used."""
        self.state = "whole"
        self.left = before = 0 if self.fold is None else max(self.fold.calls) + 1
        try:
            block.forward(*args, **kwargs)
        except Reached:
            self.state, self.left = "read", before
            return tuple(map(self.narrow, args)), {name: self.narrow(value) for name, value in kwargs.items()}
        raise Unsupported("the last block shows no attention")

    def narrow(self, value: Any) -> Any:
        """The rows of the tokens that are used: of the tokens themselves, rotary embeddings or masks."""
        if isinstance(value, tuple | list):
            return type(value)(self.narrow(one) for one in value)
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if value.ndim == 3 and value.shape[1 - self.axis] == self.tokens:
            return value[self.place(self.read)]
        rows = self.rows.get(value.shape[-2])
        return value if rows is None else value[..., run_of(rows), :]

    def place(self, tokens: list[int]) -> Any:
        """The index of these tokens in the model's own axes."""
        return (slice(None), run_of(tokens)) if self.axis == 0 else run_of(tokens)

    def leave(self, block: nn.Module, args: Any, out: Any) -> Any:
        """Fill in zeros for the tokens that are not used."""
        self.state = "after"
        part = out[0] if isinstance(out, tuple) else out
        shape = list(part.shape)
        shape[1 - self.axis] = self.tokens
        whole = part.new_zeros(shape)
        whole[self.place(self.read)] = part
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def attention(self, *brought: Any) -> tuple[Any, ...]:
        """The attention's inputs from all tokens; the first of the two runs ends here."""
        if self.state == "whole":
            self.whole = brought
            raise Reached
        assert self.whole is not None
        return self.whole

    def attend(
        self, query: Heads, key: Heads, value: Heads, attn_mask: Any = None, *rest: Any, **options: Any
    ) -> Heads:
        """Attention of the used queries to the keys of all tokens."""
        if self.fold is not None and self.state == "read":
            self.left = 0
            width, scale = query.shape[-1], options.get("scale", rest[2] if len(rest) > 2 else None)
            with torch._C.DisableTorchFunction():  # what follows is not the network's: modes below need not see it
                return self.folded(query.shape[1], width, width**-0.5 if scale is None else scale)
        query, key, value, mask = self.attention(query, key, value, attn_mask)
        asking = query[..., run_of(self.read), :]
        setattr(asking, WHOLE, (query, mask, self.read))
        return F.scaled_dot_product_attention(asking, key, value, rows_of(mask, self.read), *rest, **options)

    def multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for F.multi_head_attention_forward."""
        if self.fold is not None and self.state == "whole":
            given = SIGNATURE.bind(*args, **kwargs).arguments
            self.linear(given["query"], given["in_proj_weight"], given["in_proj_bias"])
        return unpacked(func, args, kwargs, self.attend, no_weights)

    def product(self, func: Any, a: Weights, v: Heads) -> Heads:
        """The same for a product of a softmax and values: the used rows, and all values."""
        a, v = self.attention(a, v)
        part = a[..., run_of(self.read), :]
        setattr(part, TAG, soft_of(a))
        setattr(part, WHOLE, (a, None, self.read))
        return func(part, v)  # type: ignore[no-any-return]

    def linear(self, x: Tokens, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer before the attention; those of queries, keys and values are noted instead of computed."""
        assert self.fold is not None
        number = max(self.fold.calls) + 1 - self.left
        self.left -= 1
        whole = self.state == "whole"
        if whole:
            self.linears.append((weight, bias))
        if number not in self.fold.calls:
            return F.linear(x, weight, bias)
        if whole:
            self.x = x
            if not self.left:
                raise Reached
        return x.new_empty(*x.shape[:-1], len(weight))

    def folded(self, heads: int, width: int, scale: float) -> Heads:
        """O of the tokens that are used, [B H n d]; the backward pass calls `show` with A and ∂y/∂A."""
        assert self.fold is not None and self.x is not None
        x = self.x.movedim(self.fold.axis, 0)  # [B N D]
        (wq, bq), (wk, _), (wv, bv) = self.fold.parts(self.linears, heads * width)
        b, n = len(x), len(self.read)
        q = F.linear(x[:, run_of(self.read)], wq, bq).view(b, n, heads, width) * scale
        asked = torch.einsum("bnhd,hde->bhne", q, wk.view(heads, width, -1))  # e: the width of x
        a = (asked.flatten(1, 2) @ x.mT).softmax(-1)  # [B H·n N]
        seen = (a @ x).view(b, heads, n, -1)
        out = torch.einsum("bhne,hde->bhnd", seen, wv.view(heads, width, -1))
        out = out if bv is None else out + bv.view(heads, 1, width)
        show = self.show
        if show is not None:
            known = a.detach().view(b, heads, n, -1), x.detach(), wv.view(heads, width, -1), bv

            def back(grad: Tensor) -> None:
                show(self.read, known[0], weights_grad(grad, *known[1:]))

            out.register_hook(back)  # type: ignore[no-untyped-call]
        return out


def is_weights(soft: Soft | None) -> bool:
    """Whether this softmax is A as it stands to the left of V."""
    return soft is not None and not soft.mixed and not soft.turned


def no_weights() -> Weights:
    raise Unsupported("the last block asks for the attention of all its tokens")


def weights_grad(grad: Heads, x: Tensor, weight: Tensor, bias: Tensor | None) -> Weights:
    """∂y/∂A from ∂y/∂O, where V = W·x + b: (∂y/∂O · W) · x + ∂y/∂O · b."""
    along = torch.einsum("bhnd,hde->bhne", grad, weight)
    found = (along.flatten(1, 2) @ x.mT).view(*grad.shape[:3], -1)
    return found if bias is None else found + torch.einsum("bhnd,hd->bhn", grad, bias.view(weight.shape[:2]))[..., None]


def own_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does not affect runs of the same network in other threads."""
    mine = threading.get_ident()

    def called(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == mine else None

    return called


def entering(block: nn.Module, change: Callable[[Tensor], Tensor]) -> ExitStack:
    """A context in which a block receives other tokens than its caller passes."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: change(kwargs[first])}

    stack = ExitStack()
    stack.callback(block.register_forward_pre_hook(own_thread(enter), with_kwargs=True).remove)
    return stack
