"""`vitreous explain ONE --like OTHER`: why two images are alike, a map for each, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from vitreous.api import explain_pair
from vitreous.attribution import Attribution, mark_of
from vitreous.cli.arguments import Beside
from vitreous.cli.places import place, release
from vitreous.errors import EmptyMap, OptionError, Unsupported
from vitreous.models.model import Model
from vitreous.registry import Method


@dataclass(frozen=True)
class Plan:
    """The methods and their options."""

    methods: list[Method]  # empty: the default, which depends on the model
    everything: bool  # --method all: methods that do not work on this model are skipped
    values: dict[str, dict[str, Any]]


def explain_alike(
    model: Model,
    plan: Plan,
    files: Sequence[Path],
    beside: Beside,
    target: str | None,
    folder: Path,
    kinds: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
    name: str | None = None,
) -> NoReturn:
    """Explain two images by each method and write a figure and the raw maps of both; `name`: of the files."""
    assert beside.like is not None
    if len(files) != 1 or beside.inputs is not None or target is not None:
        raise OptionError("--like compares one image with another: give one, without --target and --inputs")
    one, other = files[0], beside.like
    name = name or f"{one.stem}-like-{other.stem}"
    written: list[dict[str, Any]] = []
    names: list[str | None] = [method.name for method in plan.methods]
    for method in names or [None]:
        try:
            pair = explain_pair(model, str(one), str(other), method, **plan.values.get(method or "", {}))
        except (Unsupported, EmptyMap) as error:
            if not plan.everything:
                raise
            typer.secho(f"note: without {method}: {error}", err=True, fg="yellow")
            continue
        called = name if len(plan.methods) < 2 else f"{name}-{method}"
        paths = write(pair.both, folder, called, [f".{kind}" for kind in kinds], overwrite)
        written.append({"method": pair.one.method, "images": [str(one), str(other)], "files": paths})
    if as_json:
        typer.echo(json.dumps({"model": model.name, "pairs": written}, indent=2))
    else:
        for entry in written:
            typer.echo("  ".join(entry["files"]))
        typer.echo(f"\nwhy {one.name} and {other.name} are alike, to {model.name}")
    raise typer.Exit(0)


def write(both: Attribution, folder: Path, name: str, suffixes: Sequence[str], overwrite: bool) -> list[str]:
    """Write the maps of both images, where nothing is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    found = place(folder, name, suffixes, mark_of({"map": both})["identity"], overwrite)
    try:
        return [str(both.save(folder / f"{found}{suffix}")) for suffix in suffixes]
    finally:
        release(folder, found, suffixes)
