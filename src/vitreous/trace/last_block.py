"""Whether the last block of a model may be run for the tokens that are read alone (capture/narrowed_block.py).

No anatomy is assumed but that everything in a block except its attention treats each token alone. Whether that holds is
found out once for each model, beside the whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import widen
from vitreous.capture.narrowed_block import Fold, Linear, entering
from vitreous.errors import ModelError
from vitreous.models.layout import Layout
from vitreous.models.model import Model
from vitreous.types import Images


class Runs(Protocol):
    """What is asked of a trace: its model, its images, and runs of them in one way or another."""

    model: Model
    layout: Layout
    images: Images
    size: tuple[int, int]
    autocast: bool

    @property
    def read_tokens(self) -> list[int] | None: ...
    def run(self, *args: Any, **kwargs: Any) -> Any: ...
    def block(self, layer: int) -> nn.Module: ...


T = TypeVar("T")
R = TypeVar("R", bound=Runs)
Known = WeakKeyDictionary[nn.Module, dict[Any, T]]
_tails: Known[bool] = WeakKeyDictionary()
_folds: Known["Fold | None"] = WeakKeyDictionary()


def tails(trace: Runs) -> bool:
    """May the last block of this model be run for the tokens that are read?"""
    return known(trace, _tails, can_tail)


def can_tail(trace: Runs) -> bool:
    """Do the output and its gradient stay as they are?"""
    layout = trace.layout
    if trace.read_tokens is None or not layout.probed or len(set(layout.blocks)) != layout.layers:
        return False
    return same_run(trace, {"tail": True}, {})


def same_run(trace: Runs, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Do two ways to run a model give the same output, and the same gradient for what enters the last attention?"""
    layout = trace.layout
    image, cut = trace.images[:1], layout.layers - 1 if layout.entries else None
    outputs: list[Tensor] = []
    grads: list[Tensor] = []
    for way in (one, other):
        try:
            run = trace.run(image, cut=cut, **way)
        except (ModelError, RuntimeError, IndexError):
            return False
        assert run.output is not None
        outputs.append(run.output.detach())
        if run.entry is not None and run.output.requires_grad:
            along = torch.linspace(-1, 1, run.output.shape[1], device=image.device).to(run.output.dtype)
            grads += torch.autograd.grad([run.output], [run.entry], [along[None]])
    return near(*outputs) and (len(grads) != 2 or near(*grads))


def folds(trace: Runs) -> Fold | None:
    """How keys and values of the last block may be left out, if they may."""
    if not tails(trace) or trace.autocast or trace.model.dtype not in (torch.float32, torch.float64):
        return None  # scores of rounded products would be rounded
    return known(trace, _folds, find_fold)


def find_fold(trace: Runs) -> Fold | None:
    """The linear layers that make queries, keys and values; the output and its gradient must stay as they are."""
    image, block = trace.images[:1], trace.block(trace.layout.layers - 1)
    with Projections() as seen:
        trace.run(image, within=partial(entering, block, seen.begin))
    fold = seen.fold()
    return fold if fold is not None and same_run(trace, {"tail": True, "fold": fold}, {"tail": True}) else None


class Projections(TorchFunctionMode):
    """Notes the linear layers of a block up to its attention, and what goes into that."""

    def __init__(self) -> None:
        super().__init__()
        self.linears: list[tuple[Tensor, Linear]] = []  # each with what it reads
        self.brought: tuple[Tensor, ...] | None = None

    def begin(self, stream: Tensor) -> Tensor:
        self.linears, self.brought = [], None
        return stream

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.brought is None and func is F.linear:
            self.linears.append((args[0], (args[1], args[2] if len(args) > 2 else (kwargs or {}).get("bias"))))
        elif self.brought is None and func is F.scaled_dot_product_attention:
            self.brought = args[:3] if len(args) == 3 and (kwargs or {}).get("attn_mask") is None else ()
        return func(*args, **(kwargs or {}))

    def fold(self) -> Fold | None:
        if not self.brought or not self.linears:
            return None
        x, found = self.linears[0][0], [place for place in map(self.place, self.brought) if place is not None]
        (axis, *others) = {axis for _, _, axis in found} or {0}
        if len(found) < 3 or others or any(self.linears[call][0] is not x for call, _, _ in found):
            return None
        return Fold(tuple(call for call, _, _ in found), tuple(row for _, row, _ in found), axis)

    def place(self, brought: Tensor) -> tuple[int, int, int] | None:
        """The linear layer, and the row in it, of which these are the outputs, head by head; and the images' axis."""
        if brought.ndim != 4:
            return None
        expected = brought.transpose(1, 2).flatten(2)  # [B N H·d]
        width = expected.shape[-1]
        for call, (x, linear) in enumerate(self.linears):
            axis = 0 if x.shape[:-1] == expected.shape[:-1] else 1
            read = x.movedim(axis, 0)
            for row in range(0, len(linear[0]) - width + 1, width):
                ((weight, bias),) = Fold((0,), (row,)).parts([linear], width)
                if read.shape[:-1] == expected.shape[:-1] and near(F.linear(read, weight, bias), expected):
                    return call, row, axis
        return None


def known(trace: R, found: Known[T], find: Callable[[R], T]) -> T:
    """What was found out about a model at this image size; found out once, and again if its last block is rebuilt."""
    of_model = found.setdefault(trace.model.module, {})
    blocks = trace.layout.blocks
    built = tuple(map(type, trace.model.module.get_submodule(blocks[-1]).modules())) if blocks else ()
    key = trace.size, built
    if key not in of_model:
        of_model[key] = find(trace)
    return of_model[key]


def near(one: Tensor, other: Tensor) -> bool:
    """The same but for rounding."""
    close = 1e-4 if other.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((widen(one) - widen(other)).abs().max() <= close * widen(other).abs().max())
