"""Run many variants of one image that differ from it after the output projection by a low-rank matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.capture import SDPA
from vitreous.capture.multi_head import SIGNATURE
from vitreous.capture.unfused import KEEPS
from vitreous.methods.attention.value_runs import ADD, wide

MULTIPLY = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__}


@dataclass(frozen=True, eq=False)
class Variants:
    """x_j = x − Σ_h a_j^h ⊗ u_j^h: J variants of one image, each a change of rank H."""

    x: Float[Tensor, "1 N D"]
    a: Float[Tensor, "J N H"]
    u: Float[Tensor, "J H D"]

    def formed(self) -> Float[Tensor, "J N D"]:
        return torch.baddbmm(self.x, self.a, self.u, alpha=-1)

    def plus(self, other: Tensor) -> Variants:
        return replace(self, x=self.x + other)

    def times(self, scale: Tensor) -> Variants:
        """Scale each channel by its own factor."""
        return replace(self, x=self.x * scale, u=self.u * scale)


@dataclass(frozen=True, eq=False)
class Normed:
    """The variants with their mean subtracted, divided by σ and shifted by b."""

    inner: Variants
    share: Float[Tensor, "J N 1"]  # 1/σ
    bias: Tensor

    def linear(self, read: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W·(…): W is applied to J·H vectors instead of J·N, and to those of the one image (`read` = W·x)."""
        shift = F.linear(self.bias, weight, bias)
        out = torch.addcmul(shift, read, self.share)
        return out.baddbmm_(self.inner.a * self.share, F.linear(self.inner.u, weight), alpha=-1)


class Spread(TorchFunctionMode):
    """A mode in which the output projection of one image returns variants of it; the rest runs for all variants.

    Tokens plus a scaled projection are still of low rank after a norm and a linear layer, so that layer, half the work
    of an MLP, costs next to nothing. `memory` holds results that are the same in every such run of a block.
    """

    def __init__(self, weight: Tensor, variants: Variants, memory: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.variants, self.memory = weight, variants, memory
        self.asked = 0
        self.behind = False  # whether the projection has been computed
        self.known: dict[int, tuple[Tensor, Variants]] = {}  # by identity: a tensor and its low-rank form
        self.normed: dict[int, tuple[Tensor, Normed]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            weight = SIGNATURE.bind(*args, **kwargs).arguments["out_proj_weight"]
            out, weights = func(*args, **kwargs)
            return (self.spread(out) if weight is self.weight else out), weights
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if func in SDPA and not self.behind:
            return self.once(lambda: func(*args, **kwargs))
        if func is F.layer_norm and args and id(args[0]) in self.known:
            return self.norm(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.known and isinstance(out, Tensor):
            self.follow(func, args, kwargs, out)
        return out

    def once(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute in the first run only; return a copy, since a block may overwrite it."""
        self.asked += 1
        if self.asked > len(self.memory):
            self.memory.append(compute())
        return self.memory[self.asked - 1].clone()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear."""
        if id(x) in self.normed:
            w, normed = wide(weight), self.normed[id(x)][1]
            return normed.linear(self.once(lambda: F.linear(normed.inner.x, w)), w, wide(bias))
        if self.behind:
            return F.linear(x, wide(weight), wide(bias))
        out = self.once(lambda: F.linear(x, wide(weight), wide(bias)))
        return self.spread(out) if weight is self.weight else out

    def spread(self, out: Tensor) -> Tensor:
        """The variants, in the axes of what they stand for: [1 N D] or [N 1 D]."""
        self.behind = True
        formed = self.variants.formed()
        formed = formed if out.shape[0] == 1 else formed.transpose(0, 1)
        self.known[id(formed)] = formed, self.variants
        return formed

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Keep track of variants through copies, transposition to batch first, addition to the tokens and scaling."""
        made_of = [x for x in args if id(x) in self.known]
        others = [x for x in args if isinstance(x, Tensor) and id(x) not in self.known]
        variants = self.known[id(made_of[0])][1] if len(made_of) == 1 else None
        for facts in (self.known, self.normed):
            facts.pop(id(out), None)  # it was overwritten
        if variants is None:
            return
        if func in KEEPS or (func is Tensor.transpose and out.shape[0] == len(variants.a)):
            self.known[id(out)] = out, variants
        elif len(others) == 1 and not kwargs:
            if func in ADD and others[0].shape == variants.x.shape:
                self.known[id(out)] = out, variants.plus(others[0])
            elif func in MULTIPLY and others[0].ndim == 1:
                self.known[id(out)] = out, variants.times(others[0])

    def norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """F.layer_norm, keeping the low-rank form of its result."""
        out, _, share = torch.native_layer_norm(x, shape, wide(weight), wide(bias), eps)
        known = self.known[id(x)][1]
        inner = replace(known, x=centred(known.x), u=centred(known.u))
        inner = inner if weight is None else inner.times(wide(weight))
        self.normed[id(out)] = out, Normed(inner, share, x.new_zeros(x.shape[-1]) if bias is None else wide(bias))
        return out


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)
