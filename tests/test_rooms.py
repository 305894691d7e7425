"""The plan of the house: imports go one way, and docs/architecture.md draws it as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vitreous"
ROOMS = (  # from the top of the house: a room may import those before it, never those behind it
    *("errors", "types", "version", "references", "declaration", "registry"),
    *(
        "_support",
        "images",
        "plot",
        "capture",
        "models",
        "trace",
        "attribution",
        "attribute",
        "metrics",
        "methods",
        "api",
    ),
    *("language", "counterfactuals", "bridges", "evaluation", "inspect", "web", "notebook", "cli"),
)
MOST_AT_THE_ROOT = 12


@dataclass(frozen=True)
class Import:
    """One import statement; lazy and type-only ones count too."""

    source: str  # dotted, without `vitreous.`
    target: str
    where: str  # file and line

    def __str__(self) -> str:
        return f"{self.where}: {self.source} imports {self.target}"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(name: str, file: Path, known: dict[str, Path]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vitreous":
            base = node.module.removeprefix("vitreous").lstrip(".")
            targets = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            targets = [target if target in known else base for target in targets]
        elif isinstance(node, ast.Import):
            targets = [
                alias.name.removeprefix("vitreous.") for alias in node.names if alias.name.startswith("vitreous.")
            ]
        else:
            continue
        where = f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name}:{node.lineno}"
        yield from (Import(name, target, where) for target in targets if target != name)


@cache
def imports() -> tuple[Import, ...]:
    known = modules()
    inner = {name: file for name, file in known.items() if name not in ("", "__main__")}
    return tuple(found for name, file in inner.items() for found in imports_of(name, file, known))


def against_the_stairs(found: Iterator[Import] | tuple[Import, ...]) -> list[Import]:
    """Imports of a room that comes later."""

    def floor(name: str) -> int:
        return ROOMS.index(name.split(".")[0])

    return [one for one in found if floor(one.target) > floor(one.source)]


def test_every_module_is_in_a_room() -> None:
    rooms = {name.split(".")[0] for name in modules()} - {"", "__main__"}
    assert rooms == set(ROOMS)
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_ROOT


def test_no_room_imports_one_below_it() -> None:
    wrong = against_the_stairs(imports())
    assert not wrong, "\n".join(map(str, wrong))


def test_no_imports_in_a_circle() -> None:
    """Also not where one of them waits inside a function or is only for type checkers."""
    graph: dict[str, set[str]] = {}
    for one in imports():
        graph.setdefault(one.source, set()).add(one.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = set(error.args[1])
        pytest.fail("\n".join(str(one) for one in imports() if {one.source, one.target} <= circle))


@pytest.mark.parametrize(
    "line",
    [
        "from vitreous.cli.main import app",
        "def f():\n    from vitreous.web import app",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vitreous.trace.trace import Trace",
        "import vitreous.methods.attention.rollout",
    ],
    ids=["plain", "lazy", "type-only", "by its whole name"],
)
def test_a_wrong_import_is_seen(line: str, tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text(line)
    (wrong,) = against_the_stairs(tuple(imports_of("images.new", file, modules())))
    assert str(wrong).startswith(f"new.py:{line.count(chr(10)) + 1}: images.new imports ")


def test_the_architecture_page_draws_the_rooms_as_they_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^\| `([\w/]+?)/?` \|", page, re.MULTILINE)
    assert [room for room in drawn if room in ROOMS] == list(ROOMS), "the table of rooms, in this order"
