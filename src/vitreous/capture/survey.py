"""The measurements of the layout run besides attention, each by a separate mode.

Entries        the tokens that enter each layer
Projections    the linear layers that make queries, keys and values
Patches        the layer that cuts the image into patches
MemoryUse      the bytes of all intermediate results
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention, near
from vitreous.capture.capture import Capture, ModuleNames, caller, linear_parts
from vitreous.capture.entries import AtEntries, Entry
from vitreous.capture.narrowed_block import Fold, Linear
from vitreous.capture.pauses import ModuleEvents
from vitreous.capture.unfused import FACTORS, is_activation, operands, soft_of


class Met(NamedTuple):
    """Tokens that may enter a layer."""

    entry: Entry
    tokens: Tensor


class Entries(AtEntries):
    """Record every norm and linear call; `before` returns what entered the attention that was just recorded."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images = images
        self._recent: list[Met] = []  # since the last attention
        self.latest: list[Met] = []  # those before the last attention

    def met(self, entry: Entry, tokens: Tensor) -> Tensor:
        self._recent.append(Met(entry, tokens))
        return tokens

    def before(self, heads: int, width: int, counts: tuple[int, ...] = ()) -> Met | None:
        """The input of an attention: the last normalised tokens (not queries or keys), else the projected tokens.

        Of several linear layers that project the same tokens, as for queries, keys and values, the first is returned.

        `counts`: the numbers of tokens that they may be, if known.
        """
        recent, self._recent = self._recent, []
        self.latest = recent
        for kind in ("norm", "linear"):
            for met in reversed(recent):
                shape = met.tokens.shape
                of_heads = len(shape) == 4 and ((shape[-1] == width and heads > 1) or shape[1] == 1)
                if (
                    met.entry[0] == kind
                    and len(shape) == 2
                    and self.images == 1
                    and counts
                    and shape[0] >= counts[0] > 1
                ):
                    return met  # of a packed sequence, without an axis of images
                if met.entry[0] != kind or len(shape) not in (3, 4) or self.images not in shape[:2] or of_heads:
                    continue
                if not counts or len(shape) == 4 or shape[1 if shape[0] == self.images else 0] in counts:
                    return next(one for one in recent if one.entry[0] == kind and one.tokens is met.tokens)
        return None


@dataclass(frozen=True, eq=False)
class Applied:
    """A call of a linear layer."""

    module: str
    x: Tensor
    linear: Linear


class Projections(TorchFunctionMode):
    """Record the linear layers before each fused attention."""

    def __init__(self, names: ModuleNames) -> None:
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
    """The linear layer and the row in it that produced these, head by head, and the axis of the images."""
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


class Patches(TorchFunctionMode):
    """Record what may have cut the patches: convolutions, and linear layers over rows of pixels."""

    def __init__(self, seen: Capture) -> None:
        super().__init__()
        self.seen = seen
        self.grids: list[tuple[int, int]] = []  # output sizes of convolutions
        self.frames: list[int] = []  # of convolutions over time
        self.rows: list[tuple[int, int]] = []  # (tokens, width) of the inputs of linear layers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.seen.seen == 0 and func in (F.conv2d, F.conv3d):
            self.grids.append((out.shape[-2], out.shape[-1]))
            self.frames += [out.shape[-3]] if func is F.conv3d else []
        elif self.seen.seen == 0 and func is F.linear and out.ndim == 3:
            tokens = linear_parts(*args, **(kwargs or {}))[0]
            self.rows.append((tokens.shape[1], tokens.shape[2]))
        return out


class MemoryUse(TorchFunctionMode):
    """Count the bytes of all intermediate results."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.largest = 0, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made += out.nbytes
            self.largest = max(self.largest, out.nbytes)
        return out


class Survey(ExitStack):
    """A context that takes the measurements of the layout run over `images` images."""

    def __init__(self, names: ModuleNames, images: int) -> None:
        super().__init__()
        self.names = names
        self.seen = Surveyed(self, names, images)
        self.entered = Entries(images)
        self.cut = Patches(self.seen)
        self.memory = MemoryUse()
        self.projections = Projections(names)
        self.mixed: list[str] = []  # modules that change A between softmax and A·V, to something that is no A
        self.linear: list[tuple[str, list[Tensor]]] = []  # modules that multiply three tensors without a softmax
        self.sampled: list[tuple[str, Tensor]] = []  # modules that sample points of a grid, and where
        self.entries: list[Met | None] = []  # of each attention
        self.recent: list[list[Met]] = []  # all that each attention may read
        self.ways: list[Met | None] = []  # of each attention, and of each whose softmax is changed
        self.events = ModuleEvents(names, lambda: self.entered.counts)

    def __enter__(self) -> Survey:
        super().__enter__()
        self.enter_context(self.events)
        for mode in (self.projections, self.seen, self.entered, self.cut, self.memory):
            self.enter_context(mode)
        return self

    @property
    def calls(self) -> list[Attention]:
        return self.seen.calls

    @property
    def classifier(self) -> tuple[Tensor, Tensor] | None:
        """Input and output of the last linear layer."""
        return self.seen.linear


class Surveyed(Capture):
    """A capture that reports what it records to the survey."""

    def __init__(self, survey: Survey, names: ModuleNames, images: int) -> None:
        super().__init__(names, images)
        self.survey = survey

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.grid_sample:
            grid = args[1] if len(args) > 1 else (kwargs or {})["grid"]
            self.survey.sampled.append((caller(self.names), grid))
        return super().__torch_function__(func, types, args, kwargs)

    def see_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        factors = operands(func, args, kwargs)
        of_products = [getattr(one, FACTORS, None) for one in factors]
        for number, pair in enumerate(of_products):
            whole = [*(pair or ()), *(one for i, one in enumerate(factors) if i != number)]
            soft = any(soft_of(one) is not None for one in (*factors, *whole))
            if pair is not None and not soft and all(map(is_activation, whole)):
                self.survey.linear.append((caller(self.names), whole))
        return super().see_product(func, args, kwargs, out)

    def keep(self, call: Attention) -> None:
        super().keep(call)
        self.survey.memory.made += (
            4 * call.node.nbytes
        )  # with Q, K and V, which nn.MultiheadAttention computes internally
        b, heads, n, m = call.shape
        windows = b != self.images or call.node.ndim > 4
        width = call.v.shape[-1]  # the number of tokens, where channels attend to channels
        met = self.survey.entered.before(heads, width, () if windows else (n, m, width))
        self.survey.events.attended(call)
        self.survey.entries.append(met)
        self.survey.recent.append(self.survey.entered.latest)
        self.survey.ways.append(met)

    def put_together(self, parts: list[Tensor], out: Tensor) -> None:
        before = len(self.calls)
        super().put_together(parts, out)
        count = before - len(self.calls) + 1
        if count > 1:
            for listed in (self.survey.entries, self.survey.ways):
                listed[-count:] = [next((met for met in listed[-count:] if met is not None), None)]
            self.survey.recent[-count:] = [self.survey.recent[-count]]

    def mix(self, module: str, heads: int, width: int) -> None:
        self.survey.mixed.append(module)
        self.survey.ways.append(self.survey.entered.before(heads, width))
