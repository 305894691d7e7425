"""One image changed in many ways: other pixels, other tokens, fewer tokens; one score for each.

A token that is gone is read by nobody: no query attends to it and no pool counts it. All others keep their positions,
also where positions are rotations (RoPE) or biases. What all variants share until they part is computed once, and after
the last attention only what the head reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous._support.memory import batch_size, in_batches
from vitreous.capture.attention import widen
from vitreous.capture.capture import MATMUL, NORMS, SDPA, TAG, additive
from vitreous.capture.narrowed_block import own_thread
from vitreous.errors import ModelError, OptionError, Unsupported
from vitreous.trace.last_block import Known, known, near
from vitreous.trace.target import Probability, Target
from vitreous.trace.trace import Edit, Record, Trace
from vitreous.types import Heads, Images, Scores

MEAN = {torch.mean, Tensor.mean}
VariantScores = Float[Tensor, "V"]
Gone = Bool[Tensor, "V N"]
Kept = Int[Tensor, "V K"]  # numbers of tokens, rising
Left = Int[Tensor, "V"]  # the number of the one token that is gone
Shared = dict[int, Any]  # results that all runs of one image have in common, in their order
MOST_KEPT = 2**25  # numbers, of the outputs of all variants of a trace
_works: Known[bool] = WeakKeyDictionary()  # can tokens be left out at all?
_cuts: Known[bool] = WeakKeyDictionary()  # … by cutting them out of the sequence?
_leaves: Known[bool] = WeakKeyDictionary()  # … by cutting them out behind the first block?


def scores_of(
    trace: Trace,
    target: Target,
    pictures: Callable[[slice], Images],
    count: int,
    what: str,
    key: Hashable | None = None,
) -> Scores:
    """The score of each of `count` pictures, for the target of one; `pictures` makes a slice of them."""
    return scores_each(trace, target, [0] * count, lambda part: lean_run(trace, pictures(part)), what, key=key)


def scores_without(
    trace: Trace, index: int, target: Target, left: Left, what: str, key: Hashable | None = None
) -> Scores:
    """The score of one image without each of these tokens, for the target of that image."""
    refuse_dropping(trace)
    image, leave = trace.images[index : index + 1], known(trace, _leaves, can_leave)
    shared: Shared = {}

    def run(part: slice) -> Record:
        if leave:
            return run_leaving(trace, image, left[part], shared)
        return run_without(trace, image, one_gone(trace, left[part]))

    return scores_each(trace, target, [0] * len(left), run, what, key=key)


def scores_keeping(
    trace: Trace, target: Target, rows: Sequence[int], keep: Kept, what: str | None = None
) -> VariantScores:
    """The score of image `rows[i]` with the tokens `keep[i]` only: the others are cut out, so that it costs less."""
    refuse_dropping(trace)
    cut = cuts(trace)

    def run(part: slice) -> Record:
        return run_keeping(trace, rows[part], keep[part], cut)

    return scores_each(trace, target, rows, run, what, keep.shape[1] / trace.layout.tokens if cut else 1.0)


def cuts(trace: Trace) -> bool:
    """Does cutting tokens out of the sequence give what hiding them from attention gives?"""
    return known(trace, _cuts, can_cut)


def scores_each(
    trace: Trace,
    target: Target,
    rows: Sequence[int],
    run: Callable[[slice], Record],
    what: str | None = None,
    share: float = 1.0,
    key: Hashable | None = None,
) -> VariantScores:
    """Scores of slices of variants, variant i of image `rows[i]`; each takes this share of an image's memory.

    `key`: these variants are always the same for this key and trace, so that other targets need not run them again.
    """
    size = batch_size(int(share * trace.layout.footprint[0]), trace.images.device)
    if key is None or len(rows) * (trace.model.outputs or 0) > MOST_KEPT:
        return torch.cat(
            in_batches(lambda part: trace.score(target.of_rows(rows[part]), run(part)).detach(), len(rows), size, what)
        )
    if key not in trace.ends:
        parts = in_batches(lambda part: ends_of(run(part)), len(rows), size, what)
        trace.ends[key] = tuple(torch.cat(part) for part in zip(*parts))
    return widen(target.of_rows(rows)(*trace.ends[key]))


def ends_of(record: Record) -> tuple[Tensor, Tensor]:
    """What scores are made of."""
    assert record.output is not None and record.embedding is not None
    return record.output.detach(), record.embedding.detach()


def run_keeping(trace: Trace, rows: Sequence[int], keep: Kept, cut: bool) -> Record:
    """A run of images with some of their tokens."""
    images = trace.images[list(rows)]
    if not cut:
        return lean_run(trace, images, gone_of(trace, keep))
    way = trace.unseen()  # found out with all tokens
    with Lean(trace, tokens=keep.shape[1]):
        return trace.run(images, **way, tokens=keep.shape[1], within=partial(Cut, trace, keep))


def lean_run(
    trace: Trace, images: Images, gone: Gone | None = None, enter: Edit | None = None, count: int | None = None
) -> Record:
    way = trace.unseen()
    if gone is not None:
        way["fold"] = None  # attention must be there to hide keys from it
    with Lean(trace, gone):
        return trace.run(images, enter=enter, count=count, **way)


def run_leaving(trace: Trace, image: Images, left: Left, shared: Shared) -> Record:
    """A run of one image, once without each of these tokens: hidden in the first block, cut out behind it.

    `shared`: what is the same for all tokens of this image, kept from run to run.
    """
    count, layout = len(left), trace.layout
    every = torch.arange(layout.tokens - 1, device=left.device).expand(count, -1)
    keep = every + (every >= left[:, None])
    way = trace.unseen()
    with Lean(trace, left=left, shared=shared):
        return trace.run(
            image,
            enter=partial(repeated, count, trace.batch_axis),
            count=count,
            **way,
            tokens=layout.tokens - 1,
            within=partial(Cut, trace, keep, 1),
        )


def repeated(count: int, axis: int, stream: Tensor) -> Tensor:
    """The same tokens for so many variants, without a copy."""
    return stream.expand(*[count if i == axis else -1 for i in range(stream.ndim)])


def run_without(trace: Trace, image: Images, gone: Gone) -> Record:
    """A run of one image, once for each row of `gone`."""
    count = len(gone)
    enter = partial(repeated, count, trace.batch_axis)
    if len(trace.layout.blocks) == trace.layout.layers:
        try:
            return lean_run(trace, image, gone, enter, count)
        except ModelError:  # it writes into its tokens, or counts its images before the first block
            pass
    return lean_run(trace, image.expand(count, -1, -1, -1).contiguous(), gone)


def one_gone(trace: Trace, left: Left) -> Gone:
    """One token is not kept."""
    return left[:, None] == torch.arange(trace.layout.tokens, device=left.device)


def gone_of(trace: Trace, keep: Kept) -> Gone:
    """The tokens that are not kept."""
    return torch.ones(len(keep), trace.layout.tokens, dtype=torch.bool, device=keep.device).scatter_(1, keep, False)


def refuse_dropping(trace: Trace) -> None:
    """Raise unless a token that is gone has no influence, and a model with all its tokens is as it was."""
    if not known(trace, _works, can_drop):
        raise Unsupported(
            f"{trace.model.name} reads its tokens in other ways than attention and their mean, so none can be taken "
            "away. Try occlusion, rise or gradcam."
        )


def can_drop(trace: Trace) -> bool:
    """Is nothing changed while no token is gone, and does the content of one that is gone not matter?"""
    layout, image = trace.layout, trace.images[:1]
    spoilt = image.clone()
    (row, column), (y, x) = (layout.grid[0] // 2, layout.grid[1] // 2), layout.patch or (1, 1)
    spoilt[..., row * y : (row + 1) * y, column * x : (column + 1) * x] += 1
    gone = torch.zeros(2, layout.tokens, dtype=torch.bool, device=image.device)
    gone[1, layout.token(row, column)] = True
    outputs = [run_without(trace, one, gone).output for one in (image, spoilt)]
    plain = trace.run(image).output
    assert plain is not None
    (whole, one), (_, other) = (output for output in outputs if output is not None)
    return near(whole, plain[0]) and near(one, other)


def can_cut(trace: Trace) -> bool:
    """Do tokens that are cut out and tokens that nobody reads give the same output?"""
    layout, device = trace.layout, trace.images.device
    if len(layout.blocks) != layout.layers:
        return False
    every = torch.arange(layout.tokens, device=device)
    patches = (every >= layout.prefix) & (every < layout.prefix + layout.patches)
    some = every[~patches | (every % 2 == 0)]
    others = every[~patches | ((every + every // 2) % 2 == 0)][: len(some)]
    keep = some[None] if len(others) < len(some) else torch.stack([some, others])
    rows = [0] * len(keep)
    try:
        found = run_keeping(trace, rows, keep, cut=True).output
    except ModelError:  # it counts its tokens elsewhere
        return False
    expected = run_keeping(trace, rows, keep, cut=False).output
    return found is not None and expected is not None and near(found, expected)


def can_leave(trace: Trace) -> bool:
    """Does a token that is cut out behind the first block, where nobody reads it, count for nothing?"""
    if not cuts(trace) or trace.layout.layers < 2:
        return False
    first = trace.layout.prefix
    left = torch.tensor([first, first + trace.layout.patches - 1], device=trace.images.device)
    try:
        found = run_leaving(trace, trace.images[:1], left, {}).output
    except ModelError:
        return False
    expected = run_without(trace, trace.images[:1], one_gone(trace, left)).output
    return found is not None and expected is not None and near(found, expected)


class Lean(TorchFunctionMode):
    """Run a model on variants of one image without what need not be computed, and without tokens that are gone.

    `left`: the one token that is gone from each variant; `shared`: see `run_leaving`.
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
        self.shared, self.met = shared, 0  # … of which so many were met in this run
        self.gone, self.left = gone if left is None else one_gone(trace, left), left
        self.axis, self.layout = trace.batch_axis, trace.layout
        self.tokens = tokens or trace.layout.tokens
        self.seen = 0  # layers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SDPA:
            return self.attend(func, *args, **kwargs)
        if func in MATMUL or func is torch.einsum:
            return func(*self.forget(args), **kwargs)
        if func is F.linear or func in NORMS:
            return self.once(func, args, kwargs)
        if func is F.conv2d and self.seen == 0 and len(args[0]) == 1:
            return self.common(partial(func, *args, **kwargs))
        if func in MEAN and self.gone is not None and self.seen >= self.layout.layers:
            return self.mean(func, *args, **kwargs)
        return func(*args, **kwargs)

    def attend(
        self, func: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        """Attention in which nobody reads what is gone."""
        mask = kw.pop("attn_mask", mask)
        if k.shape[-2] != self.tokens:
            return func(q, k, v, mask, *rest, **kw)  # type: ignore[no-any-return]
        if self.left is not None and mask is None and not rest and all(one_image(t) for t in (q, k, v)):
            parts = self.common(lambda: ways(widen(q[:1]), widen(k[:1]), widen(v[:1]), kw.get("scale")))
            return left_out(parts, self.left).to(q.dtype)
        if self.gone is not None:
            mask = additive(mask, False, q, k)
            hidden = self.keys(q.ndim, len(q), q.dtype)
            mask = hidden if mask is None else mask + hidden
        self.seen += q.shape[-2] == self.tokens
        return func(q, k, v, mask, *rest, **kw)  # type: ignore[no-any-return]

    def keys(self, ndim: int, rows: int, dtype: torch.dtype) -> Tensor:
        """−∞ for every key that is gone, in the axes of an attention's scores."""
        assert self.gone is not None
        gone = self.gone.repeat_interleave(rows // len(self.gone), 0)  # heads may be in the first axis
        hidden = torch.zeros(gone.shape, dtype=dtype, device=gone.device).masked_fill_(gone, -torch.inf)
        return hidden.view(rows, *[1] * (ndim - 2), -1)

    def forget(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A softmax that is about to be multiplied by values forgets what is gone: its rows sum to one again."""
        return tuple(self.forgotten(a) if isinstance(a, Tensor) and hasattr(a, TAG) else a for a in args)

    def forgotten(self, a: Tensor) -> Tensor:
        if a.shape[-1] != self.tokens:
            return a
        self.seen += a.shape[-2] == self.tokens
        if self.gone is None:
            return a
        wide = widen(a) * self.keys(a.ndim, len(a), torch.float32).exp()
        return (wide / wide.sum(-1, keepdim=True)).to(a.dtype)

    def once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer or a norm: once where all variants are still the same."""
        x = args[0]
        axes = [i for i in range(2) if x.shape[i] > 1 and x.stride(i) == 0] if x.ndim == 3 else []
        if not axes:
            return func(*args, **kwargs)
        one = self.common(partial(func, x.narrow(axes[0], 0, 1), *args[1:], **kwargs))
        return repeated(x.shape[axes[0]], axes[0], one)

    def common(self, make: Callable[[], Any]) -> Any:
        """What this run has in common with those before it."""
        if self.shared is None:
            return make()
        self.met += 1
        if self.met not in self.shared:
            self.shared[self.met] = make()
        return self.shared[self.met]

    def mean(self, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        """The mean over tokens, of those that are there."""
        axes = list(dim) if isinstance(dim, list | tuple) else [dim]
        along = 1 - self.axis
        count = x.shape[along] if x.ndim == 3 else 0
        if x.ndim != 3 or axes not in ([along], [along - 3]) or count not in (self.layout.patches, self.tokens):
            return func(x, dim, keepdim, **kwargs)  # type: ignore[no-any-return]
        assert self.gone is not None
        first = self.layout.prefix if count != self.tokens else 0
        kept = (~self.gone[:, first : first + count]).to(x.dtype)  # [V n]
        weights = (kept / kept.sum(1, keepdim=True).clamp_min(1))[..., None]
        return (x * (weights if self.axis == 0 else weights.transpose(0, 1))).sum(along, keepdim)


def one_image(t: Tensor) -> bool:
    """Are these heads the same for all variants, and held once?"""
    return t.ndim == 4 and t.shape[0] > 1 and t.stride(0) == 0


def ways(q: Heads, k: Heads, v: Heads, scale: float | None) -> tuple[Tensor, ...]:
    """V, A, O, and for each query its largest A and O without it."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT  # [1 H N N]
    a = scores.softmax(-1)
    most = a.argmax(-1, keepdim=True)
    return v, a, a @ v, most, scores.scatter(-1, most, -torch.inf).softmax(-1) @ v


def left_out(parts: tuple[Tensor, ...], left: Left) -> Heads:
    """One image's attention without each of these tokens [V H N d]: a change of rank one of the whole.

    O without i = (O − Aᵢ·vᵢ)/(1 − Aᵢ). Where a query looks mostly at i, which can only be its largest Aᵢ, that would
    lose digits: O without the largest is computed by itself.
    """
    v, a, out, most, others = parts
    largest = most == left.view(-1, 1, 1, 1)  # [V H N 1]
    share = a[0, :, :, left].permute(2, 0, 1)[..., None].masked_fill(largest, 0)
    values = v[0, :, left].transpose(0, 1)[:, :, None]  # [V H 1 d]
    return torch.where(largest, others, out).addcmul_(share, values, value=-1).div_(1 - share)


class Cut(ExitStack):
    """A context in which each image has only some of its patches, from block `since` on.

    What the model hands to its blocks beside the tokens and runs along all patches or tokens (rotations, say) is cut in
    the same way.
    """

    def __init__(self, trace: Trace, keep: Kept, since: int = 0) -> None:
        super().__init__()
        self.layout, self.axis, self.keep = trace.layout, trace.batch_axis, keep
        behind = self.layout.tokens - self.layout.prefix - self.layout.patches
        self.patches = keep[:, self.layout.prefix : keep.shape[1] - behind]
        for number in range(since, self.layout.layers):
            hook = self.first if number == since else self.later
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
        """[n d], [1 n d] or [1 1 n d] to [V 1 k d]; anything else stays."""
        if isinstance(value, tuple | list):
            return type(value)(self.beside(one) for one in value)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.numel() != value.shape[-2] * value.shape[-1]:
            return value
        index = {self.layout.patches: self.patches - self.layout.prefix, self.layout.tokens: self.keep}
        if value.shape[-2] not in index:
            return value
        return value.reshape(value.shape[-2:])[index[value.shape[-2]]][:, None]


def scored_as(trace: Trace, target: Target, of: str) -> tuple[Target, Scores]:
    """What is asked of the images, fixed, as a logit or a probability; and their scores now."""
    trace.plain()
    fixed = target.fix(trace.output)
    if of == "probability":
        if not fixed.names_classes:
            raise OptionError(f"of=probability needs a class, and {target} is none; use of=logit")
        fixed = Probability(fixed)
    return fixed, trace.score(fixed).detach()
