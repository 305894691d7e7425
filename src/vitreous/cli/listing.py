"""`vitreous methods`, `vitreous metrics` and `vitreous models`."""

from __future__ import annotations

import fnmatch
import json
from itertools import groupby
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vitreous.declaration import takes, typed
from vitreous.errors import ModelError, nearest
from vitreous.references import cited
from vitreous.registry import METHODS, METRICS, Declared, Metric, Registry


def methods(name: str | None, as_json: bool) -> None:
    listing(METHODS, name, as_json)


def metrics(name: str | None, as_json: bool) -> None:
    listing(METRICS, name, as_json)


def listing(known: Registry[Any], name: str | None, as_json: bool) -> None:
    """List all methods or metrics, or show one with its formula and options."""
    chosen: list[Declared] = list(known.values()) if name is None else [known[name.replace("-", "_")]]
    if as_json:
        typer.echo(json.dumps([one.schema for one in chosen], indent=2, ensure_ascii=False))
    elif name is None:
        show_all(chosen, known.kind)
    else:
        show_one(chosen[0])


def show_all(chosen: list[Declared], kind: str) -> None:
    """Print one or two lines for each, grouped by family."""
    console = Console(highlight=False)
    for family, members in groupby(chosen, key=lambda one: one.family):
        console.print(Text(family, "bold"))
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(no_wrap=True, min_width=max(len(one.name) for one in chosen))
        for one in members:
            table.add_row(one.name, one.summary)
        console.print(Padding(table, (0, 0, 1, 2)))
    console.print(Text(f"formula and options: vitreous {kind}s NAME", "dim"))


def show_one(one: Declared) -> None:
    console = Console(highlight=False)
    console.print(Text.assemble((one.name, "bold"), f": {one.summary}"))
    if one.formula:
        console.print(Padding(Text(one.formula), (1, 0, 0, 4)))
    if isinstance(one, Metric):
        console.print(Padding(Text(measures(one)), (1, 0, 0, 0)))
    options = one.schema["options"]
    if options:
        console.print(Padding(option_table(options), (1, 0, 0, 0)))
        name, schema = next(iter(options.items()))
        console.print(Text(f"\nfor example: --set {one.name}.{name}={typed(schema.get('default'))}", "dim"))
    if one.cite:
        console.print(Text(f"reference: {cited(one.cite)}", "dim"))


def measures(one: Metric) -> str:
    """Which values are better, and what the metric requires."""
    needs = ["needs masks or boxes"] * one.masks + ["runs the method again"] * one.again
    return "; ".join([f"{one.schema['better']} is better", *needs])


def option_table(options: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("option", "default", "takes", "what it does"):
        table.add_column(head, no_wrap=head == "option")
    for name, schema in options.items():
        table.add_row(*map(Text, (name, typed(schema.get("default")), takes(schema), schema.get("description", ""))))
    return table


def models(pattern: str | None, as_json: bool) -> None:
    from vitreous.models.load import BARE, catalogue

    found = matching(catalogue(everything=pattern is not None), pattern)
    if not found:
        known = [name for names in catalogue(everything=True).values() for name in names]
        raise ModelError(f"no model matches {pattern!r}{nearest(str(pattern), known)}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for source, names in found.items():
        for name in names:
            typer.echo(name if source in BARE else f"{source}/{name}")
    more = "" if pattern else "others by pattern, e.g. vitreous models 'resnet*'; "
    typer.secho(f"{more}also: hf/ID or hf/FOLDER, and any local checkpoint with --weights FILE", err=True, dim=True)


def matching(known: dict[str, list[str]], pattern: str | None) -> dict[str, list[str]]:
    """The matching names by source; "torchvision/vit*" searches that source only."""
    source, _, rest = (pattern or "").rpartition("/")
    found = {s: match(names, rest) for s, names in known.items() if source in ("", s)}
    return {s: names for s, names in found.items() if names}


def match(names: list[str], pattern: str) -> list[str]:
    """The names that match a pattern, or contain it if it has no wildcard; all names for an empty one."""
    wanted = pattern.lower() if any(c in pattern for c in "*?[") else f"*{pattern.lower()}*"
    return [name for name in names if fnmatch.fnmatch(name.lower(), wanted)]
