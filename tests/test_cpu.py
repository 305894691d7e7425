"""CPUs that announce AMX and forbid it: the crash is found out in a child process and worked around."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitreous._support import cpu
from vitreous.cli import health

FORBIDDEN = """
import os, signal, sys
if "torch.bfloat16" in sys.orig_argv[-1]:
    with open(os.environ["CHILDREN"], "a") as log:
        print("born", file=log)
    os.kill(os.getpid(), signal.SIGILL)
"""


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose kernel lists AMX, with a cache folder of its own; returns a log of the children born."""
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name : Some Xeon\nflags : fpu sse amx_bf16 amx_tile\n\nprocessor : 1\n")
    monkeypatch.setenv("VITREOUS_CPUINFO", str(info))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CHILDREN", str(tmp_path / "children"))
    monkeypatch.delenv(cpu.SETTING, raising=False)
    return tmp_path / "children"


@pytest.fixture
def forbidden(announced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same machine, where a child that multiplies in bfloat16 dies with SIGILL."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FORBIDDEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return announced


def test_nothing_is_tried_where_amx_is_not_announced(announced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child was born"))
    for file in ("avx512_bf16 avx2", None):
        info = Path(os.environ["VITREOUS_CPUINFO"])
        info.write_text(f"flags : {file}") if file else info.unlink()
        assert cpu.work_around_amx() is None and cpu.SETTING not in os.environ
    assert health.about_amx() == ""


@pytest.mark.slow
@pytest.mark.process
def test_a_cpu_that_can_is_left_alone(announced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real child with a product that every CPU can do; the verdict is kept, so that it is asked once."""
    monkeypatch.setattr(cpu, "PRODUCT", cpu.PRODUCT.replace("bfloat16", "float32"))
    assert cpu.work_around_amx() is None
    assert cpu.SETTING not in os.environ
    (note,) = (Path(os.environ["XDG_CACHE_HOME"]) / "vitreous").iterdir()
    assert note.read_bytes() == cpu.WORKS


@pytest.mark.process
def test_a_child_that_dies_lowers_the_instructions(forbidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notice = cpu.work_around_amx()
    assert notice is not None and cpu.REMEDY in notice
    assert os.environ[cpu.SETTING] == cpu.LOWERED
    assert cpu.work_around_amx() is None, "it is said once"
    assert f"export {cpu.REMEDY}" in health.about_amx()
    monkeypatch.delenv(cpu.SETTING)
    assert cpu.work_around_amx() == notice
    assert forbidden.read_text() == "born\n", "one child in all: the verdict is kept"


def test_a_users_own_setting_is_respected(forbidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "AVX2")
    assert cpu.work_around_amx() is None
    assert os.environ[cpu.SETTING] == "AVX2" and not forbidden.exists()


@pytest.mark.process
def test_an_ordinary_error_of_the_child_is_no_verdict(announced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PRODUCT", "raise ImportError('no torch')")
    assert not cpu.amx_crashes()
    assert not (Path(os.environ["XDG_CACHE_HOME"]) / "vitreous").exists()


@pytest.mark.process
def test_an_unwritable_cache_does_not_matter(forbidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu.amx_crashes() and cpu.amx_crashes()
    assert forbidden.read_text() == "born\nborn\n"


@pytest.mark.slow
@pytest.mark.process
def test_a_command_says_so_once_and_goes_on(forbidden: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "vitreous", "methods", "gae"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and "gae" in ran.stdout
    assert ran.stderr == f"note: {cpu.NOTICE}\n"
