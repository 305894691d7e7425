"""Runs of many variants of one image that compute shared results once and skip dropped tokens.

No query attends to a dropped token and no pooling counts it. All other tokens keep their positions, also if positions
are rotations (RoPE) or biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import widen
from vitreous.capture.capture import NORMS, SDPA, additive
from vitreous.capture.narrowed_block import own_thread
from vitreous.capture.unfused import PRODUCTS, SOFTMAX, TAG, Soft
from vitreous.models.layout import Layout
from vitreous.models.register_tokens import UNITS
from vitreous.trace.perturb.picked_tokens import of_table
from vitreous.trace.trace import Trace
from vitreous.types import Heads

MEAN = {torch.mean, Tensor.mean}
TOPK = {torch.topk, Tensor.topk}
Gone = Bool[Tensor, "V N"]
Kept = Int[Tensor, "V K"]  # indices of the kept tokens, ascending
Left = Int[Tensor, "V"]  # the index of the one dropped token
Shared = dict[int, Any]  # results that all runs of one image share, by their order in the run


def repeated(count: int, axis: int, stream: Tensor) -> Tensor:
    """Expand the tokens to this number of variants, without a copy."""
    return stream.expand(*[count if i == axis else -1 for i in range(stream.ndim)])


def one_gone(trace: Trace, left: Left) -> Gone:
    """A mask [V N] of the one token that is dropped from each variant."""
    return left[:, None] == torch.arange(trace.layout.tokens, device=left.device)


def gone_of(trace: Trace, keep: Kept) -> Gone:
    """The tokens that are not kept."""
    return torch.ones(len(keep), trace.layout.tokens, dtype=torch.bool, device=keep.device).scatter_(1, keep, False)


class Lean(TorchFunctionMode):
    """A mode that runs a model on variants of one image, computes shared results once and skips dropped tokens.

    `left`: the one token dropped from each variant; `shared`: see `run_leaving`, or of one image the embedded patches.
    """

    def __init__(
        self,
        trace: Trace,
        gone: Gone | None = None,
        tokens: int | None = None,
        left: Left | None = None,
        shared: Shared | None = None,
    ) -> None:
        super().__init__()
        self.shared, self.met = shared, 0  # `met`: the number of shared results reached in this run
        self.gone, self.left = gone if left is None else one_gone(trace, left), left
        self.axis, self.layout = trace.batch_axis, trace.layout
        self.tokens = tokens or trace.layout.tokens
        self.late = late_keys(trace.layout) if self.gone is not None else {}
        self.seen = 0  # layers
        self.calls = -1  # attention calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SDPA:
            return self.attend(func, *args, **kwargs)
        if func in PRODUCTS:
            return func(*self.forget(args), **{name: self.forget((value,))[0] for name, value in kwargs.items()})
        if func in SOFTMAX and self.gone is not None and self.layout.mixed:
            return self.without(func(*args, **kwargs))
        if func is F.linear or func in NORMS:
            return self.once(func, args, kwargs)
        if func is F.conv2d and self.seen == 0 and len(args[0]) == 1:
            return self.common(partial(func, *args, **kwargs))
        if func in MEAN and self.gone is not None and self.seen >= self.layout.layers:
            return self.mean(func, *args, **kwargs)
        if func in TOPK and self.gone is not None and hasattr(args[0], UNITS):
            return func(self.present(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def present(self, size: Tensor) -> Tensor:
        """The sizes of activations of the patches with −1 for dropped ones, none of which moves to a register."""
        assert self.gone is not None
        gone = self.gone[:, self.layout.patch_run]  # [V P]
        if size.shape[self.axis] != len(gone) or size.shape[1 - self.axis] != gone.shape[1]:
            return size  # dropped patches are cut out already
        return size.masked_fill((gone if self.axis == 0 else gone.mT)[..., None], -1)

    def attend(
        self, func: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        """Attention with the dropped tokens masked."""
        mask = kw.pop("attn_mask", mask)
        if not self.mine() or (k.shape[-2] != self.tokens and k.shape[-2] not in self.late):
            return func(q, k, v, mask, *rest, **kw)  # type: ignore[no-any-return]
        if self.left is not None and mask is None and not rest and all(one_image(t) for t in (q, k, v)):
            parts = self.common(lambda: ways(widen(q[:1]), widen(k[:1]), widen(v[:1]), kw.get("scale")))
            return left_out(parts, self.left).to(q.dtype)
        if self.gone is not None:
            mask = additive(mask, False, q, k)
            hidden = self.keys(q.ndim, len(q), q.dtype, k.shape[-2])
            mask = hidden if mask is None else mask + hidden
        self.seen += q.shape[-2] == self.tokens or k.shape[-2] in self.late
        return func(q, k, v, mask, *rest, **kw)  # type: ignore[no-any-return]

    def mine(self) -> bool:
        """Whether the next attention is over tokens of the image, not over another input."""
        self.calls += 1
        return self.calls not in self.layout.foreign

    def keys(self, ndim: int, rows: int, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """−∞ for every dropped key, in the axes of the attention scores; `count`: of keys, if others come late."""
        assert self.gone is not None
        gone = self.gone.repeat_interleave(rows // len(self.gone), 0)  # the first axis may include the heads
        if count in self.late and count != self.tokens:
            token = self.late[count].to(gone.device)
            gone = gone[:, token.clamp_min(0)] & (token >= 0)
        hidden = torch.zeros(gone.shape, dtype=dtype, device=gone.device).masked_fill_(gone, -torch.inf)
        return hidden.view(rows, *[1] * (ndim - 2), -1)

    def forget(self, args: Iterable[Any]) -> tuple[Any, ...]:
        """Remove dropped tokens from a softmax before it is multiplied by values; its rows sum to one again."""
        return tuple(
            list(self.forget(a)) if isinstance(a, list | tuple) else self.forgotten(a, getattr(a, TAG, None))
            for a in args
        )

    def without(self, weights: Tensor) -> Tensor:
        """A softmax over all tokens without the dropped ones, before it is changed."""
        count = weights.shape[-1]
        foreign = self.calls + 1 in self.layout.foreign
        if foreign or weights.ndim < 3 or (count != self.tokens and count not in self.late):
            return weights
        wide = widen(weights) * self.keys(weights.ndim, len(weights), torch.float32, count).exp()
        return (wide / wide.sum(-1, keepdim=True)).to(weights.dtype)

    def forgotten(self, a: Any, soft: Soft | None) -> Any:
        if soft is None or not self.mine():
            return a
        weights = a.mT if soft.turned else a
        count = weights.shape[-1]
        if count != self.tokens and count not in self.late:
            return a
        self.seen += weights.shape[-2] == self.tokens or count in self.late
        if self.gone is None:
            return a
        wide = widen(weights)
        sunk = 1 - wide.sum(-1, keepdim=True) if soft.part else 0.0  # what a sink takes
        wide = wide * self.keys(a.ndim, len(a), torch.float32, count).exp()
        if soft.mixed:  # its softmaxes sum to one; what they are changed to may have any sum
            return wide.to(a.dtype)
        found = (wide / (wide.sum(-1, keepdim=True) + sunk)).to(a.dtype)
        return found.mT if soft.turned else found

    def once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer or a norm, computed once while all variants are still equal, or for a few images."""
        x = args[0]
        found = of_table(func, *args, **kwargs)
        if found is not None:
            return found
        axes = [i for i in range(2) if x.shape[i] > 1 and x.stride(i) == 0] if x.ndim == 3 else []
        if not axes:
            return func(*args, **kwargs)
        one = partial(func, x.narrow(axes[0], 0, 1), *args[1:], **kwargs)
        one = one() if self.left is None else self.common(one)
        return repeated(x.shape[axes[0]], axes[0], one)

    def common(self, make: Callable[[], Any]) -> Any:
        """A result that this run shares with earlier ones."""
        if self.shared is None:
            return make()
        self.met += 1
        if self.met not in self.shared:
            self.shared[self.met] = make()
        return self.shared[self.met]

    def mean(self, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        """The mean over the tokens that are not dropped."""
        axes = list(dim) if isinstance(dim, list | tuple) else [dim]
        along = 1 - self.axis
        count = x.shape[along] if x.ndim == 3 else 0
        if x.ndim != 3 or axes not in ([along], [along - 3]) or count not in (self.layout.patches, self.tokens):
            return func(x, dim, keepdim, **kwargs)  # type: ignore[no-any-return]
        assert self.gone is not None
        kept = (~self.gone[:, self.layout.patch_run if count != self.tokens else slice(None)]).to(x.dtype)  # [V n]
        weights = (kept / kept.sum(1, keepdim=True).clamp_min(1))[..., None]
        return (x * (weights if self.axis == 0 else weights.transpose(0, 1))).sum(along, keepdim)


def late_keys(layout: Layout) -> dict[int, Tensor]:
    """The token of each key (−1: none) in layers that have more tokens than the first, by the number of keys."""
    found: dict[int, Tensor] = {}
    for stage in layout.stages:
        keys = stage.keys
        single = stage.windows == 1 and len(keys.slot) == keys.size and stage.grid == layout.grid
        if single and keys.size > layout.tokens and not layout.prefix:
            place = torch.empty_like(keys.place).scatter_(0, keys.slot, keys.place)
            cells = torch.tensor([-1] * stage.special + layout.patch_tokens)
            found[keys.size] = cells[place.cpu()]
    return found


def one_image(t: Tensor) -> bool:
    """Whether these heads are the same for all variants and stored once."""
    return t.ndim == 4 and t.shape[0] > 1 and t.stride(0) == 0


def ways(q: Heads, k: Heads, v: Heads, scale: float | None) -> tuple[Tensor, ...]:
    """V, A, O, and for each query the key with the largest A and O without that key."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT  # [1 H N N]
    a = scores.softmax(-1)
    most = a.argmax(-1, keepdim=True)
    return v, a, a @ v, most, scores.scatter(-1, most, -torch.inf).softmax(-1) @ v


def left_out(parts: tuple[Tensor, ...], left: Left) -> Heads:
    """The attention output of one image without each of these tokens, [V H N d]: a rank-one update of the whole.

    O without i = (O − Aᵢ·vᵢ)/(1 − Aᵢ). If a query attends mostly to i, which can only be its largest Aᵢ, that would
    lose precision; O without the largest is therefore computed directly.
    """
    v, a, out, most, others = parts
    largest = most == left.view(-1, 1, 1, 1)  # [V H N 1]
    share = a[0, :, :, left].permute(2, 0, 1)[..., None].masked_fill(largest, 0)
    values = v[0, :, left].transpose(0, 1)[:, :, None]  # [V H 1 d]
    return torch.where(largest, others, out).addcmul_(share, values, value=-1).div_(1 - share)


class Cut(ExitStack):
    """A context in which each image has only some of its patches, from block `since` on (`entered`: it is given these).

    Other block arguments that run along all patches or tokens, such as rotary embeddings, are cut in the same way.
    """

    def __init__(self, trace: Trace, keep: Kept, since: int = 0, entered: bool = False) -> None:
        super().__init__()
        self.layout, self.axis, self.keep = trace.layout, trace.batch_axis, keep
        behind = self.layout.tokens - self.layout.prefix - self.layout.patches
        self.patches = keep[:, self.layout.prefix : keep.shape[1] - behind]
        for number in range(since, self.layout.layers):
            hook = self.first if number == since and not entered else self.later
            self.callback(trace.block(number).register_forward_pre_hook(own_thread(hook), with_kwargs=True).remove)

    def first(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = self.later(module, args, kwargs)
        if args:
            return (self.tokens(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self.tokens(kwargs[name])}

    def tokens(self, stream: Tensor) -> Tensor:
        tokens = stream.movedim(self.axis, 0)
        index = self.keep[..., None].expand(-1, -1, tokens.shape[-1])
        return tokens.gather(1, index).movedim(0, self.axis)

    def later(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        rest = tuple(self.beside(value) for value in args[1:])
        named = list(kwargs.items())
        skipped = 0 if args else 1  # the tokens themselves
        return (*args[:1], *rest), dict(named[:skipped]) | {k: self.beside(v) for k, v in named[skipped:]}

    def beside(self, value: Any) -> Any:
        """Cut [n d], [1 n d] or [1 1 n d] to [V 1 k d]; anything else is unchanged."""
        if isinstance(value, tuple | list):
            return type(value)(self.beside(one) for one in value)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.numel() != value.shape[-2] * value.shape[-1]:
            return value
        index = {self.layout.patches: self.patches - self.layout.prefix, self.layout.tokens: self.keep}
        if value.shape[-2] not in index:
            return value
        return value.reshape(value.shape[-2:])[index[value.shape[-2]]][:, None]
