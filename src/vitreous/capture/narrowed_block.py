"""A block that computes only the tokens that are read of it.

A CLS logit needs one query of the last attention and one row of its MLP. So the block runs twice: over all tokens up to
its attention, which gives keys and values, and then over the tokens that are read, whose queries meet those keys.

Where queries, keys and values are linear layers of the same tokens x, keys and values need not be formed (`Fold`):

    q·(W_k·x_n + b_k) = (W_kᵀ·q)·x_n + a number that softmax takes away
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

from vitreous.capture.attention import run_of
from vitreous.errors import Unsupported
from vitreous.types import Heads, Tokens, Weights

Linear = tuple[Tensor, Tensor | None]  # a weight and a bias
Show = Callable[[list[int], Tensor, Tensor], None]  # takes the tokens that are read, their A and ∂y/∂A


class Reached(BaseException):
    """Raised inside the last block where its attention begins."""


@dataclass(frozen=True)
class Fold:
    """Where a block's queries, keys and values come from: the so manyeth linear layer in it, from this row on."""

    calls: tuple[int, ...]
    rows: tuple[int, ...]
    axis: int = 0  # of the images, in what these layers read

    def parts(self, linears: list[Linear], width: int) -> list[Linear]:
        """The weights and biases of q, k and v; `width`: of all heads."""
        found = [(linears[call], slice(row, row + width)) for call, row in zip(self.calls, self.rows)]
        return [(weight[part], None if bias is None else bias[part]) for (weight, bias), part in found]


class Tail(ExitStack):
    """A context in which the last block computes what is read of it; other rows that leave it are zero.

    `read`: the tokens that are read, of `tokens` in all, of which the patches begin behind `prefix`. With `fold`, keys
    and values are never formed.
    """

    def __init__(
        self,
        block: nn.Module,
        read: list[int],
        tokens: int,
        prefix: int,
        patches: int,
        axis: int,
        fold: Fold | None = None,
    ) -> None:
        super().__init__()
        self.read, self.tokens, self.axis, self.fold = read, tokens, axis, fold
        self.linears: list[Linear] = []  # of the block, up to its attention
        self.x: Tokens | None = None  # what they read
        inside = [token - prefix for token in read if prefix <= token < prefix + patches]
        self.rows = {patches: inside, tokens: read}
        self.whole: tuple[Any, ...] | None = None  # what all tokens brought to the attention
        self.state = "before"  # … then "whole", "read", "after"
        self.callback(block.register_forward_pre_hook(own_thread(self.enter), with_kwargs=True).remove)
        self.callback(block.register_forward_hook(own_thread(self.leave)).remove)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """All tokens up to the attention, then go on with those that are read."""
        self.state = "whole"
        try:
            block.forward(*args, **kwargs)
        except Reached:
            self.state = "read"
            return tuple(map(self.narrow, args)), {name: self.narrow(value) for name, value in kwargs.items()}
        raise Unsupported("the last block shows no attention")

    def narrow(self, value: Any) -> Any:
        """What belongs to the tokens that are read: of the tokens themselves, rotations, masks."""
        if isinstance(value, tuple | list):
            return type(value)(self.narrow(one) for one in value)
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if value.ndim == 3 and value.shape[1 - self.axis] == self.tokens:
            return value[self.place(self.read)]
        rows = self.rows.get(value.shape[-2])
        return value if rows is None else value[..., run_of(rows), :]

    def place(self, tokens: list[int]) -> Any:
        """Where these tokens are in the model's own axes."""
        return (slice(None), run_of(tokens)) if self.axis == 0 else run_of(tokens)

    def leave(self, block: nn.Module, args: Any, out: Any) -> Any:
        """Rows of nothing for the tokens that nobody reads."""
        self.state = "after"
        part = out[0] if isinstance(out, tuple) else out
        shape = list(part.shape)
        shape[1 - self.axis] = self.tokens
        whole = part.new_zeros(shape)
        whole[self.place(self.read)] = part
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def attention(self, *brought: Any) -> tuple[Any, ...]:
        """What all tokens brought to the attention; in the first of the two runs it ends here."""
        if self.state == "whole":
            self.whole = brought
            raise Reached
        assert self.whole is not None
        return self.whole

    def linear(self, x: Tokens, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer before the attention of all tokens: noted, not computed."""
        assert self.fold is not None
        self.x = x
        self.linears.append((weight, bias))
        if len(self.linears) > max(self.fold.calls):
            raise Reached
        return x.new_empty(*x.shape[:-1], len(weight))

    def folded(self, heads: int, width: int, scale: float, show: Show | None) -> Heads:
        """O of the tokens that are read, [B H n d]; a backward pass shows A and ∂y/∂A."""
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
        if show is not None:
            known = a.detach().view(b, heads, n, -1), x.detach(), wv.view(heads, width, -1), bv

            def back(grad: Tensor) -> None:
                show(self.read, known[0], weights_grad(grad, *known[1:]))

            out.register_hook(back)  # type: ignore[no-untyped-call]
        return out


def weights_grad(grad: Heads, x: Tensor, weight: Tensor, bias: Tensor | None) -> Weights:
    """∂y/∂A from ∂y/∂O, where V = W·x + b: (∂y/∂O · W) · x + ∂y/∂O · b."""
    along = torch.einsum("bhnd,hde->bhne", grad, weight)
    found = (along.flatten(1, 2) @ x.mT).view(*grad.shape[:3], -1)
    return found if bias is None else found + torch.einsum("bhnd,hd->bhn", grad, bias.view(weight.shape[:2]))[..., None]


def own_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that leaves runs of the same network in other threads as they are."""
    mine = threading.get_ident()

    def called(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == mine else None

    return called


def entering(block: nn.Module, change: Callable[[Tensor], Tensor]) -> ExitStack:
    """A context in which a block reads other tokens than it is given."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: change(kwargs[first])}

    stack = ExitStack()
    stack.callback(block.register_forward_pre_hook(own_thread(enter), with_kwargs=True).remove)
    return stack
