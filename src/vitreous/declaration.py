"""The declaration of a method or metric (its options and traits), and configured methods.

name = the function's name      family = its folder      summary, formula = the docstring's first paragraph, the rest
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
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import pydantic

from vitreous.errors import OptionError, nearest, one_of

if TYPE_CHECKING:
    from vitreous.types import Map


Better = Literal["higher", "lower"]
ByOptions = bool | Callable[[Mapping[str, Any]], bool]  # a trait that may depend on the options
Named = str | Callable[[Mapping[str, Any]], str]
KINDS = {  # JSON types, as messages name them
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
    """A map with additional results by name, one value per image."""

    map: Map
    notes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Declared:
    """A declared function with its name, family, citation and options."""

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
        space = inspect.unwrap(self.run).__globals__  # must hold the types of the options only
        hints = typing.get_type_hints(holder, globalns=space, include_extras=True)
        fields: dict[str, Any] = {p.name: (hints[p.name], p.default) for p in named}
        return pydantic.create_model(
            self.name, __config__=pydantic.ConfigDict(extra="forbid", allow_inf_nan=False), **fields
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The whole declaration as JSON, for forms, pages and tables."""
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
        """The declared traits, as part of the schema."""
        return {}

    def read(self, option: str, text: str) -> Any:
        """Parse the value of an option as it is typed; one that takes texts, or this very word, takes it as it is."""
        taken = self.options.model_json_schema().get("properties", {}).get(option, {})
        is_word = taken.get("type") == "string" and text in taken.get("enum", [text])
        return text if is_word else parse_value(text)

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Validate options and return all of them, defaults included; raise `OptionError` for the first wrong one."""
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
            if not OF_KIND.search(first["type"]):  # a custom validator of the method's author
                raise OptionError(f"{self.name}.{name}={options[name]!r}: {first['msg']}") from None
            raise self.wrong(name, options[name]) from None
        return {name: getattr(valid, name) for name in self.options.model_fields}

    def label(self, options: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> str:
        """gae start_layer=2: a short label that distinguishes it from the same with the `usual` options."""
        before = self.check(usual or {})
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.check(options).items() if v != before[k])])

    def wrong(self, option: str, value: Any) -> OptionError:
        """The error for a wrong value: what the option takes, and what was given."""
        bounded = isinstance(value, int | float) and not isinstance(value, bool)
        taken = takes(self.options.model_json_schema()["properties"][option], bounded)
        return OptionError(f"{self.name}.{option} takes {taken}, not {value!r}")


def takes_bool(kind: Any) -> bool:
    """Whether an option of this type takes booleans."""
    if get_origin(kind) in (typing.Union, types.UnionType):
        return any(map(takes_bool, get_args(kind)))
    return kind in (bool, Any) or (get_origin(kind) is Literal and any(isinstance(v, bool) for v in get_args(kind)))


def takes(schema: Mapping[str, Any], bounded: bool = True) -> str:
    """The values that an option takes, as text: `mean, max or a whole number`."""
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
    """A value as it is written on the command line after --set NAME.OPTION=."""
    if isinstance(value, list | tuple):
        return ",".join(map(typed, value))
    return value if isinstance(value, str) else json.dumps(value)


def parse_value(text: str) -> Any:
    """The value that was written so: a number, a list (1,2 or [1, 2]), true, false or a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    return [parse_value(part.strip()) for part in text.split(",")] if "," in text else text


@dataclass(frozen=True, eq=False)
class Method(Declared):
    """A declared method: a function of a trace, a target and options. Its traits:

    signed      the map holds evidence for and against the target
    targeted    the map depends on the target
    attention   the method needs the attention between tokens
    tokens      the method needs the tokens that enter an attention layer of any kind
    blocks      the method needs blocks that are modules and pass tokens of one grid on, which shows when it runs
    joins       the method also follows tokens that are read after several layers, not only after the last
    stages      the method also follows attention through windows, pooled keys and merged patches (models/stages.py)
    decodes     the method also follows the queries of a decoder, which read the tokens
    level       the values are scores, of which only differences are meaningful
    alone       the method processes one image at a time, so batches bring no speed-up
    costly      the method needs many forward passes; `advise` tries it only on request
    several     several targets can share one backward pass (trace/batched_targets.py)
    graph       the differentiable forward pass that the method reads: "model" (the model's own gradient) or a table of
                rules; "" if it makes its own. Methods with the same one share it (trace/shared.py)
    replays     the method never synchronises with the GPU, so it can be a CUDA graph (trace/cuda_graphs.py)
    quick       the method is part of the default leaderboard
    default     the place of the method among those that are tried in turn where none is named; 0: it is not
    tried       options that `advise` measures besides the defaults
    cheap       options with which the method costs little, for `check`, which only asks whether it works
    """

    signed: ByOptions = False
    targeted: bool = False
    attention: bool = False
    tokens: bool = False
    blocks: bool = False
    joins: bool = False
    stages: bool = False
    decodes: bool = False
    level: bool = False
    alone: bool = False
    costly: bool = False
    several: ByOptions = False
    graph: Named = ""
    replays: ByOptions = False
    quick: bool = False
    default: int = 0
    tried: tuple[Mapping[str, Any], ...] = ()
    cheap: Mapping[str, Any] = field(default_factory=dict)

    def is_signed(self, options: Mapping[str, Any]) -> bool:
        """Whether the map is signed with these options."""
        return self.signed(options) if callable(self.signed) else self.signed

    def takes_several(self, options: Mapping[str, Any]) -> bool:
        """Whether several targets can be computed together with these options."""
        return self.several(options) if callable(self.several) else self.several

    def graph_of(self, options: Mapping[str, Any]) -> str:
        """The differentiable forward pass that the method reads with these options."""
        return self.graph(options) if callable(self.graph) else self.graph

    def can_replay(self, options: Mapping[str, Any]) -> bool:
        """Whether the method can be recorded as a CUDA graph with these options."""
        return self.replays(options) if callable(self.replays) else self.replays

    def traits(self) -> dict[str, Any]:
        signed = self.is_signed(self.check({}))
        return {"signed": signed, "targeted": self.targeted, "attention": self.attention, "tokens": self.tokens}

    @cached_property
    def configured(self) -> Callable[..., ConfiguredMethod]:
        """A function from options to a `ConfiguredMethod`; this is `vitreous.methods.NAME`."""

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
    """A method with its options; accepted wherever a method's name is.

    repr   vitreous.methods.gae(start_layer=2), the Python expression for it
    str    gae --set gae.start_layer=2, the arguments of --method on the command line
    """

    method: Method
    values: Mapping[str, Any]  # all options, validated

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        usual = self.method.check({})
        return {name: value for name, value in self.values.items() if value != usual[name]}

    @property
    def label(self) -> str:
        """gae start_layer=2: a short label that distinguishes it from the same method with other options."""
        return self.method.label(self.values)

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
    """A declared metric: a function of a case (metrics/case.py) and options. Its traits:

    better   whether higher or lower values are better
    masks    the metric needs to know where the object is
    again    the metric runs the method again, on other images, models or targets
    others   the metric needs other images of the evaluation besides those of its batch
    """

    better: Better | Callable[[Mapping[str, Any]], Better]  # may depend on the options
    masks: bool = False
    again: bool = False
    others: bool = False

    def direction(self, options: Mapping[str, Any]) -> Better:
        """Whether higher or lower values are better with these options."""
        return self.better(options) if callable(self.better) else self.better

    def traits(self) -> dict[str, Any]:
        return {"better": self.direction(self.check({})), "masks": self.masks, "again": self.again}
