"""Shared fixtures.

Shapes and types are checked at every call of the public edges of the package (EDGES); with VITREOUS_TYPES=all, as in
`make test-all`, at every call of the whole package.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from machine import FREE, forget_user

forget_user()
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one worker a core, and for its children no more either

from jaxtyping import install_import_hook

from vitreous._support.cpu import work_around_amx

AMX_NOTICE = work_around_amx()  # before anything imports torch

EDGES = ["vitreous.api", "vitreous.attribute", "vitreous.attribution", "vitreous.methods", "vitreous.metrics"]
install_import_hook("vitreous" if os.environ.get("VITREOUS_TYPES") == "all" else EDGES, "beartype.beartype")

import numpy as np
import pytest
import torch

import vitreous

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job, whose children would not hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anyone imports Triton, whose kernels then run on the CPU
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if AMX_NOTICE:
        terminalreporter.write_line(f"note: {AMX_NOTICE}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the folder of real weights, whichever fixture asks for it, and what only `make test-all` runs."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker("shared")
    thin_out(items)


def thin_out(items: list[pytest.Item], many: int = 6) -> None:
    """Of a test with many cases the quick suite runs half, of one with very many a sixth, chosen by their names.

    Of a test with several parameters each name keeps a case, so that every method, metric and model is met.
    """
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None and hasattr(item, "callspec"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for cases in groups.values():
        share = 1 if len(cases) < many else 2 if len(cases) < 3 * many else 6
        met: set[tuple[str, object]] = set()
        for item in cases:
            case: Any = item.callspec  # type: ignore[attr-defined]
            values = {(name, value) for name, value in case.params.items() if isinstance(value, str)}
            if (values <= met or len(case.params) == 1) and zlib.crc32(item.nodeid.encode()) % share:
                item.add_marker("slow")
            else:
                met |= values


SHARED = Path(os.environ.get("VITREOUS_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(autouse=True)
def steady() -> Iterator[None]:
    """The same chance and the same free memory for every test, whatever ran before it and beside it."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitreous._support.memory.free_memory", lambda device: FREE)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights, pictures and the authors' own maps, where they lie beside the checkout."""
    if not (SHARED / "oracles").is_dir():
        pytest.skip("the folder of real weights and reference maps is not beside this checkout")
    return SHARED


class Oracle:
    """The methods' authors' own maps for three photographs."""

    IMAGES = ("both", "dogbird", "pet1")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, file: str, key: str) -> np.ndarray:
        with np.load(self.folder / f"{file}.npz") as stored:
            return stored[key]

    def input(self, *names: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([self("inputs", f"{name}/any/x") for name in names or self.IMAGES]))

    def targets(self, name: str) -> list[int]:
        return self("inputs", f"{name}/any/targets").tolist()


@pytest.fixture(scope="session")
def oracle(shared: Path) -> Oracle:
    return Oracle(shared / "oracles")


@pytest.fixture(scope="session")
def deit(shared: Path) -> vitreous.Model:
    """The real DeiT-Tiny."""
    return vitreous.load("deit_tiny_patch16_224", weights=shared / "models" / "deit_tiny_patch16_224.safetensors")


@pytest.fixture(scope="session")
def tiny() -> vitreous.Model:
    """The embedded model."""
    return vitreous.load()


@pytest.fixture(scope="session")
def cat() -> Path:
    """A packaged photo."""
    return Path(vitreous.__file__).parent / "assets" / "photos" / "cat.jpg"


@dataclass
class Result:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        assert self.code == 2
        (line,) = self.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


class Run(Protocol):
    def __call__(self, *args: Any) -> Result: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`vitreous …` in this process, in an empty folder, in a terminal of 80 columns."""
    from vitreous.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*args: Any) -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["vitreous", *map(str, args)])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Result(int(ended.value.code or 0), said.out, said.err)

    return call


def off(ours: object, theirs: object) -> float:
    """max|a−b| / max|b|."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert a.shape == b.shape, f"{a.shape} for {b.shape}"
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests of the page; without one, they are skipped."""
    import pages

    with pages.browsing() as opened:
        yield opened


@pytest.fixture
def visit(browser: Any, site: str) -> Iterator[Any]:
    """Opens pages of the server that a module's fixture `site` gives."""
    import pages

    with pages.visiting(browser, site) as open_page:
        yield open_page
