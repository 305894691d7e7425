"""`vitreous doctor`: what it finds, what it says of broken installations, and how a crash is reported."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Run

from vitreous import METHODS, METRICS
from vitreous.cli import health
from vitreous.registry import MethodWarning
from vitreous.version import VERSION


def test_it_tells_versions_devices_and_packages(run: Run) -> None:
    found = json.loads(run("doctor", "--json").out)
    assert (found["vitreous"], found["methods"], found["metrics"]) == (VERSION, len(METHODS), len(METRICS))
    versions = {one["name"]: one["version"] for one in found["packages"]}
    assert versions["torch"] == metadata.version("torch")
    assert versions["safetensors"] == metadata.version("safetensors")
    assert found["devices"][0]["name"] == "cpu"
    assert found["problems"] == []


def test_every_declared_package_is_looked_at() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]
    lines = declared["dependencies"] + [
        one for extra in health.USERS for one in declared["optional-dependencies"][extra]
    ]
    names = {line.split(">")[0].replace("_", "-").lower() for line in lines}
    assert names <= {name for name, _, _ in health.required()}


def test_missing_old_and_broken_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install 'vitreous[hf]'" in str(health.look(("no-such-package", "", "hf")).problem)
    assert not health.look(("no-such-package", "", "hf")).bad, "an extra may be missing"
    assert health.look(("no-such-package", "", None)).bad
    assert (
        health.look(("numpy", ">=99", None)).problem
        == f"{metadata.version('numpy')} is too old: pip install 'numpy>=99'"
    )

    def broken(name: str) -> None:
        raise OSError("libtorch.so: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "cannot be imported (OSError: libtorch.so: undefined symbol)" in str(
        health.look(("numpy", "", "ray")).problem
    )
    assert health.look(("numpy", "", "ray")).bad, "what is installed must work"


def test_a_device_that_computes_something_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    real = health.check

    def check(device: str, usual: Any) -> Any:
        if device == "cuda:0":  # the CPU's work with another CPU map to hold against
            return real("cpu", 2 * usual)
        return real("no-device" if device == "cuda:1" else device, usual)

    monkeypatch.setattr(health, "check", check)
    said = run("doctor")
    assert said.code == 1
    assert "to fix: cuda:0: the embedded model's map differs from the CPU's" in said.out
    assert "cuda:1: Some GPU, 80 GiB" in said.out
    assert "to fix: cuda:1: the embedded model does not run (" in said.out


def test_plugins_that_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(dict[str, int]):
        def __len__(self) -> int:
            warnings.warn("mine does not load", MethodWarning, stacklevel=1)
            return 3

    monkeypatch.setattr("vitreous.registry.METHODS", Loud())
    assert health.registered() == ((3, len(METRICS)), ("mine does not load",))


def test_the_last_line_of_a_crash() -> None:
    said = health.one_line()
    assert said.startswith(f"vitreous {VERSION} · Python 3.")
    assert f"torch {metadata.version('torch')}" in said and said.endswith(sys.platform)
