"""The contents of a problem report: versions, devices, installed packages, and whether the embedded model works."""

from __future__ import annotations

import importlib
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from typing import Any

from vitreous._support import cpu
from vitreous.errors import explained
from vitreous.version import VERSION

IMPORTED = {"pillow": "PIL", "open-clip-torch": "open_clip"}  # where it is not the package's own name
USERS = ("hf", "clip", "web", "ray", "tiff")  # the extras that users install
CLOSE = 1e-3  # how far a device's map may differ from the CPU's, relative to its largest value


@dataclass(frozen=True)
class Package:
    """One package that vitreous depends on."""

    name: str
    wanted: str  # ">=2.6"; empty if any version will do
    extra: str | None  # None: always required
    version: str | None  # None: not installed
    problem: str | None = None

    @property
    def bad(self) -> bool:
        """Whether the package has a problem that must be fixed."""
        return self.problem is not None and (self.extra is None or self.version is not None)


@dataclass(frozen=True)
class Device:
    """A device, and whether the embedded model runs on it."""

    name: str  # as --device takes it
    told: str
    problem: str | None = None


@dataclass(frozen=True)
class Health:
    """The whole report."""

    vitreous: str
    python: str
    system: str
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    methods: int
    metrics: int
    plugins: tuple[str, ...]  # warnings raised while plugins were loaded

    @property
    def problems(self) -> list[str]:
        """The problems that must be fixed, one line each."""
        packages = [f"{one.name}: {one.problem}" for one in self.packages if one.bad]
        devices = [f"{one.name}: {one.problem}" for one in self.devices if one.problem]
        return [*packages, *devices, *self.plugins]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems}


def examine() -> Health:
    """Collect the report; problems are reported, never raised."""
    packages = tuple(map(look, required()))
    count, plugins = registered()
    return Health(
        vitreous=VERSION,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        packages=packages,
        devices=tuple(devices()),
        methods=count[0],
        metrics=count[1],
        plugins=plugins,
    )


# ------------------------------------------------------------------------------------------------------------ packages


def required() -> list[tuple[str, str, str | None]]:
    """Name, versions and extra of each package, as pyproject.toml declares them."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = [Requirement(line) for line in metadata.requires("vitreous") or ()]
    core = [(canonicalize_name(one.name), str(one.specifier), None) for one in found if one.marker is None]
    extras = [
        (canonicalize_name(one.name), str(one.specifier), extra)
        for extra in USERS
        for one in found
        if one.marker is not None and one.name != "vitreous" and one.marker.evaluate({"extra": extra})
    ]
    return [*core, *extras]


def look(wanted: tuple[str, str, str | None]) -> Package:
    """Check that a package is installed, recent enough and importable."""
    from packaging.specifiers import SpecifierSet

    name, versions, extra = wanted
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        hint = "pip install " + (f"'vitreous[{extra}]'" if extra else name)
        return Package(name, versions, extra, None, f"not installed: {hint}")
    problem = None
    if not SpecifierSet(versions).contains(version, prereleases=True):
        problem = f"{version} is too old: pip install '{name}{versions}'"
    else:
        try:
            importlib.import_module(IMPORTED.get(name, name.replace("-", "_")))
        except Exception as error:  # a broken installation may raise anything
            problem = f"cannot be imported ({explained(error)}); reinstall it"
    return Package(name, versions, extra, version, problem)


# ------------------------------------------------------------------------------------------------------------- devices


def devices() -> Iterator[Device]:
    """The CPU and each accelerator, tested with a map of the embedded model."""
    import torch

    usual, problem = check("cpu", None)
    yield Device("cpu", f"{torch.get_num_threads()} threads{about_amx()}", problem)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        told = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda or 'none'}"
        yield Device(f"cuda:{index}", told, check(f"cuda:{index}", usual)[1])
    if torch.backends.mps.is_available():
        yield Device("mps", "Apple GPU", check("mps", usual)[1])


def about_amx() -> str:
    """A notice if the CPU reports AMX but does not allow it; otherwise empty."""
    if not cpu.amx_crashes():
        return ""
    return (
        f", reports AMX but does not allow it: bfloat16 products crash without {cpu.REMEDY}; "
        f"the vitreous command sets it, your own programs need: export {cpu.REMEDY}"
    )


def check(device: str, usual: Any) -> tuple[Any, str | None]:
    """A map of the packaged image, verified against the layers' outputs and the CPU's map; or a problem."""
    from vitreous import api
    from vitreous.models import load as sources
    from vitreous.trace.trace import Trace

    try:
        photo = resources.files("vitreous") / "assets" / "photos" / "cat.jpg"
        with resources.as_file(photo) as path:
            trace = Trace(sources.load(device=device), str(path))
            for layer in trace.attention:
                layer.verify()
            map = api.explain(trace.model, trace, "cdam").map.cpu()
    except Exception as error:  # any failure belongs in the report
        return None, f"the embedded model does not run ({explained(error)})"
    if usual is not None and (map - usual).abs().max() > CLOSE * usual.abs().max():
        return map, "the embedded model's map differs from the CPU's"
    return map, None


# ------------------------------------------------------------------------------------------------------------- plugins


def registered() -> tuple[tuple[int, int], tuple[str, ...]]:
    """The number of methods and metrics, and the warnings raised while they were loaded."""
    from vitreous.registry import METHODS, METRICS

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = len(METHODS), len(METRICS)
    return count, tuple(" ".join(str(one.message).split()) for one in said)


def one_line() -> str:
    """The most important versions on one line, without importing anything; printed after a crash."""
    parts = [f"vitreous {VERSION}", f"Python {platform.python_version()}"]
    for name in ("torch", "timm", "transformers"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return " · ".join([*parts, sys.platform])
