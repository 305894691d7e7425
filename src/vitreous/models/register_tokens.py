"""Register tokens that were never trained: modules that add them to a network, remove them, and fill them.

ExtendedBlock   a block with registers added before it, removed behind it, or both
MovedUnits      the second linear layer of an MLP; the largest activations of some of its inputs move to the registers
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

MOVED = "moved_units"  # buffer of a linear layer: which of its inputs move
UNITS = "_vitreous_units"  # attribute of a tensor: sizes of activations of the patches, of which the largest move


@dataclass(frozen=True)
class Registers:
    """Where the registers stand among the tokens."""

    count: int
    at: int  # the first of them; the patches follow
    behind: int = 0  # tokens after the patches
    axis: int = 1  # of the tokens

    def add(self, tokens: Tensor) -> Tensor:
        """The tokens with registers of zeros."""
        first, rest = tokens.split_with_sizes([self.at, tokens.shape[self.axis] - self.at], self.axis)
        return torch.cat([first, self.blank(tokens, self.count), rest], self.axis)

    def blank(self, tokens: Tensor, count: int) -> Tensor:
        """So many tokens of zeros."""
        return tokens.new_zeros([count if i == self.axis else size for i, size in enumerate(tokens.shape)])

    def remove(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[self.axis]
        first, _, rest = tokens.split_with_sizes([self.at, self.count, n - self.at - self.count], self.axis)
        return torch.cat([first, rest], self.axis)

    def move(self, hidden: Tensor, units: Int[Tensor, "U"]) -> Tensor:
        """The activations with the largest ones of these units moved from the patches to the registers.

        The k-th register gets each unit's k-th largest activation (by its size) over the patches, all of which get
        zero; other tokens keep theirs. If only a few tokens are computed, without the registers, nothing moves.
        """
        patches = hidden.shape[self.axis] - self.at - self.count - self.behind
        if patches < 0:
            return hidden
        own = hidden.index_select(-1, units)
        first, _, of_patches, last = own.split_with_sizes([self.at, self.count, patches, self.behind], self.axis)
        size = of_patches.detach().abs()
        setattr(size, UNITS, True)
        sizes, places = size.topk(min(self.count, patches), self.axis)
        largest = of_patches.gather(self.axis, places).masked_fill(sizes < 0, 0)  # below zero: of dropped tokens
        rest = self.blank(own, self.count - largest.shape[self.axis] + patches)
        moved = torch.cat([first, largest, rest, last], self.axis)
        return hidden.index_copy(-1, units, moved)


class Changed(nn.Module):
    """Passes its tokens through a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, tokens: Tensor) -> Tensor:
        return self.change(tokens)


class ExtendedBlock(nn.Sequential):
    """A block with registers added before it, removed behind it, or both; it takes and returns what the block does."""

    def __init__(self, block: nn.Module, registers: Registers, *, first: bool, last: bool) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if first:
            parts["add"] = Changed(registers.add)
        parts["block"] = block
        if last:
            parts["remove"] = Changed(registers.remove)
        super().__init__(parts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            block = self.__dict__.get("_modules", {}).get("block")
            if block is None:
                raise
            return getattr(block, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._modules
        if "add" in parts and args:
            args = (self.add(args[0]), *args[1:])
        elif "add" in parts:
            name = next(iter(kwargs))
            kwargs = {**kwargs, name: self.add(kwargs[name])}
        out = self.block(*args, **kwargs)
        if "remove" not in parts:
            return out
        return (self.remove(out[0]), *out[1:]) if isinstance(out, tuple) else self.remove(out)


class MovedUnits(nn.Linear):
    """A linear layer, some of whose inputs are moved from the patches to the registers before it."""

    registers: Registers
    moved_units: Tensor

    @classmethod
    def of(cls, linear: nn.Linear, units: Sequence[int], registers: Registers) -> MovedUnits:
        """The same layer, with the same parameters."""
        moved = cls.__new__(cls)
        moved.__dict__.update(linear.__dict__)
        moved.registers = registers
        listed = torch.tensor(sorted(set(units)), device=linear.weight.device)
        moved._buffers = dict(linear._buffers)
        moved.register_buffer(MOVED, listed)
        return moved

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.registers.move(input, self.moved_units))
