"""One declaration, read by everything: `@method` and `@metric` turn a function's own signature into its options.

What can be declared is listed in declaration.py. A package of your own adds methods and metrics through the entry-point
groups `vitreous.methods`, `vitreous.metrics`.
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
from vitreous.declaration import Noted as Noted
from vitreous.errors import OptionError, VitreousError, nearest, one_line


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


class Family(ModuleType):
    """The folder of a family that has the name of one of its methods: called with options, it is that method."""

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
    level: bool = False,
    alone: bool = False,
    costly: bool = False,
    several: ByOptions = False,
    replays: ByOptions = False,
    quick: bool = False,
    tried: Sequence[Mapping[str, Any]] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function `(trace, target, *, options) -> map` as a method; `Method` says what each trait means."""

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
                level=level,
                alone=alone,
                costly=costly,
                several=several,
                replays=replays,
                quick=quick,
                tried=tuple(tried),
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
