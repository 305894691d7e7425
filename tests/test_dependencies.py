"""Every package that the code imports is declared: the needed ones as dependencies, the others as extras."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitreous"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLISHED_AS = {
    "PIL": "pillow",
    "open_clip": "open-clip-torch",
    "mlflow": "mlflow-skinny",
}  # where a package is not named as it is imported
WITH_TORCH = {"triton"}  # torch brings it along where there is a GPU, and capture/ imports it only there
ROOM_OF_EXTRA = {"web": ("web",), "notebook": ("web", "notebook")}  # these rooms as a whole are behind `needs(…)`


@dataclass(frozen=True)
class Import:
    """A package of others, imported in a module of ours."""

    package: str
    room: str
    lazy: bool  # inside a function, or only for type checkers
    where: str


def canonical(requirement: str) -> str:
    """The name of `open_clip_torch>=2.30` as package registries compare it."""
    named = re.match(r"[\w.-]+", requirement)
    assert named is not None, requirement
    return re.sub(r"[-_.]+", "-", named[0]).lower()


CORE = {canonical(one) for one in PROJECT["dependencies"]}
EXTRAS = {name: {canonical(one) for one in some} for name, some in PROJECT["optional-dependencies"].items()}
OWN = {"dev", "docs", "bench", "all"}  # not what users install for one purpose
OPTIONAL = {one for name, some in EXTRAS.items() if name not in OWN for one in some if one != "vitreous"}


def imports_of(file: Path, source: str) -> Iterator[Import]:
    tree = ast.parse(source)
    eager = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        else:
            continue
        for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"vitreous"}:
            room = file.relative_to(PACKAGE).parts[0]
            where = f"{file.relative_to(ROOT)}:{node.lineno}"
            yield Import(canonical(PUBLISHED_AS.get(name, name)), room, id(node) not in eager, where)


def undeclared(found: Import) -> str:
    """What is wrong with an import, or nothing."""
    if found.package in CORE | WITH_TORCH:
        return ""
    if found.package not in OPTIONAL:
        return f"{found.where}: {found.package} is imported but not declared; add it to pyproject.toml"
    if found.lazy or any(found.package in EXTRAS[extra] for extra in ROOM_OF_EXTRA.get(found.room, ())):
        return ""
    return f"{found.where}: {found.package} belongs to an extra; import it inside the function that needs it"


def test_every_import_is_declared() -> None:
    found = [one for file in sorted(PACKAGE.rglob("*.py")) for one in imports_of(file, file.read_text("utf-8"))]
    assert len({one.package for one in found}) > 20, "or nothing was read"
    wrong = [said for one in found if (said := undeclared(one))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import requests", "not declared"),
        ("def f():\n    import requests.auth", "not declared"),
        ("from transformers import AutoModel", "belongs to an extra"),
        ("import fastapi", "belongs to an extra"),
        ("def f():\n    from open_clip import tokenize", ""),
        ("from PIL import Image", ""),
    ],
)
def test_what_is_not_declared_is_seen(source: str, said: str) -> None:
    (found,) = imports_of(PACKAGE / "images" / "new.py", source)
    assert said in undeclared(found) and bool(said) == bool(undeclared(found))


def test_needs_names_the_extra_that_has_the_package() -> None:
    asked = [
        (node, file)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "needs"
    ]
    assert len(asked) > 4, "or nothing was read"
    for node, file in asked:
        package, extra = (ast.literal_eval(argument) for argument in node.args)
        assert canonical(PUBLISHED_AS.get(package, package)) in EXTRAS[extra], f"{file}:{node.lineno}"


def test_what_is_declared_has_a_known_version() -> None:
    pinned = {canonical(line) for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line}
    assert sorted((CORE | OPTIONAL) - pinned) == []
