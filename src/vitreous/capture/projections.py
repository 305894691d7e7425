"""Which linear layers make the queries, keys and values of an attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention, near
from vitreous.capture.capture import caller
from vitreous.capture.functions import linear_parts
from vitreous.capture.narrowed_block import Fold, Linear


@dataclass(frozen=True, eq=False)
class Applied:
    """A linear layer that was run."""

    module: str
    x: Tensor
    linear: Linear


class Projections(TorchFunctionMode):
    """Note the linear layers that are run before each fused attention."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self._recent: list[Applied] = []
        self.before: list[tuple[Tensor, list[Applied]]] = []  # the keys of an attention, and the layers before it

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            x, weight, bias = linear_parts(*args, **(kwargs or {}))
            self._recent.append(Applied(caller(self.names), x, (weight, bias)))
        elif func is F.scaled_dot_product_attention:
            keys = args[1] if len(args) > 1 else (kwargs or {})["key"]
            self.before.append((keys, self._recent))
            self._recent = []
        return func(*args, **(kwargs or {}))

    def fold(self, call: Attention, block: str) -> Fold | None:
        """Where the queries, keys and values of this attention come from, among the linear layers of its block."""
        if call.bias is not None or call.q is None or call.k is None:
            return None
        linears = next((linears for keys, linears in self.before if keys is call.k), [])
        inside = [one for one in linears if one.module == block or one.module.startswith(f"{block}.")]
        found = [place for place in (find(t, inside) for t in (call.q, call.k, call.v)) if place is not None]
        (axis, *others) = {axis for _, _, axis in found} or {0}
        if len(found) < 3 or others or any(inside[number].x is not inside[0].x for number, _, _ in found):
            return None
        return Fold(tuple(number for number, _, _ in found), tuple(row for _, row, _ in found), axis)


def find(brought: Tensor, linears: list[Applied]) -> tuple[int, int, int] | None:
    """The linear layer, and the row in it, whose outputs these are, head by head; and the axis of the images."""
    if brought.ndim != 4:
        return None
    expected = brought.transpose(1, 2).flatten(2)  # [B N H·d]
    width = expected.shape[-1]
    for number, one in enumerate(linears):
        axis = 0 if one.x.shape[:-1] == expected.shape[:-1] else 1
        read = one.x.movedim(axis, 0)
        for row in range(0, len(one.linear[0]) - width + 1, width):
            ((weight, bias),) = Fold((0,), (row,)).parts([one.linear], width)
            if read.shape[:-1] == expected.shape[:-1] and near(F.linear(read, weight, bias), expected):
                return number, row, axis
    return None
