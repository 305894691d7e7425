"""What the layout run measures besides attention, each by a mode of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import Attention
from vitreous.capture.capture import Capture
from vitreous.capture.entries import Entries, Met
from vitreous.capture.functions import linear_parts
from vitreous.capture.projections import Projections


class Patches(TorchFunctionMode):
    """Note what may have cut the patches: convolutions, and linear layers over rows of pixels."""

    def __init__(self, seen: Capture) -> None:
        super().__init__()
        self.seen = seen
        self.grids: list[tuple[int, int]] = []  # output sizes of convolutions
        self.rows: list[tuple[int, int]] = []  # (tokens, width) of what linear layers read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.seen.seen == 0 and func is F.conv2d:
            self.grids.append((out.shape[-2], out.shape[-1]))
        elif self.seen.seen == 0 and func is F.linear and out.ndim == 3:
            tokens = linear_parts(*args, **(kwargs or {}))[0]
            self.rows.append((tokens.shape[1], tokens.shape[2]))
        return out


class MemoryUse(TorchFunctionMode):
    """Count the bytes of everything that is computed."""

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
    """A context in which one run over `images` images is measured for its layout."""

    def __init__(self, names: Mapping[int, str], images: int) -> None:
        super().__init__()
        self.names = names
        self.seen = Surveyed(self, names, images)
        self.entered = Entries(images)
        self.cut = Patches(self.seen)
        self.memory = MemoryUse()
        self.projections = Projections(names)
        self.mixed: list[str] = []  # modules that change A between softmax and A·V
        self.entries: list[Met | None] = []  # of each attention
        self.ways: list[Met | None] = []  # of each attention and of each that is changed on the way

    def __enter__(self) -> Survey:
        super().__enter__()
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
    """A capture that tells the survey what it sees."""

    def __init__(self, survey: Survey, names: Mapping[int, str], images: int) -> None:
        super().__init__(names, images)
        self.survey = survey

    def keep(self, call: Attention) -> None:
        super().keep(call)
        self.survey.memory.made += (
            4 * call.node.nbytes
        )  # with Q, K and V, which nn.MultiheadAttention makes out of sight
        met = self.survey.entered.before(call.shape[1], call.v.shape[-1])
        self.survey.entries.append(met)
        self.survey.ways.append(met)

    def mix(self, module: str, heads: int, width: int) -> None:
        self.survey.mixed.append(module)
        self.survey.ways.append(self.survey.entered.before(heads, width))
