"""The registries of methods and metrics: `@method` and `@metric` derive the options from a function's signature.

The command line, the web page, the docs and the validation all read this one declaration; declaration.py lists what
can be declared. Other packages add methods and metrics through the entry-point groups `vitreous.methods` and
`vitreous.metrics`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

from vitreous.declaration import Better as Better
from vitreous.declaration import ByOptions as ByOptions
from vitreous.declaration import ConfiguredMethod as ConfiguredMethod
from vitreous.declaration import Declared as Declared
from vitreous.declaration import Method as Method
from vitreous.declaration import Metric as Metric
from vitreous.declaration import Named as Named
from vitreous.declaration import Noted as Noted
from vitreous.errors import OptionError, VitreousError, nearest, one_line


class MethodWarning(UserWarning):
    """A method or metric of another package cannot be used; all others can."""


D = TypeVar("D", bound=Declared)


class Registry(Mapping[str, D], Generic[D]):
    """All methods (or metrics) by name: first those of vitreous, then those of third-party entry points."""

    def __init__(self, kind: Literal["method", "metric"]) -> None:
        self.kind = kind
        self._known: dict[str, D] = {}
        self._lock = threading.RLock()
        self._state: Literal["empty", "filling", "complete"] = "empty"

    def add(self, new: D) -> None:
        old = self._known.get(new.name)
        if old is not None and old.run.__module__ != new.run.__module__:
            said = f"two {self.kind}s are named {new.name!r}: in {old.run.__module__} and in {new.run.__module__}"
            if not new.run.__module__.startswith(f"vitreous.{self.kind}s."):
                raise VitreousError(f"{said}; rename yours")
            warnings.warn(f"{said}; the latter is used", MethodWarning, stacklevel=3)
        self._known[new.name] = new

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Remove everything declared within this context when it ends; meant for tests.

        with vitreous.METHODS.temporary():
            ...  # declare a method with @vitreous.method, and use it

        What was registered before stays registered. All threads share one registry, so declarations of other threads
        made meanwhile are removed too. A module imported within the context stays imported; importing it again
        declares nothing.
        """
        self._fill()
        before = dict(self._known)
        try:
            yield
        finally:
            self._known = before  # one assignment: other threads see the old or the new state, nothing in between

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
            if self._state != "empty":  # a module that is being imported uses the registry
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
    """Load the entry points of other packages; warn about those that fail."""
    for point in entry_points(group=f"vitreous.{kind}s"):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else point.value
            said = f"the {kind} {point.name!r} of {package} does not load: {one_line(error)}"
            warnings.warn(said, MethodWarning, stacklevel=2)


METHODS: Registry[Method] = Registry("method")
METRICS: Registry[Metric] = Registry("metric")


class Family(ModuleType):
    """A family's package that shares its name with one of its methods; calling it configures that method."""

    def __call__(self, **options: Any) -> ConfiguredMethod:
        return METHODS[self.__name__.rpartition(".")[2]].configured(**options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(METHODS[self.__name__.rpartition(".")[2]].configured)


def method(
    *,
    cite: str = "",
    family: str = "",
    signed: ByOptions = False,
    targeted: bool = False,
    attention: bool = False,
    tokens: bool = False,
    blocks: bool = False,
    joins: bool = False,
    stages: bool = False,
    decodes: bool = False,
    level: bool = False,
    alone: bool = False,
    costly: bool = False,
    several: ByOptions = False,
    graph: Named = "",
    replays: ByOptions = False,
    quick: bool = False,
    default: int = 0,
    tried: Sequence[Mapping[str, Any]] = (),
    cheap: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function `(trace, target, *, options) -> map` as a method; see `Method` for the traits."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        check_signature(run, "method", ("trace", "target"))
        METHODS.add(
            Method(
                run.__name__,
                family or folder_of(run),
                cite,
                run,
                signed=signed,
                targeted=targeted,
                attention=attention,
                tokens=tokens,
                blocks=blocks,
                joins=joins,
                stages=stages,
                decodes=decodes,
                level=level,
                alone=alone,
                costly=costly,
                several=several,
                graph=graph,
                replays=replays,
                quick=quick,
                default=default,
                tried=tuple(tried),
                cheap=dict(cheap or {}),
            )
        )
        return run

    return declare


def metric(
    *,
    better: Better | Callable[[Mapping[str, Any]], Better],
    cite: str = "",
    masks: bool = False,
    again: bool = False,
    others: bool = False,
    family: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function `(case, *, options) -> Measured` as a metric."""

    def declare(run: Callable[..., Any]) -> Callable[..., Any]:
        check_signature(run, "metric", ("case",))
        METRICS.add(Metric(run.__name__, family or folder_of(run), cite, run, better, masks, again, others))
        return run

    return declare


def folder_of(run: Callable[..., Any]) -> str:
    return run.__module__.split(".")[-2 if "." in run.__module__ else -1]


def check_signature(run: Callable[..., Any], kind: str, given: tuple[str, ...]) -> None:
    """Raise unless the signature is `(*given, *, options)` and each option has a type and a default."""
    parameters = list(inspect.signature(run).parameters.values())
    told, taken = f"{run.__module__}.{run.__name__}", ", ".join(given)
    if len(parameters) < len(given) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters[: len(given)]):
        raise VitreousError(f"{told}: the signature of a {kind} is ({taken}, *, options)")
    for p in parameters[len(given) :]:
        if p.kind is not p.KEYWORD_ONLY:
            raise VitreousError(f"{told}: the option {p.name} must be keyword-only: ({taken}, *, {p.name})")
        if p.default is p.empty or p.annotation is p.empty:
            raise VitreousError(f"{told}: the option {p.name} needs a type annotation and a default")
