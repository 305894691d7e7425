"""`vitreous/methods/__init__.pyi`: every method with the types of its options, for editors; from the declarations."""

from __future__ import annotations

import json
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from vitreous import METHODS
from vitreous.declaration import Method

FILE = Path(__file__).parents[2] / "src" / "vitreous" / "methods" / "__init__.pyi"
HEAD = '''"""Every method with its options, for editors and type checkers. Written by `make stub`: do not edit."""

from typing import Literal

from vitreous.declaration import ConfiguredMethod
'''
WIDTH = 113


def stub() -> str:
    """The whole file: our own methods, by family and name."""
    ours = [one for one in METHODS.values() if one.run.__module__.startswith("vitreous.")]
    return "\n".join([HEAD, *map(factory, ours)])


def factory(one: Method) -> str:
    """One method's options, and what they do."""
    fields = one.options.model_fields
    given = [f"    {name}: {spelled(field.annotation)} = {literal(field.default)},\n" for name, field in fields.items()]
    told = [f"{name}: {field.description}" for name, field in fields.items()]
    told = ["", *told, ""] if told else []
    lines = [line for part in (one.summary, *told) for line in textwrap.wrap(part, WIDTH) or [""]]
    doc = textwrap.indent('"""' + "\n".join(lines) + '"""', "    ")
    opened = f"(\n    *,\n{''.join(given)})" if given else "()"
    return f"def {one.name}{opened} -> ConfiguredMethod:\n{doc}\n"


def spelled(kind: Any) -> str:
    """A type as it is written."""
    if kind is type(None):
        return "None"
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return spelled(parts[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(literal, parts))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(spelled, parts))
    if parts:
        return f"{origin.__name__}[{', '.join('...' if part is ... else spelled(part) for part in parts)}]"
    return str(kind.__name__)


def literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    FILE.write_text(stub(), encoding="utf-8")
