"""Where gradients begin: at the tokens that enter a layer (`CutAt`), also where a model freezes parts (`Unfrozen`).

`NotedAt` notes these tokens in a run whose gradients go on to the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.capture.attention import same
from vitreous.capture.capture import BATCH_NORM, NORMS, Capture, linear_parts, normalised
from vitreous.errors import Unsupported

Entry = tuple[str, int]  # ("norm", n): the result of the n-th norm; ("linear", n): what the n-th linear layer reads


class Unfrozen(TorchFunctionMode):
    """Also differentiate parts of a model that its forward computes under `torch.no_grad` (frozen parts).

    `needed`: whether the model has had such a part so far, or a batch norm, whose backward is mended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            self.needed = True
            return None
        if func in BATCH_NORM:
            self.needed = True
            return normalised(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class AtEntries(TorchFunctionMode):
    """Count the norm and linear calls of a forward pass; `met` may replace the tokens of each."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = {"norm": 0, "linear": 0}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            tokens, weight, bias = linear_parts(*args, **(kwargs or {}))
            return F.linear(self._enter("linear", tokens), weight, bias)
        out = func(*args, **(kwargs or {}))
        return self._enter("norm", out) if func in NORMS else out

    def _enter(self, kind: str, tokens: Tensor) -> Tensor:
        self._counts[kind] += 1
        return self.met((kind, self._counts[kind]), tokens)

    def met(self, entry: Entry, tokens: Tensor) -> Tensor:
        """The tokens to continue with."""
        return tokens

    @property
    def counts(self) -> dict[str, int]:
        """How many norms and linear layers were called so far."""
        return dict(self._counts)


class CutAt(AtEntries):
    """Let gradients begin at an entry; everything before it is constant and not recorded by `seen`.

    `leaf` is the tensor to differentiate with respect to. `edit` may change the tokens first. `flat`: they are [N D],
    and the leaf is [1 N D].
    """

    def __init__(
        self, entry: Entry, seen: Capture, edit: Callable[[Tensor], Tensor] = same, flat: bool = False
    ) -> None:
        super().__init__()
        self.entry, self.seen, self.edit, self.flat = entry, seen, edit, flat
        self.leaf: Tensor | None = None
        self._given: Tensor | None = None  # the leaf in the model's own axes
        self._tokens: Tensor | None = None  # the tokens that the leaf replaces
        seen.recording = False

    @property
    def further(self) -> int:
        """How long to watch: until the attention ends or, if others may read the same tokens, the next one begins."""
        return 1 if self.entry[0] == "norm" else 2

    def count_from(self, counts: Mapping[str, int]) -> None:
        """Begin with these counts, where the first functions are not seen."""
        self._counts = dict(counts)

    def from_here(self) -> Callable[[Capture], CutAt]:
        """What makes the same for another recording that begins now; it holds nothing of this one."""
        entry, flat, counts = self.entry, self.flat, dict(self._counts)

        def make(seen: Capture) -> CutAt:
            made = CutAt(entry, seen, flat=flat)
            made._counts = dict(counts)
            return made

        return make

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            return None  # as in Unfrozen
        if func in BATCH_NORM:
            return normalised(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def met(self, entry: Entry, tokens: Tensor) -> Tensor:
        if entry == self.entry:
            torch.set_grad_enabled(True)
            own = tokens.detach()[None] if self.flat else tokens.detach()
            self._tokens, self.leaf = tokens, self.edit(own).detach().requires_grad_()
            if self.flat and len(self.leaf) != 1:
                raise Unsupported("the model has no axis of images in its tokens, so that it takes those of one image")
            self._given = self.leaf[0] if self.flat else self.leaf
            self.seen.recording = True
        return self._given if self._given is not None and tokens is self._tokens else tokens


class NotedAt(CutAt):
    """Note the tokens at an entry as `leaf`; gradients also go on to what is before them, and all is recorded."""

    def __enter__(self) -> NotedAt:
        self.seen.recording = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def met(self, entry: Entry, tokens: Tensor) -> Tensor:
        if entry == self.entry:
            self._tokens = tokens
            self.leaf = self._given = tokens.view_as(tokens)  # apart from what else reads the same tokens
        return self._given if self._given is not None and tokens is self._tokens else tokens
