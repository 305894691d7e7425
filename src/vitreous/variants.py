"""One image changed in many ways: other pixels, other tokens, fewer tokens; one score for each.

A token that is gone is read by nobody: no query attends to it and no pool counts it. All others keep their positions,
also where positions are rotations (RoPE) or biases. What all variants share until they part is computed once, and after
the last attention only what the head reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.attention import widen
from vitreous.capture import MATMUL, NORMS, SDPA, TAG, additive
from vitreous.errors import ModelError, OptionError, Unsupported
from vitreous.memory import batch_size, in_batches
from vitreous.target import Probability, Target, classes, fix, of_image
from vitreous.trace import Edit, Record, Trace
from vitreous.types import Images, Scores

MEAN = {torch.mean, Tensor.mean}
NEVER = 2**30  # the number of an attention that is kept
Gone = Bool[Tensor, "V N"]
_works: WeakKeyDictionary[nn.Module, dict[tuple[int, int], bool]] = WeakKeyDictionary()


def scores_of(trace: Trace, target: Target, pictures: Callable[[slice], Images], count: int, what: str) -> Scores:
    """The score of each of `count` pictures; `pictures` makes a slice of them."""
    return scores(trace, target, lambda part: lean_run(trace, pictures(part)), count, what)


def scores_entering(
    trace: Trace, index: int, target: Target, tokens: Callable[[Tensor, slice], Tensor], count: int, what: str
) -> Scores:
    """The score of an image with other tokens: `tokens` makes a slice of [V N D] from what enters the first block."""
    axis = trace.batch_axis

    def run(part: slice) -> Record:
        def enter(stream: Tensor) -> Tensor:
            return tokens(stream.movedim(axis, 0), part).movedim(0, axis)

        return lean_run(trace, trace.images[index : index + 1], enter=enter, count=part.stop - part.start)

    return scores(trace, target, run, count, what)


def scores_without(trace: Trace, index: int, target: Target, gone: Gone, what: str) -> Scores:
    """The score of an image without some of its tokens."""
    refuse_dropping(trace)
    image = trace.images[index : index + 1]
    return scores(trace, target, lambda part: run_without(trace, image, gone[part]), len(gone), what)


def scores(trace: Trace, target: Target, run: Callable[[slice], Record], count: int, what: str) -> Scores:
    """Scores of slices of variants, as many at a time as memory allows."""
    size = batch_size(trace.layout.footprint[0], trace.images.device)
    return torch.cat(in_batches(lambda part: trace.score(target, run(part)).detach(), count, size, what))


def lean_run(
    trace: Trace, images: Images, gone: Gone | None = None, enter: Edit | None = None, count: int | None = None
) -> Record:
    with Lean(trace, gone):
        return trace.run(images, enter=enter, count=count, since=NEVER)


def run_without(trace: Trace, image: Images, gone: Gone) -> Record:
    """A run of one image, once for each row of `gone`."""
    axis, count = trace.batch_axis, len(gone)

    def enter(stream: Tensor) -> Tensor:
        return stream.expand(*[count if i == axis else -1 for i in range(stream.ndim)])

    if len(trace.layout.blocks) == trace.layout.layers:
        try:
            return lean_run(trace, image, gone, enter, count)
        except ModelError:  # it writes into its tokens, or counts its images before the first block
            pass
    return lean_run(trace, image.expand(count, -1, -1, -1).contiguous(), gone)


def refuse_dropping(trace: Trace) -> None:
    """Raise unless a token that is gone has no influence, and a model with all its tokens is as it was."""
    known = _works.setdefault(trace.model.module, {})
    if trace.size not in known:
        known[trace.size] = can_drop(trace)
    if not known[trace.size]:
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
    (whole, one), (_, other) = (widen(output) for output in outputs if output is not None)
    close = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 5e-2
    limit = close * widen(plain).abs().max()
    return bool((whole - widen(plain)[0]).abs().max() <= limit and (one - other).abs().max() <= limit)


class Lean(TorchFunctionMode):
    """Run a model on variants of one image without what need not be computed, and without tokens that are gone."""

    def __init__(self, trace: Trace, gone: Gone | None = None) -> None:
        super().__init__()
        self.gone = gone
        self.axis, self.layout = trace.batch_axis, trace.layout
        self.read = trace.read_tokens if trace.layout.probed else None
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
        if func in MEAN and self.gone is not None and self.seen >= self.layout.layers:
            return self.mean(func, *args, **kwargs)
        return func(*args, **kwargs)

    def attend(
        self, func: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        """Attention in which nobody reads what is gone; in the last layer, for the tokens that the head reads."""
        mask = kw.pop("attn_mask", mask)
        if k.shape[-2] != self.layout.tokens:
            return func(q, k, v, mask, *rest, **kw)  # type: ignore[no-any-return]
        if self.gone is not None:
            mask = additive(mask, False, q, k)
            hidden = self.keys(q.ndim, len(q), q.dtype)
            mask = hidden if mask is None else mask + hidden
        if not self.is_layer(q.shape[-2]) or self.seen < self.layout.layers or self.read is None:
            return func(q, k, v, mask, *rest, **kw)  # type: ignore[no-any-return]
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., self.read, :]
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        out[..., self.read, :] = func(q[..., self.read, :], k, v, mask, *rest, **kw)
        return out

    def is_layer(self, queries: int) -> bool:
        self.seen += queries == self.layout.tokens
        return queries == self.layout.tokens

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
        if a.shape[-1] != self.layout.tokens:
            return a
        self.is_layer(a.shape[-2])
        if self.gone is None:
            return a
        wide = widen(a) * self.keys(a.ndim, len(a), torch.float32).exp()
        return (wide / wide.sum(-1, keepdim=True)).to(a.dtype)

    def once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A linear layer or a norm: once where all variants are still the same, later only of what is read."""
        x = args[0]
        if x.ndim == 3 and x.shape[self.axis] > 1 and x.stride(self.axis) == 0:
            out = func(x.narrow(self.axis, 0, 1), *args[1:], **kwargs)
            return out.expand(*[x.shape[i] if i == self.axis else -1 for i in range(3)])
        after = self.read is not None and self.seen >= self.layout.layers and func is F.linear
        if not after or x.ndim != 3 or x.shape[1 - self.axis] != self.layout.tokens:
            return func(*args, **kwargs)
        rows: Any = (slice(None), self.read) if self.axis == 0 else (self.read,)
        out = x.new_zeros(*x.shape[:-1], args[1].shape[0])
        out[rows] = func(x[rows], *args[1:], **kwargs)
        return out

    def mean(self, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        """The mean over tokens, of those that are there."""
        axes = list(dim) if isinstance(dim, list | tuple) else [dim]
        along = 1 - self.axis
        count = x.shape[along] if x.ndim == 3 else 0
        if x.ndim != 3 or axes not in ([along], [along - 3]) or count not in (self.layout.patches, self.layout.tokens):
            return func(x, dim, keepdim, **kwargs)  # type: ignore[no-any-return]
        assert self.gone is not None
        first = self.layout.prefix if count != self.layout.tokens else 0
        kept = (~self.gone[:, first : first + count]).to(x.dtype)  # [V n]
        weights = (kept / kept.sum(1, keepdim=True).clamp_min(1))[..., None]
        return (x * (weights if self.axis == 0 else weights.transpose(0, 1))).sum(along, keepdim)


def scored_as(trace: Trace, target: Target, of: str) -> tuple[list[Target], Scores]:
    """What is asked of each image, as a logit or a probability, and its score now."""
    fixed = fix(target, trace.output)
    if of == "probability":
        if not classes(fixed):
            raise OptionError(f"of=probability needs a class, and {target} is none; use of=logit")
        fixed = Probability(fixed)
    return [of_image(fixed, i) for i in range(len(trace))], trace.score(fixed).detach()
