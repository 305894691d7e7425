"""`vitreous show`: what made a result, as the file itself tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from vitreous._support.marks import KEY, READERS, read_mark
from vitreous.errors import InputError

SHARED = ("model", "spec", "library", "architecture", "weights", "input", "preprocess", "output", "sources", "versions")
WIDTH = 14


def run(file: Path, as_json: bool) -> None:
    mark = read_mark(file)
    if mark is None:
        kinds = ", ".join(sorted(READERS))
        raise InputError(f"{file}: does not say what made it; only files that vitreous wrote do ({kinds})")
    if as_json:
        typer.echo(json.dumps(mark, indent=2, ensure_ascii=False))
        return
    maps: Mapping[str, Any] = mark.get("maps", {})
    typer.echo(f"{file}: {what(mark)}")
    shared = {key: told for key in SHARED if (told := common(key, maps, mark)) is not None}
    for line in lines(shared):
        typer.echo(line)
    for name, told in maps.items():
        typer.echo(f"\n{name}")
        rest = {key: value for key, value in told.items() if key not in {*shared, "images", "target", KEY, "box"}}
        for line in lines(rest):
            typer.echo(line)
    if not maps:
        for line in lines({key: value for key, value in mark.items() if key not in {*shared, KEY}}):
            typer.echo(line)


def what(mark: Mapping[str, Any]) -> str:
    """What kind of result it is, in a few words."""
    maps = mark.get("maps")
    if maps:
        return f"{len(maps)} map{'s' if len(maps) > 1 else ''}"
    if "view" in mark:
        return f"inspect {mark['view']}"
    return "units maximized" if "units" in mark else "a result of vitreous"


def common(key: str, maps: Mapping[str, Any], mark: Mapping[str, Any]) -> Any:
    """What all maps of a file have in common."""
    values = [told.get(key) for told in maps.values()] or [mark.get(key)]
    return values[0] if all(value == values[0] for value in values) else None


def lines(told: Mapping[str, Any], start: str = "  ") -> Iterator[str]:
    """`name  value`, one a line; what holds more is indented below its name."""
    for key, value in told.items():
        if value in (None, {}, [], ()) or (isinstance(value, list) and all(item is None for item in value)):
            continue
        name = f"{start}{key}"
        if isinstance(value, Mapping):
            yield name
            yield from lines(value, start + "  ")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield name
            for item in value:
                yield from lines(item, start + "  ")
        else:
            yield f"{name:<{WIDTH + len(start)}} {written(value)}"


def written(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(written, value[:8]))
        return shown + (f", … ({len(value)} in all)" if len(value) > 8 else "")
    return f"{value:.6g}" if isinstance(value, float) else str(value)
