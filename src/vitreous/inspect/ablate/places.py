"""Where a forward pass is changed: the outputs of attention heads, of MLPs, or the updates of whole layers.

heads    O_h = A_h·V_h of each attention head, before the output projection
mlps     what an MLP adds to the residual stream
layers   what a block changes in it: its output less its input
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from vitreous.capture.attention import Attention, same
from vitreous.errors import Unsupported
from vitreous.models.output import Form
from vitreous.trace.run import Run
from vitreous.trace.trace import Trace

Values = Float[Tensor, "B parts *rest"]  # of one layer
Edit = Callable[[int, Tensor], Tensor | None]  # a layer and its values to other values; None: the same


class Places(ABC):
    """The parts of every layer that can be ablated, numbered within their layer."""

    what: ClassVar[str]  # as in the command
    one: ClassVar[str]  # of them

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.parts: tuple[int, ...] = self.count()  # of each layer
        self.notes: list[str] = []

    @abstractmethod
    def count(self) -> tuple[int, ...]:
        """How many parts each layer has; raise if they cannot be ablated."""

    @abstractmethod
    def edited(self, how: Run, edit: Edit, rows: int, only: int | None = None) -> Run:
        """The run in which `edit` is shown the values of every layer, or of one, and may replace them.

        `rows`: how many images the run has there.
        """

    @property
    def all(self) -> list[tuple[int, int]]:
        """(layer, part) of each."""
        return [(layer, part) for layer, count in enumerate(self.parts) for part in range(count)]

    @property
    def names(self) -> list[str]:
        """3.1 is head 1 of layer 3; 3 is its MLP, or the layer."""
        return [f"{layer}.{part}" if self.what == "heads" else str(layer) for layer, part in self.all]


class Heads(Places):
    """The output of each attention head, [B H W n d]: windows W, one where all tokens attend to all; queries n."""

    what, one = "heads", "head"

    def count(self) -> tuple[int, ...]:
        trace = self.trace
        refuse_other_forms(trace)
        calls = trace.whole().layers
        if not calls:
            why = trace.layout.obstacle or "computes no attention between tokens"
            raise Unsupported(f"{trace.model.name} {why}, so that it has no heads to ablate. Try ablating its layers.")
        if trace.layout.flat or any(call.parts > 1 for call in calls):
            said = "computes its attention for parts of a packed sequence, each by a call of its own"
            raise Unsupported(f"{trace.model.name} {said}, so that no head can be ablated. Try a model of one image.")
        self.numbers = {call.number: layer for layer, call in enumerate(calls)}
        return tuple(call.shape[1] for call in calls)

    @property
    def mixed(self) -> bool:
        """Whether heads are mixed between their softmax and their values."""
        return any(call.mixed for call in self.trace.whole().layers)

    def edited(self, how: Run, edit: Edit, rows: int, only: int | None = None) -> Run:
        def change(call: Attention) -> Tensor | None:
            layer = self.numbers.get(call.number)
            if layer is None or only not in (None, layer):
                return None
            own = self.trace.layout.arranged(call, rows)
            out = own.out  # [B·W H n d]
            found = edit(layer, out.reshape(rows, -1, *out.shape[1:]).transpose(1, 2))
            return None if found is None else put_back(own, found.transpose(1, 2).flatten(0, 1))

        return replace(how, change=change, narrow=None)


def put_back(call: Attention, heads: Tensor) -> Tensor:
    """Outputs of heads [B H N d] in the model's own axes."""
    heads = heads.to(call.node.dtype)
    if call.fold is same:
        return heads
    places = torch.arange(call.node.numel(), device=heads.device).view(call.node.shape)
    index = call.fold(places)
    flat = call.node.flatten().scatter(0, index.flatten(), heads.reshape(index.shape).flatten())
    return flat.view(call.node.shape)


def refuse_other_forms(trace: Trace) -> None:
    """Raise for outputs that do not belong to an image as a whole."""
    model = trace.model
    if model.form is not Form.VECTOR:
        said = f"{model.name} returns {model.form.value}"
        raise Unsupported(f"ablate compares the answers for whole images; {said}. Try vitreous explain on it.")


# ------------------------------------------------------------------------------------------------------------- contexts


def also(how: Run, context: Callable[[], AbstractContextManager[Any]]) -> Run:
    """The same run inside one context more."""
    outer = how.within

    @contextmanager
    def both() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(outer())
            stack.enter_context(context())
            yield

    return how.inside(both)
