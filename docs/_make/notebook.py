"""A notebook as a reader sees it: its cells run from top to bottom, what they show kept as Markdown."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ran:
    """A cell and what it showed."""

    kind: str  # "markdown" or "code"
    source: str
    text: str = ""
    picture: bytes | None = None


def cells_of(file: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return cells


def run(file: Path) -> Iterator[Ran]:
    """Every cell in turn, in the current folder."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(file)):
        source = "".join(cell["source"])
        yield Ran("markdown", source) if cell["cell_type"] == "markdown" else run_code(source, space, number)


def run_code(source: str, space: dict[str, Any], number: int) -> Ran:
    """As Jupyter does: what the last expression gives is shown, as a picture where it is one."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value, name = io.StringIO(), None, f"<cell {number}>"
    with redirect_stdout(printed):
        exec(compile(tree, name, "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
    picture = picture_of(value)
    said = printed.getvalue() + ("" if value is None or picture else repr(value))
    return Ran("code", source, said.strip(), picture)


def picture_of(value: Any) -> bytes | None:
    draw = getattr(value, "_repr_png_", None)
    return None if draw is None else draw()


def to_markdown(file: Path, pictures: Path, link: str) -> str:
    """The whole notebook; pictures are written to a folder, to which `link` leads."""
    parts = []
    for number, ran in enumerate(run(file)):
        if ran.kind == "markdown":
            parts.append(ran.source)
            continue
        parts.append(f"```python\n{ran.source}\n```")
        if ran.text:
            parts.append(f'```text title="shows"\n{ran.text}\n```')
        if ran.picture is not None:
            (pictures / f"cell-{number}.png").write_bytes(ran.picture)
            parts.append(f"![What the cell above shows]({link}/cell-{number}.png)")
    return "\n\n".join(parts)
