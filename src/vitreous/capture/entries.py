"""The tokens that enter a layer: found in the layout run, and where gradients begin in later runs.

An entry is named by how it is met: the n-th "norm" call of the run gives it, or the n-th "linear" call reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import same
from vitreous.capture.capture import Capture
from vitreous.capture.functions import NORMS, linear_parts

Entry = tuple[str, int]  # ("norm", n): the result of the n-th norm; ("linear", n): what the n-th linear layer reads


class Met(NamedTuple):
    """Tokens that may enter a layer."""

    entry: Entry
    tokens: Tensor


class Unfrozen(TorchFunctionMode):
    """Differentiate also what a model computes under `torch.no_grad` in its forward (a frozen part)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))


class Entries(TorchFunctionMode):
    """Note every norm and linear call; `before` tells what entered the attention that was just seen."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images = images
        self._counts = {"norm": 0, "linear": 0}
        self._recent: list[Met] = []  # since the last attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            tokens, *weights = linear_parts(*args, **(kwargs or {}))
            return func(self.enter("linear", tokens), *weights)
        out = func(*args, **(kwargs or {}))
        return self.enter("norm", out) if func in NORMS else out

    def enter(self, kind: str, tokens: Tensor) -> Tensor:
        self._counts[kind] += 1
        self._recent.append(Met((kind, self._counts[kind]), tokens))
        return tokens

    def before(self, heads: int, width: int) -> Met | None:
        """What enters an attention: the last normalised tokens (not its queries or keys), else what was projected."""
        recent, self._recent = self._recent, []
        for kind in ("norm", "linear"):
            for met in reversed(recent):
                shape = met.tokens.shape
                of_heads = len(shape) == 4 and ((shape[-1] == width and heads > 1) or shape[1] == 1)
                if met.entry[0] == kind and len(shape) in (3, 4) and self.images in shape[:2] and not of_heads:
                    return met
        return None


class CutAt(TorchFunctionMode):
    """Gradients begin at an entry: everything before is constant, and not recorded by `seen`.

    `leaf` is the tensor to differentiate by. `edit` may change the tokens first.
    """

    def __init__(self, entry: Entry, seen: Capture, edit: Callable[[Tensor], Tensor] = same) -> None:
        super().__init__()
        self.entry, self.seen, self.edit = entry, seen, edit
        self.leaf: Tensor | None = None
        self._counts = {"norm": 0, "linear": 0}
        self._tokens: Tensor | None = None  # in whose place the leaf stands
        seen.recording = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            return None  # as in Unfrozen
        if func is F.linear:
            tokens, *weights = linear_parts(*args, **(kwargs or {}))
            return func(self.enter("linear", tokens), *weights)
        out = func(*args, **(kwargs or {}))
        return self.enter("norm", out) if func in NORMS else out

    def enter(self, kind: str, tokens: Tensor) -> Tensor:
        self._counts[kind] += 1
        if (kind, self._counts[kind]) == self.entry:
            torch.set_grad_enabled(True)
            self._tokens, self.leaf = tokens, self.edit(tokens.detach()).detach().requires_grad_()
            self.seen.recording = True
        return self.leaf if self.leaf is not None and tokens is self._tokens else tokens
