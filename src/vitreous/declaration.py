"""What one method or metric declares: its options and its traits; and a method with options of your choice.

name = the function      family = its folder      summary = first line of the docstring      formula = the rest
options = the keyword-only parameters with their types, bounds and help      traits = the fields of `Method`
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import pydantic

from vitreous.errors import OptionError, nearest, one_of

if TYPE_CHECKING:
    from vitreous.types import Map


Better = Literal["higher", "lower"]
ByOptions = bool | Callable[[Mapping[str, Any]], bool]  # a trait that may depend on the options
KINDS = {  # JSON's types, in words
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a word",
    "null": "null",
    "array": "a list",
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
OF_KIND = re.compile(r"_type$|_parsing$|_from_float$|_than(_equal)?$|^(literal_error|missing|too_long)$")


@dataclass(frozen=True)
class Noted:
    """A map with what else the method has to say: one value per image, by name."""

    map: Map
    notes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Declared:
    """A function with its name, its options and what it is for."""

    name: str
    family: str
    cite: str
    run: Callable[..., Any]

    @cached_property
    def doc(self) -> str:
        return inspect.getdoc(self.run) or ""

    @property
    def summary(self) -> str:
        return self.doc.split("\n\n")[0].replace("\n", " ")

    @property
    def formula(self) -> str:
        return "\n\n".join(self.doc.split("\n\n")[1:])

    @cached_property
    def options(self) -> type[pydantic.BaseModel]:
        """The keyword-only parameters as a pydantic model."""
        named = [p for p in inspect.signature(self.run).parameters.values() if p.kind is p.KEYWORD_ONLY]
        holder = type(self.name, (), {"__annotations__": {p.name: p.annotation for p in named}})
        space = inspect.unwrap(self.run).__globals__  # only the options' own types need to be known there
        hints = typing.get_type_hints(holder, globalns=space, include_extras=True)
        fields: dict[str, Any] = {p.name: (hints[p.name], p.default) for p in named}
        return pydantic.create_model(
            self.name, __config__=pydantic.ConfigDict(extra="forbid", allow_inf_nan=False), **fields
        )

    @property
    def schema(self) -> dict[str, Any]:
        """Everything a form, a page or a table needs, as JSON."""
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.summary,
            "formula": self.formula,
            "cite": self.cite,
            **self.traits(),
            "options": self.options.model_json_schema().get("properties", {}),
        }

    def traits(self) -> dict[str, Any]:
        """What else is declared."""
        return {}

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values, or one line that says which is wrong."""
        for name, value in options.items():
            if name not in self.options.model_fields:
                known = list(self.options.model_fields)
                hint = nearest(name, known) or f"; it has {', '.join(known) or 'none'}"
                raise OptionError(f"{self.name} has no option {name!r}{hint}")
            if isinstance(value, bool) and not takes_bool(self.options.model_fields[name].annotation):
                raise self.wrong(name, value)
        try:
            valid = self.options(**options)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            if not OF_KIND.search(first["type"]):  # a check of the author's own
                raise OptionError(f"{self.name}.{name}={options[name]!r}: {first['msg']}") from None
            raise self.wrong(name, options[name]) from None
        return {name: getattr(valid, name) for name in self.options.model_fields}

    def wrong(self, option: str, value: Any) -> OptionError:
        """What an option takes, and what it was given."""
        bounded = isinstance(value, int | float) and not isinstance(value, bool)
        taken = takes(self.options.model_json_schema()["properties"][option], bounded)
        return OptionError(f"{self.name}.{option} takes {taken}, not {value!r}")


def takes_bool(kind: Any) -> bool:
    """Does an option of this type take true and false?"""
    if get_origin(kind) in (typing.Union, types.UnionType):
        return any(map(takes_bool, get_args(kind)))
    return kind in (bool, Any) or (get_origin(kind) is Literal and any(isinstance(v, bool) for v in get_args(kind)))


def takes(schema: Mapping[str, Any], bounded: bool = True) -> str:
    """The values an option takes, in words: `mean, max or a whole number`."""
    return one_of(alternatives(schema, bounded))


def alternatives(schema: Mapping[str, Any], bounded: bool) -> Iterator[str]:
    if "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from alternatives(part, bounded)
    elif "enum" in schema or "const" in schema:
        yield from map(typed, schema.get("enum", [schema.get("const")]))
    elif "prefixItems" in schema:
        parts = [takes(part, bounded) for part in schema["prefixItems"]]
        yield f"{len(parts)} values ({', '.join(parts)})"
    else:
        signs = [f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if bounded and key in schema]
        yield f"{KINDS.get(schema.get('type', ''), 'a value')} {' and '.join(signs)}".strip()


def typed(value: Any) -> str:
    """A value as it is typed on the command line, behind --set."""
    if isinstance(value, list | tuple):
        return ",".join(map(typed, value))
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, eq=False)
class Method(Declared):
    """A declared method: call it with a trace, a target and options. Its traits:

    signed      its map holds evidence for and against
    targeted    its map depends on the target
    attention   it follows attention from token to token
    tokens      it reads the tokens that enter an attention, of whatever kind
    level       its values are scores, of which only the differences mean something
    alone       it takes one image at a time, so that a batch gains nothing
    costly      it runs the network many times: `advise` tries it only on demand
    several     many targets can share its way back (trace/batched_targets.py)
    replays     it never asks the GPU for a number: it can be replayed as a CUDA graph (trace/cuda_graphs.py)
    quick       it is part of a leaderboard for which no methods are named
    tried       options that are worth a try beside the defaults: `advise` measures them
    """

    signed: ByOptions = False
    targeted: bool = False
    attention: bool = False
    tokens: bool = False
    level: bool = False
    alone: bool = False
    costly: bool = False
    several: ByOptions = False
    replays: ByOptions = False
    quick: bool = False
    tried: tuple[Mapping[str, Any], ...] = ()

    def is_signed(self, options: Mapping[str, Any]) -> bool:
        """Do these options give a map with evidence for and against?"""
        return self.signed(options) if callable(self.signed) else self.signed

    def takes_several(self, options: Mapping[str, Any]) -> bool:
        """With these options, can the maps of many targets be found together?"""
        return self.several(options) if callable(self.several) else self.several

    def can_replay(self, options: Mapping[str, Any]) -> bool:
        """With these options, can it be recorded as a CUDA graph?"""
        return self.replays(options) if callable(self.replays) else self.replays

    def traits(self) -> dict[str, Any]:
        signed = self.is_signed(self.check({}))
        return {"signed": signed, "targeted": self.targeted, "attention": self.attention, "tokens": self.tokens}

    @cached_property
    def configured(self) -> Callable[..., ConfiguredMethod]:
        """The method with options of your choice, checked; this is `vitreous.methods.NAME`."""

        def configured(**options: Any) -> ConfiguredMethod:
            return ConfiguredMethod(self, self.check(options))

        fields = self.options.model_fields
        configured.__name__ = configured.__qualname__ = self.name
        configured.__doc__ = "\n".join([self.doc, "", *(f"{name}: {f.description}" for name, f in fields.items())])
        configured.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.annotation)
                for name, f in fields.items()
            ],
            return_annotation=ConfiguredMethod,
        )
        return configured


@dataclass(frozen=True, eq=False, repr=False)
class ConfiguredMethod:
    """A method with options of your choice: it is taken wherever a method's name is.

    repr   vitreous.methods.gae(start_layer=2), the Python that makes it
    str    gae --set gae.start_layer=2, what follows --method on the command line
    """

    method: Method
    values: Mapping[str, Any]  # of all options, checked

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def options(self) -> dict[str, Any]:
        """Those that differ from the defaults."""
        usual = self.method.check({})
        return {name: value for name, value in self.values.items() if value != usual[name]}

    @property
    def label(self) -> str:
        """gae start_layer=2: as it is told from the same method with other options."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfiguredMethod) and (self.name, self.values) == (other.name, other.values)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"vitreous.methods.{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    def __str__(self) -> str:
        words = [f"--set {shlex.quote(f'{self.name}.{k}={typed(v)}')}" for k, v in self.options.items()]
        return " ".join([self.name, *words])


@dataclass(frozen=True, eq=False)
class Metric(Declared):
    """A declared metric: call it with a case (metrics/case.py) and options. Its traits:

    better   which values are better
    masks    it needs to know where the object is
    again    it runs the method again, on something else
    """

    better: Better | Callable[[Mapping[str, Any]], Better]  # may depend on the options
    masks: bool = False
    again: bool = False

    def direction(self, options: Mapping[str, Any]) -> Better:
        """With these options, which values are better?"""
        return self.better(options) if callable(self.better) else self.better

    def traits(self) -> dict[str, Any]:
        return {"better": self.direction(self.check({})), "masks": self.masks, "again": self.again}
