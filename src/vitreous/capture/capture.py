"""See every attention a model computes, whichever library wrote the model.

    O = A·V,   A = softmax(s·Q·Kᵀ + bias)
    ∂y/∂A = ∂y/∂O · Vᵀ          so A is differentiated without ever being formed in the forward pass

Three doors lead to an attention. One `TorchFunctionMode` watches all of them: it is local to the thread, calls the
original kernel and keeps what went in and came out. Nothing is patched, hooked or forked.

    sdpa    F.scaled_dot_product_attention    timm, transformers (sdpa), DINOv2, DINOv3, open_clip's own blocks
    mha     F.multi_head_attention_forward    nn.MultiheadAttention: torchvision, CLIP, nn.TransformerEncoder
    eager   softmax(…) @ V                    transformers (eager), timm (fused_attn=False), Swin, DINO, MAE
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention, rows_of, run_of, same

if TYPE_CHECKING:
    from vitreous.capture.attention_backward import Follower
    from vitreous.capture.narrowed_block import Tail

NORMS = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}
SDPA = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
KEEPS = {F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16}
KEEPS |= {Tensor.contiguous, Tensor.clone, torch.clone, torch.nan_to_num, Tensor.nan_to_num}
WATCHED = NORMS | SDPA | SOFTMAX | MATMUL
WATCHED |= {torch._C._set_grad_enabled, F.multi_head_attention_forward, F.linear, F.conv2d, torch.einsum}
TAG = "_vitreous_softmax"  # on a tensor that is a softmax, or (mixed) was made of one
FACTORS = "_vitreous_factors"  # Q and Kᵀ, on a tensor that was made of their product
Entry = tuple[str, int]  # the tokens that enter a layer: made by the so manyeth "norm", or read by such a "linear"
Way = tuple[Entry, tuple[int, ...]]  # an entry and its shape
Former = Callable[[Attention], Tensor]  # makes O of an attention


class Enough(BaseException):
    """Raised inside the model once all that was asked for has been seen (no `except Exception` of a model stops it)."""


class Capture(TorchFunctionMode):
    """Record every attention of a run of `net` over `images` images in `calls`, in the order of the run.

    With `most`, the run ends by `Enough` at that many calls. With `cut`, gradients begin at that entry: all before is
    constant, `leaf` is the tensor to ask about, and `edit` may change it first. `weighs`: count the memory. `former`
    makes O of every attention but the last of these, from A.
    """

    def __init__(
        self,
        net: nn.Module | dict[int, str],
        images: int,
        most: int | None = None,
        cut: Entry | None = None,
        edit: Callable[[Tensor], Tensor] = same,
        follower: Follower | None = None,
        since: int = 0,
        tail: Tail | None = None,
        weighs: bool = False,
        former: Former | None = None,
    ) -> None:
        super().__init__()
        self.tail, self.former = tail, former
        self.images, self.most, self.cut, self.edit, self.follower = images, most, cut, edit, follower
        self.grads = cut is not None or torch.is_grad_enabled()
        self.names = names_of(net) if isinstance(net, nn.Module) else net
        self.since = since  # calls before this one are not kept
        self.last: Attention | None = None  # of nn.MultiheadAttention, which may ask for its weights
        self._calls = 0
        self.calls: list[Attention] = []
        self.mixed: list[str] = []  # modules that change A between softmax and A·V
        self.grids: list[tuple[int, int]] = []  # output sizes of convolutions: one of them cut the patches
        self.patches: list[tuple[int, int]] = []  # (tokens, width) of what linear layers read: or one of these did
        self.linear: tuple[Tensor, Tensor] | None = None  # the last linear layer's input and output
        self.entries: list[Way | None] = []  # of each call
        self.ways: list[Way | None] = []  # of each call and of each attention that is changed on the way
        self.leaf: Tensor | None = None
        self.weighs = weighs
        self.made, self.largest = 0, 0  # bytes of all that was computed, and of the largest tensor
        self._counts = {"norm": 0, "linear": 0}
        self._recent: list[Way] = []  # norms and linear inputs since the last attention
        self._cut_from: Tensor | None = None
        self._following = False  # is there a softmax, or a product that may become one?

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._following and func not in WATCHED:
            out = func(*args, **kwargs)
            if self.weighs and isinstance(out, Tensor):
                self.weigh(out)
            return out
        if func is torch._C._set_grad_enabled:  # a frozen part of the model (torch.no_grad in its forward) is
            return None if self.grads else func(*args, **kwargs)  # differentiated all the same
        if func in SDPA:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(func, args, kwargs)
        if func is F.linear:
            args = (self.enter("linear", args[0]), *args[1:])
            if self.tail is not None and self.tail.fold is not None and self.tail.state == "whole":
                return self.tail.linear(*args, **kwargs)
        elif func in MATMUL and self.tail is not None and self.tail.state in ("whole", "read"):
            args = self.narrow_product(*args)
        if func is F.conv2d and not kwargs and as_products(*args):
            out = products(*args)
        else:
            out = func(*args, **kwargs)
        if self.weighs and isinstance(out, Tensor):
            self.weigh(out)
        if func in NORMS:
            out = self.enter("norm", out)
        elif func in SOFTMAX:
            self.see_softmax(args, kwargs, out)
        elif func in MATMUL or func is torch.einsum:
            self.see_product(func, args, out)
        elif func is F.linear or func is F.conv2d:
            self.see_layer(func, args, out)
        if self._following and isinstance(out, Tensor):
            self.see_change(func, args, out)
        return out

    def weigh(self, out: Tensor) -> None:
        """Count what this takes of memory."""
        self.made += out.nbytes
        self.largest = max(self.largest, out.nbytes)

    def enter(self, kind: str, tokens: Tensor) -> Tensor:
        """Count what may be the tokens that enter a layer; where gradients begin, give back the leaf in their place."""
        self._counts[kind] += 1
        place = (kind, self._counts[kind])
        self._recent.append((place, tuple(tokens.shape)))
        if place == self.cut:
            torch.set_grad_enabled(True)
            self._cut_from, self.leaf = tokens, self.edit(tokens.detach()).detach().requires_grad_()
        if self.leaf is not None and tokens is self._cut_from:
            return self.leaf
        return tokens

    def entry(self, heads: int, width: int) -> Way | None:
        """The last normalised tokens before a call (not its normalised queries or keys), else what was projected."""
        for kind in ("norm", "linear"):
            for place, shape in reversed(self._recent):
                of_heads = len(shape) == 4 and ((shape[-1] == width and heads > 1) or shape[1] == 1)
                if place[0] == kind and len(shape) in (3, 4) and self.images in shape[:2] and not of_heads:
                    return place, shape
        return None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        door: str = "sdpa",
    ) -> Tensor:
        """F.scaled_dot_product_attention, watched."""
        options: dict[str, Any] = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
        }
        only, asking = None, query
        if self.tail is not None and self.tail.fold is not None and self.tail.state == "read":
            return self.attend_folded(self.tail, query, scale)
        if self.tail is not None and self.tail.state in ("whole", "read"):
            query, key, value, attn_mask = self.tail.attention(query, key, value, attn_mask)
            only = self.tail.read
            asking, options["attn_mask"] = query[..., run_of(only), :], rows_of(attn_mask, only)
        follower = self.follower if self.leaf is not None else None
        follower = follower if follower is not None and follower.follows(query, key) else None
        last = self.most is not None and self._calls + 1 >= self.most
        forms = self.former is not None and not last and query.ndim == 4 and not enable_gqa and only is None
        out = query  # replaced below where the pass is followed, or O formed
        if follower is None and not forms:
            out = F.scaled_dot_product_attention(asking, key, value, **options, enable_gqa=enable_gqa)
        fold = folding(query.ndim, self.images)
        q, k, v = fold(query), fold(key), fold(value)
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = query.shape[-1] ** -0.5 if scale is None else scale
        bias = additive(attn_mask, is_causal, query, key)
        if bias is not None and query.ndim != 4:
            bias = fold(bias.expand(*query.shape[:-1], key.shape[-2]))
        call = Attention(caller(self.names), door, out, v, q, k, s, bias, keys=k, fold=fold, only=only)
        if follower is not None:
            call.followed, call.node = True, follower.attend(call, options)
        elif forms and self.former is not None:
            call.node = self.former(call)
        self.keep(call)
        return call.node

    def attend_folded(self, tail: Tail, query: Tensor, scale: float | None) -> Tensor:
        """The last attention without keys and values: it is counted, and cannot be seen."""
        self._calls += 1
        self._recent.clear()
        heads, width = query.shape[1], query.shape[-1]
        show = None if self.follower is None else self.follower.show
        return tail.folded(heads, width, width**-0.5 if scale is None else scale, show)

    def multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's own function, run over globals in which its attention is the watched one."""
        given = MHA_SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        wanted, averaged = given.arguments["need_weights"], given.arguments["average_attn_weights"]
        given.arguments["need_weights"] = False  # its other branch forms A without sdpa
        if self.tail is not None and self.tail.fold is not None and self.tail.state == "whole":
            self.tail.linear(*(given.arguments[name] for name in ("query", "in_proj_weight", "in_proj_bias")))

        def attend(*a: Any, **k: Any) -> Tensor:
            return self.attend(*a, **{**k, "door": "mha"})

        ours = dict(func.__globals__, has_torch_function=lambda _: False, scaled_dot_product_attention=attend)
        run = FunctionType(func.__code__, ours, func.__name__, func.__defaults__, func.__closure__)
        out, _ = run(*given.args, **given.kwargs)
        if not wanted:
            return out, None
        assert self.last is not None
        weights = self.last.weights.to(out.dtype)
        weights = weights.mean(1) if averaged else weights
        return out, weights[0] if out.ndim == 2 else weights

    def see_softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        if kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, out.ndim - 1):
            self._following = True
            setattr(out, TAG, "soft")
            if hasattr(args[0], FACTORS):
                setattr(out, FACTORS, getattr(args[0], FACTORS))

    def narrow_product(self, a: Any, v: Any) -> tuple[Any, Any]:
        """A softmax in the last block that is about to meet its values: the rows that are read, and all values."""
        if self.tail is None or getattr(a, TAG, None) != "soft":
            return a, v
        a, v = self.tail.attention(a, v)
        part = a[..., run_of(self.tail.read), :]
        setattr(part, TAG, "soft")
        return part, v

    def see_product(self, func: Any, args: tuple[Any, ...], out: Tensor) -> None:
        """A softmax that is multiplied by values is an attention; any other product may be Q·Kᵀ."""
        if func is torch.einsum:
            a, v, fold_a, fold_v, fold = einsum_axes(args)
        else:
            a, v = args[0], args[1]
            fold_a = fold_v = fold = folding(a.ndim, self.images)
        if not isinstance(a, Tensor) or not hasattr(a, TAG) or out.ndim < 3:
            self._following = True
            setattr(out, FACTORS, args[-2:])
        elif getattr(a, TAG) == "mixed" or fold is None:
            self.mixed.append(caller(self.names))
            self.ways.append(self.entry(a.shape[1], v.shape[-1]))
            self._recent.clear()
        else:
            only = self.tail.read if self.tail is not None and self.tail.state == "read" else None
            a = self.tail.whole[0] if only is not None and self.tail is not None and self.tail.whole else a
            call = Attention(caller(self.names), "eager", out, fold_v(v), given=fold_a(a), fold=fold, only=only)
            call.factors = getattr(a, FACTORS, None)
            call.keys = None if call.factors is None else call.factors[1]
            self.keep(call)

    def keep(self, call: Attention) -> None:
        self.last = call if call.door == "mha" else None
        self.made += 4 * call.node.nbytes  # with Q, K and V, which nn.MultiheadAttention makes out of sight
        self._calls += 1
        if self._calls > self.since and (self.cut is None or self.leaf is not None):
            self.calls.append(call)  # what comes before the cut is of no use
        self.entries.append(self.entry(call.shape[1], call.v.shape[-1]))
        self.ways.append(self.entries[-1])
        self._recent.clear()
        self._following = False
        if self.most is not None and self._calls >= self.most:
            raise Enough

    def see_change(self, func: Any, args: tuple[Any, ...], out: Tensor) -> None:
        """Follow scores to their softmax, and a softmax through what leaves it as it is; mark what changes it."""
        if func in SOFTMAX or func in MATMUL or func is torch.einsum:
            return
        for source in args:
            if isinstance(source, Tensor) and out.numel() == source.numel():
                if hasattr(source, FACTORS):
                    setattr(out, FACTORS, getattr(source, FACTORS))
                if hasattr(source, TAG):
                    setattr(out, TAG, getattr(source, TAG) if func in KEEPS else "mixed")

    def see_layer(self, func: Any, args: tuple[Any, ...], out: Tensor) -> None:
        """Remember what may have cut the patches, and what may be the classifier."""
        if func is F.linear:
            self.linear = (args[0], out)
            if not self.calls and args[0].ndim == 3:
                self.patches.append((args[0].shape[1], args[0].shape[2]))
        elif func is F.conv2d and not self.calls:
            self.grids.append((out.shape[-2], out.shape[-1]))


def as_products(images: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> bool:
    """Does this convolution cut patches that do not overlap? On a GPU a linear layer does so ten times as fast.

    (Of float32, torch's convolutions there keep ten bits, and by a rule that depends on the number of images.)
    """
    sides = tuple(weight.shape[-2:])
    fits = images.ndim == 4 and all(size % side == 0 for size, side in zip(images.shape[-2:], sides))
    return images.is_cuda and fits and rest == (sides, (0, 0), (1, 1), 1)


def products(images: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    """Such a convolution as a linear layer of patches, [B D h w]."""
    (b, c, height, width), (y, x) = images.shape, weight.shape[-2:]
    cut = images.view(b, c, height // y, y, width // x, x).permute(0, 2, 4, 1, 3, 5)  # [B h w 3 y x]
    return F.linear(cut.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)


def caller(names: Mapping[int, str]) -> str:
    """The name of the innermost module on the call stack (the stack is the thread's own)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for key in ("self", "module"):
            name = names.get(id(frame.f_locals.get(key)))
            if name is not None:
                return name
        frame = frame.f_back
    return ""


def names_of(net: nn.Module) -> dict[int, str]:
    """A module's name by its identity."""
    return {id(module): name for name, module in net.named_modules()}


MHA_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def folding(ndim: int, images: int) -> Callable[[Tensor], Tensor]:
    """From [B·H n d] (or windows [B W H n d]) to [B H n d]."""
    if ndim == 3:
        return lambda t: t.reshape(images if t.shape[0] % images == 0 else t.shape[0], -1, *t.shape[1:])
    if ndim > 4:
        return lambda t: t.flatten(0, -4)
    return same


def einsum_axes(args: tuple[Any, ...]) -> Any:
    """a, v, and how to bring a, v and the result to [B H N M], [B H M d] and [B H N d] (None: it cannot be done)."""
    equation, operands = args[0], args[1:]
    failed = (None, None, None, None, None)
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return failed
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if hasattr(operands[1], TAG):
        operands, terms = operands[::-1], terms[::-1]
    a, v = operands
    if not isinstance(a, Tensor) or not hasattr(a, TAG):
        return failed
    shared = [c for c in terms[0] if c in terms[1] and c in result]
    keys = [c for c in terms[0] if c in terms[1] and c not in result]
    queries = [c for c in terms[0] if c not in terms[1] and c in result]
    width = [c for c in terms[1] if c not in terms[0] and c in result]
    if not (len(shared) in (1, 2) and len(keys) == len(queries) == len(width) == 1) or terms[0][-1] != keys[0]:
        return a, v, None, None, None

    def order(term: str, last: list[str]) -> Callable[[Tensor], Tensor]:
        axes = [term.index(c) for c in shared + last]
        return lambda t: t.permute(axes) if len(axes) == 4 else t.permute(axes).unsqueeze(1)

    return a, v, order(terms[0], queries + keys), order(terms[1], keys + width), order(result, queries + width)


def additive(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """sdpa's mask as numbers to add to the scores."""
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return mask
