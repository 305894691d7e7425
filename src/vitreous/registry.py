"""One declaration, read by everything: `@method` and `@metric` turn a function's own signature into its options.

    name = the function      family = its folder      summary = first line of the docstring      formula = the rest
    options = the keyword-only parameters with their types, bounds and help

A package of your own adds methods and metrics through the entry-point groups `vitreous.methods`, `vitreous.metrics`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import pydantic

from vitreous.errors import OptionError, VitreousError, nearest, one_line

if TYPE_CHECKING:
    from vitreous.types import Map


Better = Literal["higher", "lower"]


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
        options = self.options.model_json_schema()
        return {
            "name": self.name,
            "family": self.family,
            "summary": self.summary,
            "formula": self.formula,
            "cite": self.cite,
            **self.traits(),
            "options": options.get("properties", {}),
        }

    def traits(self) -> dict[str, Any]:
        """What else is declared."""
        return {}

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values, or one line that says which is wrong."""
        for name in options:
            if name not in self.options.model_fields:
                known = list(self.options.model_fields)
                hint = nearest(name, known) or f"; it has {', '.join(known) or 'none'}"
                raise OptionError(f"{self.name} has no option {name!r}{hint}")
            kind = str(self.options.model_fields[name].annotation)
            if isinstance(options[name], bool) and "bool" not in kind and "Any" not in kind:
                raise OptionError(f"{self.name}.{name}={options[name]}: is neither true nor false")
        try:
            valid = self.options(**options)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = str(first["loc"][0]) if first["loc"] else ""
            reasons = {e["msg"] for e in error.errors() if e["loc"] and e["loc"][0] == where}
            said = " or ".join(sorted(reasons))
            raise OptionError(f"{self.name}.{where}={options.get(where)!r}: {said}") from None
        return {name: getattr(valid, name) for name in self.options.model_fields}


@dataclass(frozen=True, eq=False)
class Method(Declared):
    """A declared method: call it with a trace, a target and options."""

    signed: bool | Callable[[Mapping[str, Any]], bool]  # may depend on the options
    targeted: bool  # does the map depend on the target?
    attention: bool  # does it follow attention from token to token?
    tokens: bool = False  # does it read the tokens that enter an attention, of whatever kind?
    alone: bool = False  # does it take one image at a time, so that a batch gains nothing?
    level: bool = False  # are its values scores, of which only the differences mean something?
    several: bool | Callable[[Mapping[str, Any]], bool] = (
        False  # can many targets share its way back (trace/batched_targets.py)?
    )
    costly: bool = False  # does it run the network many times, so that `advise` tries it only on demand?

    def takes_several(self, options: Mapping[str, Any]) -> bool:
        """With these options, can the maps of many targets be found together?"""
        return self.several(options) if callable(self.several) else self.several

    def is_signed(self, options: Mapping[str, Any]) -> bool:
        """Do these options give a map with evidence for and against?"""
        return self.signed(options) if callable(self.signed) else self.signed

    def traits(self) -> dict[str, Any]:
        signed = self.is_signed(self.check({}))
        return {"signed": signed, "targeted": self.targeted, "attention": self.attention, "tokens": self.tokens}


@dataclass(frozen=True, eq=False)
class Metric(Declared):
    """A declared metric: call it with a case (metrics/case.py) and options."""

    better: Better | Callable[[Mapping[str, Any]], Better]  # may depend on the options
    masks: bool = False  # does it need to know where the object is?
    again: bool = False  # does it run the method again, on something else?

    def direction(self, options: Mapping[str, Any]) -> Better:
        """With these options, which values are better?"""
        return self.better(options) if callable(self.better) else self.better

    def traits(self) -> dict[str, Any]:
        return {"better": self.direction(self.check({})), "masks": self.masks, "again": self.again}


class MethodWarning(UserWarning):
    """Another package's method or metric cannot be used; everything else can."""


D = TypeVar("D", bound=Declared)


class Registry(Mapping[str, D], Generic[D]):
    """All methods (or metrics) by name: those of our own files first, then third-party entry points."""

    def __init__(self, kind: Literal["method", "metric"]) -> None:
        self.kind = kind
        self._known: dict[str, D] = {}
        self._lock = threading.RLock()
        self._state: Literal["empty", "filling", "complete"] = "empty"

    def add(self, new: D) -> None:
        old = self._known.get(new.name)
        if old is not None and old.run.__module__ != new.run.__module__:
            said = f"two {self.kind}s are called {new.name!r}: in {old.run.__module__} and in {new.run.__module__}"
            if not new.run.__module__.startswith(f"vitreous.{self.kind}s."):
                raise VitreousError(f"{said}; rename yours")
            warnings.warn(f"{said}; the latter is used", MethodWarning, stacklevel=3)
        self._known[new.name] = new

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """What is declared within this context is forgotten at its end; meant for tests.

        with vitreous.METHODS.temporary():
            ...  # declare a method with @vitreous.method, and use it

        Everything that was known before is known within, and again afterwards. All threads share one registry: what any
        of them declares meanwhile is forgotten too. A module that is imported within stays imported, so that a second
        import of it declares nothing.
        """
        self._fill()
        before = dict(self._known)
        try:
            yield
        finally:
            self._known = before  # at once: another thread sees either the one or the other

    def __getitem__(self, name: str) -> D:
        self._fill()
        known = self._known
        if name not in known:
            hint = nearest(name, known) or f"; see: vitreous {self.kind}s"
            raise OptionError(f"unknown {self.kind} {name!r}{hint}")
        return known[name]

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        self._fill()
        known = self._known
        return iter(sorted(known, key=lambda n: (known[n].family, n)))

    def __len__(self) -> int:
        self._fill()
        return len(self._known)

    def _fill(self) -> None:
        if self._state == "complete":
            return
        with self._lock:
            if self._state != "empty":  # a module that is being imported looks in here
                return
            self._state = "filling"
            try:
                import_own(self.kind)
                import_others(self.kind)
            except BaseException:
                self._state = "empty"
                raise
            self._state = "complete"


def import_own(kind: str) -> None:
    package = importlib.import_module(f"vitreous.{kind}s")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def import_others(kind: str) -> None:
    """Entry points of other packages; one that fails is named, the others are used."""
    for point in entry_points(group=f"vitreous.{kind}s"):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else point.value
            said = f"the {kind} {point.name!r} of {package} does not load: {one_line(error)}"
            warnings.warn(said, MethodWarning, stacklevel=2)


METHODS: Registry[Method] = Registry("method")
METRICS: Registry[Metric] = Registry("metric")


def method(
    *,
    cite: str = "",
    signed: bool | Callable[[Mapping[str, Any]], bool] = False,
    targeted: bool = False,
    attention: bool = False,
    tokens: bool = False,
    alone: bool = False,
    level: bool = False,
    several: bool | Callable[[Mapping[str, Any]], bool] = False,
    costly: bool = False,
    family: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function `(trace, target, *, options) -> map` as a method."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        check_signature(run, "method", ("trace", "target"))
        folder = family or folder_of(run)
        traits = (signed, targeted, attention, tokens, alone, level, several, costly)
        METHODS.add(Method(run.__name__, folder, cite, run, *traits))
        return run

    return declare


def metric(
    *,
    better: Better | Callable[[Mapping[str, Any]], Better],
    cite: str = "",
    masks: bool = False,
    again: bool = False,
    family: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function `(case, *, options) -> Measured` as a metric."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        check_signature(run, "metric", ("case",))
        METRICS.add(Metric(run.__name__, family or folder_of(run), cite, run, better, masks, again))
        return run

    return declare


def folder_of(run: Callable[..., Any]) -> str:
    return run.__module__.split(".")[-2 if "." in run.__module__ else -1]


def check_signature(run: Callable[..., Any], kind: str, given: tuple[str, ...]) -> None:
    """`(trace, target, *, options)` or `(case, *, options)`, each option with its type and a default."""
    parameters = list(inspect.signature(run).parameters.values())
    told, taken = f"{run.__module__}.{run.__name__}", ", ".join(given)
    if len(parameters) < len(given) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters[: len(given)]):
        raise VitreousError(f"{told}: a {kind} takes ({taken}, *, options)")
    for p in parameters[len(given) :]:
        if p.kind is not p.KEYWORD_ONLY:
            raise VitreousError(f"{told}: its option {p.name} must come after a *: ({taken}, *, {p.name})")
        if p.default is p.empty or p.annotation is p.empty:
            raise VitreousError(f"{told}: its option {p.name} needs a type and a default")
