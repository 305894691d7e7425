"""Run a model in float32 on values that are exact: every tensor knows its value in float64.

Each function is called twice, on float64 values without a graph and on float32 values with graph and rules. The
float32 result then takes the values of the other, rounded. So a backward pass works in float32, but with numbers that
carry no error of the forward pass.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from vitreous.trace.rules.cast import Cast
from vitreous.trace.rules.mode import SHAPE, Function, carries, constant, spelled, tensors_in, words

EXACT = "_vitreous_exact"  # attribute of a tensor: its value in float64, or in the precision of a parameter
MOVES = SHAPE - words("scatter_add index_add fold")  # functions that move numbers without changing them
ONCE = words("requires_grad retain_grad register_hook grad_fn grad backward set")


class Exact(Cast):
    """Compute everything in float32 and in float64; `lost` if a signal came without its value in float64."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.lost = False
        self._known: list[ReferenceType[Tensor]] = []

    def __exit__(self, *error: Any) -> None:
        """Release the float64 values, which a backward pass does not need."""
        for known in self._known:
            t = known()
            if t is not None and hasattr(t, EXACT):
                delattr(t, EXACT)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, _, inplace = spelled(func)
        inplace = inplace or bool(kwargs.get("inplace"))
        read = list(tensors_in((*args, *kwargs.values())))
        self.lost |= any(carries(constant(t)) and not hasattr(t, EXACT) for t in read)
        given = tuple(map(exact, args)), {key: exact(value) for key, value in kwargs.items()}
        out = super().__torch_function__(func, types, args, kwargs)
        made = [t for t in tensors_in((args[0] if inplace else out,)) if t.is_floating_point()]
        self._known += map(ref, made)
        self.lost |= not inplace and name not in MOVES and any(t is one for t in made for one in read)
        if name in ONCE or not made or (not inplace and all(hasattr(t, EXACT) for t in made)):
            return out
        if inplace:
            given = ((own_copy(given[0][0]), *given[0][1:]), given[1])
        with torch.no_grad():
            found = self.again(func, name, *given)
        known = [t for t in tensors_in((given[0][0] if inplace else found,)) if t.is_floating_point()]
        for t, value in zip(made, known, strict=True):
            if name not in MOVES:
                t.data.copy_(value)
            setattr(t, EXACT, value)
        return out

    def again(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function of the exact values: in their own precision if it only moves numbers, else in float64."""
        wide = Cast(torch.float64)
        kinds = {t.dtype for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()}
        if name in MOVES and len(kinds) == 1:
            wide = Cast(kinds.pop())
        return wide.__torch_function__(func, (), args, kwargs)

    def cast(self, value: Any) -> Any:
        """Parameters are cast when used, and remember what they were."""
        made = super().cast(value)
        if isinstance(value, Tensor) and made is not value and not hasattr(made, EXACT):
            setattr(made, EXACT, exact(value))
        return made


def exact(value: Any) -> Any:
    """The exact value of a tensor, or of those in a list; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(exact, value)) if type(value) in (list, tuple) else value
    if isinstance(value, Tensor) and value.is_floating_point():
        return getattr(value, EXACT, constant(value))
    return value


def own_copy(value: Tensor) -> Tensor:
    """A value in float64 that may be overwritten; a view stays one, for its base is overwritten too."""
    return value if value.dtype == torch.float64 and value._is_view() else value.to(torch.float64, copy=True)


def in_float64(func: Function, *args: Any) -> Tensor:
    """The function of exact values."""
    made: Tensor = func(*(t.double() if isinstance(t, Tensor) else t for t in map(exact, args)))
    return made


def known_as(t: Tensor, value: Tensor) -> Tensor:
    """The tensor, which now knows its exact value."""
    setattr(t, EXACT, value)
    return t
