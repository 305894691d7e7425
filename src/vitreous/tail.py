"""The last block for the tokens that the head reads, and for no others.

A CLS logit needs one query of the last attention and one row of its MLP. So the last block runs twice: over all tokens
up to its attention, which gives keys and values, and then over the tokens that are read, whose queries meet those keys.
No anatomy is assumed but that everything in a block except its attention treats each token alone; whether that holds is
found out once for each model, beside the whole run.

Where queries, keys and values are linear layers of the same tokens x, keys and values need not be formed (`Fold`):

    q·(W_k·x_n + b_k) = (W_kᵀ·q)·x_n + a number that softmax takes away
    Σ_n a_n·(W_v·x_n + b_v) = W_v·(Σ_n a_n·x_n) + b_v
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.attention import run_of, widen
from vitreous.errors import ModelError, Unsupported
from vitreous.types import Heads, Tokens, Weights

if TYPE_CHECKING:
    from vitreous.trace import Trace

T = TypeVar("T")
Known = WeakKeyDictionary[nn.Module, dict[Any, T]]
Linear = tuple[Tensor, Tensor | None]  # a weight and a bias
Show = Callable[[list[int], Tensor, Tensor], None]  # takes the tokens that are read, their A and ∂y/∂A
_tails: Known[bool] = WeakKeyDictionary()
_folds: Known["Fold | None"] = WeakKeyDictionary()


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


def tails(trace: Trace) -> bool:
    """May the last block of this model be run for the tokens that are read?"""
    return known(trace, _tails, can_tail)


def can_tail(trace: Trace) -> bool:
    """Do the output and its gradient stay as they are?"""
    layout = trace.layout
    if trace.read_tokens is None or not layout.probed or len(set(layout.blocks)) != layout.layers:
        return False
    return same_run(trace, {"tail": True}, {})


def same_run(trace: Trace, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Do two ways to run a model give the same output, and the same gradient for what enters the last attention?"""
    layout = trace.layout
    image, cut = trace.images[:1], layout.layers - 1 if layout.entries else None
    outputs: list[Tensor] = []
    grads: list[Tensor] = []
    for way in (one, other):
        try:
            run = trace.run(image, cut=cut, **way)
        except (ModelError, RuntimeError, IndexError):
            return False
        assert run.output is not None
        outputs.append(run.output.detach())
        if run.entry is not None and run.output.requires_grad:
            along = torch.linspace(-1, 1, run.output.shape[1], device=image.device).to(run.output.dtype)
            grads += torch.autograd.grad([run.output], [run.entry], [along[None]])
    return near(*outputs) and (len(grads) != 2 or near(*grads))


def folds(trace: Trace) -> Fold | None:
    """How keys and values of the last block may be left out, if they may."""
    if not tails(trace) or trace.autocast or trace.model.dtype not in (torch.float32, torch.float64):
        return None  # scores of rounded products would be rounded
    return known(trace, _folds, find_fold)


def find_fold(trace: Trace) -> Fold | None:
    """The linear layers that make queries, keys and values; the output and its gradient must stay as they are."""
    image, block = trace.images[:1], trace.block(trace.layout.layers - 1)
    with Projections() as seen:
        trace.run(image, within=partial(entering, block, seen.begin))
    fold = seen.fold()
    return fold if fold is not None and same_run(trace, {"tail": True, "fold": fold}, {"tail": True}) else None


class Projections(TorchFunctionMode):
    """Notes the linear layers of a block up to its attention, and what goes into that."""

    def __init__(self) -> None:
        super().__init__()
        self.linears: list[tuple[Tensor, Linear]] = []  # each with what it reads
        self.brought: tuple[Tensor, ...] | None = None

    def begin(self, stream: Tensor) -> Tensor:
        self.linears, self.brought = [], None
        return stream

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.brought is None and func is F.linear:
            self.linears.append((args[0], (args[1], args[2] if len(args) > 2 else (kwargs or {}).get("bias"))))
        elif self.brought is None and func is F.scaled_dot_product_attention:
            self.brought = args[:3] if len(args) == 3 and (kwargs or {}).get("attn_mask") is None else ()
        return func(*args, **(kwargs or {}))

    def fold(self) -> Fold | None:
        if not self.brought or not self.linears:
            return None
        x, found = self.linears[0][0], [place for place in map(self.place, self.brought) if place is not None]
        (axis, *others) = {axis for _, _, axis in found} or {0}
        if len(found) < 3 or others or any(self.linears[call][0] is not x for call, _, _ in found):
            return None
        return Fold(tuple(call for call, _, _ in found), tuple(row for _, row, _ in found), axis)

    def place(self, brought: Tensor) -> tuple[int, int, int] | None:
        """The linear layer, and the row in it, of which these are the outputs, head by head; and the images' axis."""
        if brought.ndim != 4:
            return None
        expected = brought.transpose(1, 2).flatten(2)  # [B N H·d]
        width = expected.shape[-1]
        for call, (x, linear) in enumerate(self.linears):
            axis = 0 if x.shape[:-1] == expected.shape[:-1] else 1
            read = x.movedim(axis, 0)
            for row in range(0, len(linear[0]) - width + 1, width):
                ((weight, bias),) = Fold((0,), (row,)).parts([linear], width)
                if read.shape[:-1] == expected.shape[:-1] and near(F.linear(read, weight, bias), expected):
                    return call, row, axis
        return None


def known(trace: Trace, found: Known[T], find: Callable[[Trace], T]) -> T:
    """What was found out about a model at this image size; found out once, and again if its last block is rebuilt."""
    of_model = found.setdefault(trace.model.module, {})
    blocks = trace.layout.blocks
    built = tuple(map(type, trace.model.module.get_submodule(blocks[-1]).modules())) if blocks else ()
    key = trace.size, built
    if key not in of_model:
        of_model[key] = find(trace)
    return of_model[key]


def near(one: Tensor, other: Tensor) -> bool:
    """The same but for rounding."""
    close = 1e-4 if other.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((widen(one) - widen(other)).abs().max() <= close * widen(other).abs().max())
