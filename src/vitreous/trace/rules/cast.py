"""Run a model in another precision than its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitreous.trace.rules.mode import constant, words

DOWN = words("to float half bfloat16 type type_as")


class Cast(TorchFunctionMode):
    """Compute everything in one precision: parameters are cast when used, and the model's own casts are ignored."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(map(self.cast, args)), {key: self.cast(value) for key, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") in DOWN and isinstance(args[0], Tensor) and args[0].dtype == self.dtype:
            return self.moved(func, args, kwargs)
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = self.dtype
        return self.cast(func(*args, **kwargs))

    def moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ignore casts to another floating-point precision; casts to integers or to another device are kept."""
        out = func(*args, **kwargs)
        return args[0].to(out.device) if isinstance(out, Tensor) and out.is_floating_point() else out

    def cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != self.dtype:
            return constant(value).to(self.dtype)
        if type(value) in (list, tuple):
            return type(value)(map(self.cast, value))
        return value
