"""A copy of a model whose weights may be changed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from vitreous.errors import Unsupported, one_line
from vitreous.models.model import Model


def copy_of(model: Model) -> Model:
    """The same model with a network of its own."""
    memo: dict[int, Any] = {}
    twin = copy.copy(model)
    try:
        twin.net = twin.module = copy.deepcopy(model.module, memo)
        twin._forward = copy.deepcopy(model._forward, memo)
        for each in (twin, *(new for new in memo.values() if isinstance(new, Model))):  # a probe holds a model
            each._forward = rebound(each._forward, memo)
    except Exception as error:
        raise Unsupported(
            f"{model.name} cannot be copied, so its weights cannot be changed ({one_line(error, 120)})"
        ) from error
    return twin


def rebound(forward: Callable[..., Any] | None, memo: dict[int, Any]) -> Callable[..., Any] | None:
    """A function that uses the copies of the modules that it knows by name."""
    if not isinstance(forward, types.FunctionType):
        return forward

    def other(value: Any) -> Any:
        return memo.get(id(value), value) if isinstance(value, nn.Module) else value

    space = {name: other(value) for name, value in forward.__globals__.items()}
    cells = tuple(types.CellType(other(cell.cell_contents)) for cell in forward.__closure__ or ())
    new = types.FunctionType(forward.__code__, space, forward.__name__, forward.__defaults__, cells)
    new.__kwdefaults__ = forward.__kwdefaults__
    return new
