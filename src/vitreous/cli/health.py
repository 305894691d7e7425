"""What a report of a problem needs: versions, devices, what is installed, and whether the embedded model works here."""

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
USERS = ("hf", "clip", "web", "ray")  # the extras that users install
CLOSE = 1e-3  # how far a device's map may be from the CPU's, of its largest value


@dataclass(frozen=True)
class Package:
    """One package that vitreous is made with."""

    name: str
    wanted: str  # ">=2.6"; nothing where any will do
    extra: str | None  # None: always needed
    version: str | None  # None: not installed
    problem: str | None = None

    @property
    def bad(self) -> bool:
        """Is something wrong that must be right?"""
        return self.problem is not None and (self.extra is None or self.version is not None)


@dataclass(frozen=True)
class Device:
    """Where models can run, and whether the embedded one does."""

    name: str  # as --device takes it
    told: str
    problem: str | None = None


@dataclass(frozen=True)
class Health:
    """All that was found."""

    vitreous: str
    python: str
    system: str
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    methods: int
    metrics: int
    plugins: tuple[str, ...]  # what went wrong while they were loaded

    @property
    def problems(self) -> list[str]:
        """What has to be mended, one line each."""
        packages = [f"{one.name}: {one.problem}" for one in self.packages if one.bad]
        devices = [f"{one.name}: {one.problem}" for one in self.devices if one.problem]
        return [*packages, *devices, *self.plugins]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": self.problems}


def examine() -> Health:
    """Look at everything; nothing raises, what is wrong is told."""
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
    """Is it here, new enough, and can it be imported?"""
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
            problem = f"does not import ({explained(error)}); install it anew"
    return Package(name, versions, extra, version, problem)


# ------------------------------------------------------------------------------------------------------------- devices


def devices() -> Iterator[Device]:
    """The CPU and each accelerator, with a map of the embedded model made on it."""
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
    """What a user has to know where the CPU announces AMX and forbids it; otherwise nothing."""
    if not cpu.amx_crashes():
        return ""
    return (
        f", announces AMX but forbids it: bfloat16 products crash without {cpu.REMEDY}; "
        f"the vitreous command sets it, programs of your own need: export {cpu.REMEDY}"
    )


def check(device: str, usual: Any) -> tuple[Any, str | None]:
    """A map of the packaged photo, verified against the layers' own output and the CPU's map; or what went wrong."""
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
    except Exception as error:  # whatever it is, it belongs in the report
        return None, f"the embedded model does not run ({explained(error)})"
    if usual is not None and (map - usual).abs().max() > CLOSE * usual.abs().max():
        return map, "the embedded model's map differs from the CPU's"
    return map, None


# ------------------------------------------------------------------------------------------------------------- plugins


def registered() -> tuple[tuple[int, int], tuple[str, ...]]:
    """How many methods and metrics there are, and what was said while they were loaded."""
    from vitreous.registry import METHODS, METRICS

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = len(METHODS), len(METRICS)
    return count, tuple(" ".join(str(one.message).split()) for one in said)


def one_line() -> str:
    """The versions that matter most, without importing anything: for the end of a crash."""
    parts = [f"vitreous {VERSION}", f"Python {platform.python_version()}"]
    for name in ("torch", "timm", "transformers"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return " · ".join([*parts, sys.platform])
