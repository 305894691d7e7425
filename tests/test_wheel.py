"""What is published: a wheel that holds everything, and that works in an environment where nothing else of us is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitreous import METHODS, METRICS
from vitreous.version import VERSION
from vitreous.web.statics import Statics

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitreous"
pytestmark = [pytest.mark.slow, pytest.mark.process]


def run(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that knows nothing of this process's modules."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    told = [str(word) for word in words]
    return subprocess.run(told, cwd=cwd, env={**plain, **environment}, capture_output=True, text=True, check=False)


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pyproject.toml asks for to build, which is fetched."""
    folder = tmp_path_factory.mktemp("tools")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    fetched = run(*PIP, "install", "--target", folder, *needed, cwd=folder)
    if fetched.returncode != 0:
        pytest.skip(f"building needs {', '.join(needed)}, which cannot be fetched here")
    return folder


@pytest.fixture(scope="module")
def wheel(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    built = run(*PIP, *build, cwd=folder, PYTHONPATH=str(tools))
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("vitreous-*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone; its dependencies are those of this one, but not our own checkout."""
    home = tmp_path_factory.mktemp("bare")
    assert run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home).returncode == 0
    installed = run(*PIP, "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", wheel, cwd=home)
    assert installed.returncode == 0, installed.stderr
    (site,) = home.glob("lib/python3*/site-packages")
    others = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(others) + "\n")  # only these folders, not what their .pth add
    return home


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        held = {name: opened.getinfo(name).file_size for name in opened.namelist()}
    ours = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {f"vitreous/{file.relative_to(PACKAGE).as_posix()}": file.stat().st_size for file in ours} == {
        name: size for name, size in held.items() if name.startswith("vitreous/")
    }
    for name in (
        "assets/vitreous_tiny.safetensors",
        "assets/imagenet1k.txt",
        "assets/photos/cat.jpg",
        "web/static/index.html",
        "web/API.md",
        "web/templates/api.html.j2",
        "evaluation/report/style.css",
        "evaluation/report/templates/page.html.j2",
        "py.typed",
    ):
        assert f"vitreous/{name}" in held, "or there is nothing to compare with"
    assert not [name for name in held if not name.startswith(("vitreous/", f"vitreous-{VERSION}.dist-info/"))]


def test_the_source_holds_what_its_commands_need(tools: Path, tmp_path: Path) -> None:
    """`make`, the tests and the site work in an unpacked sdist, and its history and rules are read there."""
    built = run(
        sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT, PYTHONPATH=str(tools)
    )
    assert built.returncode == 0, built.stderr
    (found,) = tmp_path.glob("vitreous-*.tar.gz")
    with tarfile.open(found) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    needed = {"Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "constraints.txt", "mkdocs.yml"}
    assert needed <= held
    for name in ("docs/build.py", "docs/_make/declared.py", "tests/conftest.py", "src/vitreous/web/static/take.js"):
        assert name in held


def test_it_says_who_made_it_and_names_no_address_that_does_not_exist(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        told = opened.read(f"vitreous-{VERSION}.dist-info/METADATA").decode()
    assert "\nAuthor: The vitreous authors\n" in told and "\nLicense-Expression: Apache-2.0\n" in told
    assert "\nProject-URL:" not in told and "\nHome-page:" not in told, "the project has no address yet"


def test_it_explains_a_photo_where_nothing_else_is(bare: Path, tmp_path: Path) -> None:
    where = run(bare / "bin" / "python", "-c", "import vitreous; print(vitreous.__file__)", cwd=tmp_path)
    package = Path(where.stdout.strip()).parent
    assert package.is_relative_to(bare), where.stdout + where.stderr
    ran = run(bare / "bin" / "vitreous", "explain", package / "assets/photos/cat.jpg", "--out", "out", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "" and "1 image explained by vitreous_tiny" in ran.stdout
    with Image.open(tmp_path / "out" / "cat.png") as figure:
        assert figure.width > 1000
    with np.load(tmp_path / "out" / "cat.npz", allow_pickle=False) as stored:
        (key,) = set(stored) - {"provenance"}
        assert key.startswith("centred_lrp@") and stored[key].shape == (14, 14)
        assert json.loads(str(stored["provenance"]))["maps"][key]["vitreous"] == VERSION


ASKED = """
import json
from vitreous import METHODS, METRICS
from vitreous.web.statics import Statics
print(json.dumps([list(METHODS), list(METRICS), sorted(Statics().files)]))
"""


def test_it_finds_its_methods_and_its_page(bare: Path, tmp_path: Path) -> None:
    """By their places in the package, as it is installed."""
    ran = run(bare / "bin" / "python", "-c", ASKED, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [list(METHODS), list(METRICS), sorted(Statics().files)]
