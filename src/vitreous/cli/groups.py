"""Groups of options: a command takes a dataclass as one parameter, and Typer sees its fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer in which each parameter that is a group of options is replaced by these options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    seen: list[inspect.Parameter] = []
    for given in inspect.signature(command).parameters.values():
        if given.name in groups:
            seen += fields_of(groups[given.name])
        else:
            seen.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[given.name]))

    @wraps(command)
    def run(**options: Any) -> None:
        made = {name: kind(**{f.name: options.pop(f.name) for f in fields_of(kind)}) for name, kind in groups.items()}
        command(**options, **made)

    run.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in seen}
    return run


def fields_of(group: Any) -> Iterator[inspect.Parameter]:
    """The options of a group as parameters that Typer reads."""
    hints: Mapping[str, Any] = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        usual = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, usual, default=field.default, annotation=hints[field.name])
