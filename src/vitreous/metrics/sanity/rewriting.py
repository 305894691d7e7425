"""The same network, written differently: constants and factors moved from a norm into the linear layers that read it.

    T = g ⊙ x̂ + b, read by W·T + a
    shift   b ← b − c,           a ← a + W·c         T changes by the constant −c
    gain    g ← g ⊙ r, b ← b ⊙ r, W ← W·diag(1/r)    T is stretched by r, powers of two: exact in floating point

Which linear layers read a norm is observed in one forward pass; nothing is known of their names.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vitreous.capture.capture import NORMS, linear_parts
from vitreous.models.inputs import Given
from vitreous.models.model import Model
from vitreous.trace.rules.mode import words
from vitreous.types import Images

TAG = "_vitreous_norm"  # attribute of a tensor: the norm whose numbers it holds
MOVES = words(  # functions that keep the numbers of a channel, or average them over tokens
    """__get__ __getitem__ chunk clone contiguous detach double dropout expand flatten float index_select mean movedim
    narrow permute reshape roll select split squeeze swapaxes t to transpose type_as unbind unflatten unsqueeze
    view"""
)
SCALARS = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout)


@dataclass(eq=False)
class Norm:
    """A norm with the linear layers that read it, by the names of their parameters."""

    width: int  # channels
    gain: str | None
    shift: str | None
    readers: list[tuple[str, str | None]] = field(default_factory=list)  # weight [… C], bias if it is a parameter
    alone: bool = True  # whether only these linear layers read it

    @property
    def names(self) -> list[str]:
        """All parameters that a rewriting changes."""
        every = [self.gain, self.shift, *(name for pair in self.readers for name in pair)]
        return [name for name in every if name is not None]

    @property
    def shifts(self) -> bool:
        """Whether a constant can leave it."""
        return self.shift is not None and all(bias is not None for _, bias in self.readers)


class Readers(TorchFunctionMode):
    """Which linear layers read which norm, in one forward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.known = {id(parameter): name for name, parameter in net.named_parameters()}
        self.uses: dict[str, int] = {}
        self.norms: list[Norm] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name != "__get__":  # to look at a shape is no use
            for used in (self.known.get(id(tensor)) for tensor in tensors):
                if used is not None:
                    self.uses[used] = self.uses.get(used, 0) + 1
        read = {id(norm): norm for tensor in tensors if (norm := getattr(tensor, TAG, None)) is not None}
        out = func(*args, **kwargs)
        for norm in read.values():
            self.follow(norm, func, name, args, kwargs, out)
        if func in NORMS:
            self.begin(func, args, kwargs, out)
        return out

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """A norm of the last axis by parameters of the network."""
        names = ("input", "normalized_shape", "weight", "bias" if "layer" in func.__name__ else "eps")
        given = {**dict(zip(names, args)), **kwargs}
        gain, shift = given.get("weight"), given.get("bias")
        parameters = [one for one in (gain, shift) if one is not None]
        if parameters and len(given["normalized_shape"]) == 1 and all(id(one) in self.known for one in parameters):
            norm = Norm(len(parameters[0]), self.known.get(id(gain)), self.known.get(id(shift)))
            self.norms.append(norm)
            setattr(out, TAG, norm)

    def follow(self, norm: Norm, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What a function does with the numbers of a norm."""
        reader = self.reader(norm, func, args, kwargs)
        if reader is not None:
            norm.readers.append(reader)
        elif name in MOVES or (name == "pad" and out.shape == args[0].shape):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    setattr(tensor, TAG, norm)
        elif out is None or not all(isinstance(leaf, SCALARS) for leaf in tree_leaves(out)):
            norm.alone = False

    def reader(
        self, norm: Norm, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, str | None] | None:
        """The parameters of a linear layer that reads a norm and nothing else."""
        if func is F.linear:
            inputs, weight, bias = linear_parts(*args, **kwargs)
            read = [inputs]
        elif func is F.multi_head_attention_forward and len(args) > 6:
            read, weight, bias = list(args[:3]), args[5], args[6]
        else:
            return None
        fits = id(weight) in self.known and weight.shape[-1] == norm.width
        if not fits or any(getattr(tensor, TAG, None) is not norm for tensor in read):
            return None
        return self.known[id(weight)], self.known.get(id(bias))


def norms_of(model: Model, images: Images, given: Given | None = None) -> list[Norm]:
    """The norms of a network that linear layers alone read, each with parameters that nothing else uses."""
    seen = Readers(model.module)
    with model.still(), seen:
        model.run(images, given)
    return [
        norm for norm in seen.norms if norm.alone and norm.readers and all(seen.uses[name] == 1 for name in norm.names)
    ]


@dataclass(frozen=True)
class Rewriting:
    """How to write norms differently: by shifts, gains or both."""

    kind: str
    scale: float
    seed: int

    def can(self, norm: Norm) -> bool:
        """Whether it changes this norm."""
        return (self.kind != "gain" and norm.shifts) or (self.kind != "shift" and norm.gain is not None)

    def apply(self, net: nn.Module, norm: Norm) -> dict[str, Tensor]:
        """Rewrite one norm in place; returns the parameters as they were."""
        parameters = dict(net.named_parameters())
        before = {name: parameters[name].detach().clone() for name in norm.names}
        now = {name: value.cpu().double() for name, value in before.items()}
        for change in self.changes(norm, now):
            now.update(change)
        restore(net, now)
        return before

    def changes(self, norm: Norm, now: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The new values of parameters; each step reads those of the step before."""
        name = norm.gain or norm.shift
        assert name is not None
        stream = torch.Generator().manual_seed(self.seed ^ zlib.crc32(name.encode()))
        drawn = torch.randn((2, *now[name].shape), generator=stream, dtype=torch.float64)
        if self.kind != "gain" and norm.shifts:
            assert norm.shift is not None
            size = 1.0 if norm.gain is None else now[norm.gain].square().mean().sqrt()
            constant = self.scale * size * drawn[0]
            yield {norm.shift: now[norm.shift] - constant}
            yield {bias: now[bias] + now[weight] @ constant for weight, bias in norm.readers if bias is not None}
        if self.kind != "shift" and norm.gain is not None:
            factor = torch.exp2((self.scale * drawn[1]).round())
            yield {name: now[name] * factor for name in (norm.gain, norm.shift) if name is not None}
            yield {weight: now[weight] / factor for weight, _ in norm.readers}


def restore(net: nn.Module, values: dict[str, Tensor]) -> None:
    """Set parameters to these values."""
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
