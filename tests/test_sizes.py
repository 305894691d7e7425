"""No module and no function grows too long to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "vitreous"
MODULE, FUNCTION = 350, 60  # lines

TO_CUT: dict[str, int] = {}  # not yet met, with the present number of lines: they may shrink, not grow


def long_parts() -> Iterator[tuple[str, int]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        source, name = file.read_text(encoding="utf-8"), file.relative_to(PACKAGE).as_posix()
        if (count := len(source.splitlines())) > MODULE:
            yield name, count
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (count := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION:
                yield f"{name}:{node.name}", count


def test_modules_and_functions_are_short() -> None:
    grown = {name: count for name, count in long_parts() if count > TO_CUT.get(name, 0)}
    assert not grown, f"over {MODULE} lines a module or {FUNCTION} a function; cut along natural seams: {grown}"


def test_what_has_been_cut_is_not_listed_any_more() -> None:
    assert sorted(set(TO_CUT) - set(dict(long_parts()))) == [], "short enough now: take it off the list"
