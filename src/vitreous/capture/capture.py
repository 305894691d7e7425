"""Record every attention that a model computes, whichever library it comes from.

    O = A·V,   A = softmax(s·Q·Kᵀ + bias)
    ∂y/∂A = ∂y/∂O · Vᵀ          so A is differentiated without ever being formed in the forward pass

There are three ways to compute attention in torch. `Capture`, a `TorchFunctionMode` of the current thread, recognises
all of them, calls the original kernel and keeps its inputs and output. No code is patched and no module is replaced.

    sdpa    F.scaled_dot_product_attention    timm, transformers (sdpa), DINOv2, DINOv3, open_clip's own blocks
    mha     F.multi_head_attention_forward    nn.MultiheadAttention: torchvision, CLIP, nn.TransformerEncoder
    eager   softmax(…) @ V (unfused.py)       transformers (eager), timm (fused_attn=False), Swin, DINO, MAE

`Capture` only records. Everything else is a separate mode stacked on it: `CutAt` (attention_backward.py) lets gradients
begin at a layer, `NarrowedBlock` (narrowed_block.py) computes less of the last block, `Survey` (survey.py) takes the
measurements of the layout run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention, folding
from vitreous.capture.joined import CAT, join, parts_of
from vitreous.capture.multi_head import unpacked
from vitreous.capture.unfused import (
    FACTORS,
    PRODUCTS,
    SOFTMAX,
    follow,
    is_learned,
    operands,
    read_product,
    soft_of,
    tag_product,
    tag_softmax,
)

NORMS = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}
BATCH_NORM = {F.batch_norm, torch.batch_norm}
SDPA = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
WHOLE = "_vitreous_whole"  # attribute of some rows of Q or A: all rows, their mask, the row indices (narrowed_block.py)
WATCHED = SDPA | SOFTMAX | PRODUCTS | CAT | {F.multi_head_attention_forward, F.linear, F.conv2d}


Change = Callable[[Attention], Tensor | None]  # another output of an attention, in its own axes; None: the same


class Enough(BaseException):
    """Raised inside a model once everything needed is recorded (`except Exception` does not catch it)."""


@runtime_checkable
class Forms(Protocol):
    """Computes the output of an attention in place of the model's kernel."""

    def takes(self, query: Tensor, key: Tensor) -> bool: ...
    def form(self, call: Attention, options: dict[str, Any]) -> Tensor: ...


class Formed:
    """A function from an attention to its output."""

    def __init__(self, make: Callable[[Attention], Tensor]) -> None:
        self.make = make

    def takes(self, query: Tensor, key: Tensor) -> bool:
        return query.ndim == 4 and query.shape[1] == key.shape[1]

    def form(self, call: Attention, options: dict[str, Any]) -> Tensor:
        return self.make(call)


class Capture(TorchFunctionMode):
    """Record every attention of a forward pass over `images` images in `calls`, in execution order.

    `names`: the network's module names by identity. `since`: the first attention to keep. `most`: the number of
    attentions after which `Enough` ends the forward pass. `forms` computes the output of every attention that it
    accepts, except the one that ends the forward pass. `change` may give the network another output than it recorded.
    """

    def __init__(
        self,
        names: ModuleNames,
        images: int,
        *,
        since: int = 0,
        most: int | None = None,
        forms: Forms | None = None,
        change: Change | None = None,
    ) -> None:
        super().__init__()
        self.names, self.images, self.since, self.most, self.forms = names, images, since, most, forms
        self.change = change
        self.calls: list[Attention] = []
        self.seen = 0  # attentions so far, kept or not
        self.last: Attention | None = None
        self._split: list[Attention] = []  # calls of one module, one after another, that may be parts of one attention
        self.recording = True  # off until gradients begin, if they begin at a layer
        self.linear: tuple[Tensor, Tensor] | None = None  # input and output of the last linear layer (the classifier?)
        self.module: str | None = None  # the module that computes attention now, if known (pauses.py)
        self._following = False  # whether there is a softmax, or a product that may become one

    def needs(self, number: int) -> bool:
        """Whether an attention must be seen."""
        return number >= self.since or self.forms is not None or self.change is not None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._following and func not in WATCHED:
            return func(*args, **kwargs)
        if func in SDPA:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(func, args, kwargs)
        if func is F.conv2d and not kwargs and cuts_patches(*args):
            return products(*args)
        out = func(*args, **kwargs)
        if func is F.linear:
            self.linear = (linear_parts(*args, **kwargs)[0], out)
        elif func in SOFTMAX:
            self._following = tag_softmax(args, kwargs, out) or self._following
        elif func in PRODUCTS:
            return self.see_product(func, args, kwargs, out)
        elif func in CAT and len(self._split) > 1:
            self.put_together(parts_of(args), out)
        if self._following and func not in SOFTMAX:
            follow(func, args, out)
        return out

    # -------------------------------------------------------------------------------------------- fused attention

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
        """F.scaled_dot_product_attention, recorded."""
        options: dict[str, Any] = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
        }
        asking = query
        query, attn_mask, only = getattr(asking, WHOLE, (query, attn_mask, None))
        ends = self.most is not None and self.seen + 1 >= self.most
        forms = self.forms if self.recording and not ends else None
        forms = forms if forms is not None and forms.takes(query, key) else None
        out = query  # replaced below where the output is formed
        if forms is None:
            out = F.scaled_dot_product_attention(asking, key, value, **options, enable_gqa=enable_gqa)
        name = self.module or caller(self.names)
        with torch._C.DisableTorchFunction():  # what follows is not the network's: modes below need not see it
            fold = folding(query.ndim, self.images)
            q, k, v = fold(query), fold(key), fold(value)
            if enable_gqa:
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            s = query.shape[-1] ** -0.5 if scale is None else scale
            bias = additive(attn_mask, is_causal, query, key)
            if bias is not None and bias.ndim < query.ndim:  # [H N M] or [N M], for all images
                bias = bias[(None,) * (query.ndim - bias.ndim)]
            if bias is not None and query.ndim != 4:
                bias = fold(bias.expand(*query.shape[:-1], key.shape[-2]))
        call = Attention(name, door, out, v, q, k, s, bias, keys=k, fold=fold, only=only, number=self.seen)
        if forms is not None:
            call.node = forms.form(call, options)
        self.keep(call)
        return self.changed(call)

    def multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """F.multi_head_attention_forward, its attention recorded."""

        def attend(*a: Any, **k: Any) -> Tensor:
            return self.attend(*a, **{**k, "door": "mha"})

        return unpacked(func, args, kwargs, attend, self.last_weights)

    def last_weights(self) -> Tensor:
        assert self.last is not None
        return self.last.weights

    # --------------------------------------------------------------------------------------- unfused attention

    def see_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        """A product: of a softmax and values it is an attention; any other may be Q·Kᵀ. Returns its result."""
        factors = operands(func, args, kwargs)
        softs = [one for one in factors if soft_of(one) is not None]
        if not softs or out.ndim < 3:
            self._following = True
            setattr(out, FACTORS, factors)
            return out
        found = read_product(func, args, kwargs, factors, self.images)
        if found is None and len(softs) > 1:
            tag_product(softs[0], softs[1], out)
        elif found is None and any(map(is_learned, factors)):  # heads mixed by learned weights
            follow(func, factors, out)
        elif found is None:
            self.mix(caller(self.names), softs[0].shape[1], out.shape[-1])
        else:
            a, _, only = getattr(found.a, WHOLE, (found.a, None, None))
            v, given = found.fold_v(found.v), found.fold_a(a)
            name = self.module or caller(self.names)
            call = Attention(name, "eager", out, v, given=given, fold=found.fold, only=only)
            call.mixed = found.mixed
            call.factors = getattr(a, FACTORS, None)
            call.keys = None if call.factors is None else call.factors[1]
            self.keep(call)
            return self.changed(call)
        return out

    # ------------------------------------------------------------------------------------------ what was recorded

    def keep(self, call: Attention) -> None:
        """Record an attention that was computed."""
        beside = self._split and call.name == self._split[-1].name and call.shape[0] == 1
        self._split = [*self._split, call] if beside else [call]
        self.last = call
        call.number = self.seen
        self.seen += 1
        if self.recording and self.seen > self.since:
            self.calls.append(call)
        self._following = False
        if self.most is not None and self.seen >= self.most:
            raise Enough

    def changed(self, call: Attention) -> Tensor:
        """What the network continues with."""
        other = None if self.change is None else self.change(call)
        return call.node if other is None else other

    def put_together(self, parts: list[Tensor], out: Tensor) -> None:
        """The last calls, of which a module puts the outputs together, are one attention."""
        count = len(parts)
        whole = join(self._split[-count:], parts, out) if 1 < count <= len(self._split) else None
        if whole is None:
            return
        self.seen -= count - 1
        self._split, self.last = [], whole
        if self.calls and self.calls[-1].number >= whole.number:
            self.calls[-count:] = [whole]

    def mix(self, module: str, heads: int, width: int) -> None:
        """Note a module that changes its softmax before the product with V; the layout run rejects such models."""


class ModuleNames:
    """The names of a network's modules by identity, found out when one is first asked for; None: there are no names."""

    def __init__(self, net: nn.Module | None) -> None:
        self._net = net
        self._names: dict[int, str] | None = None

    def get(self, identity: int) -> str | None:
        if self._names is None:
            named = () if self._net is None else self._net.named_modules()
            self._names = {id(module): name for name, module in named}
        return self._names.get(identity)


def caller(names: ModuleNames) -> str:
    """The name of the innermost module on the call stack of the current thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for key in ("self", "module"):
            name = names.get(id(frame.f_locals.get(key)))
            if name is not None:
                return name
        frame = frame.f_back
    return ""


# ------------------------------------------------------------------------------------------ arguments and axes


def linear_parts(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of F.linear, however they were passed."""
    return input, weight, bias


def additive(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask of sdpa as a bias of the scores."""
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return mask


def cuts_patches(images: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> bool:
    """Whether this is a convolution on a GPU over patches that do not overlap.

    As a linear layer it is ten times as fast there, and exact: torch's float32 convolutions keep only ten bits.
    """
    sides = tuple(weight.shape[-2:])
    fits = images.ndim == 4 and all(size % side == 0 for size, side in zip(images.shape[-2:], sides))
    return images.is_cuda and fits and rest == (sides, (0, 0), (1, 1), 1)


def products(images: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
    """Such a convolution as a linear layer over patches, [B D h w]."""
    (b, c, height, width), (y, x) = images.shape, weight.shape[-2:]
    cut = images.view(b, c, height // y, y, width // x, x).permute(0, 2, 4, 1, 3, 5)  # [B h w 3 y x]
    return F.linear(cut.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)


def normalised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch norm whose backward is right.

    On a CPU, torch's is wrong in eval mode for one image if its input or the gradient has the strides of permuted
    tokens, [1 C h w] with channels last: both are made contiguous.
    """
    x, *rest = args or (kwargs.pop("input"),)
    if x.is_cuda or len(x) != 1 or x.ndim < 3:
        return func(x, *rest, **kwargs)
    out = func(x.contiguous(), *rest, **kwargs)
    if out.requires_grad:
        out.register_hook(Tensor.contiguous)
    return out
