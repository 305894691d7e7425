"""`vitreous advise`: find the most faithful method, layer and options for a model on given images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitreous._support.progress import show_progress
from vitreous.cli.arguments import Choice
from vitreous.cli.results import SHOWN, check_out
from vitreous.evaluation.advice import Advice, Contender, advise
from vitreous.evaluation.plan import chosen_methods
from vitreous.images.dataset import read_data
from vitreous.models.model import Model


def run(
    *,
    sources: list[str],
    load: Callable[[], Model],
    metric: str | None,
    methods: str | None,
    target: str | None,
    thorough: bool,
    choice: Choice,
    out: Path | None,
    as_json: bool,
) -> None:
    if out is not None:
        check_out(out)
    data = read_data(sources[0] if len(sources) == 1 else sources).take(choice.limit, choice.sample, choice.seed)
    names = None if methods is None else chosen_methods(methods)
    with show_progress(False if as_json else None):
        found = advise(load(), data, metric, methods=names, target=target, thorough=thorough, seed=choice.seed)
    files = found.board.save(out) if out is not None else []
    if as_json:
        typer.echo(json.dumps(told(found, files), indent=2))
    else:
        show(found)
        for line in str(found).splitlines():
            typer.echo(line)
        if files:
            typer.echo(f"\nreport: {files[-1]}")
        for note in [*found.board.notes(), *found.board.failures()[:SHOWN]]:
            typer.secho(f"note: {note}", err=True, fg="yellow")
    raise typer.Exit(0 if found.contenders else 2)


def told(found: Advice, files: list[Path]) -> dict[str, Any]:
    """The advice as JSON."""
    return {
        "model": found.model,
        "metric": found.metric,
        "better": found.better,
        "images": found.images,
        "random": found.random,
        "best": None if found.best is None else found.best.name,
        "not_distinguishable": list(found.equals),
        "advice": str(found),
        "contenders": [{k: plain(v) for k, v in asdict(one).items()} for one in found.contenders],
        "files": [str(file) for file in files],
        "notes": [*found.board.notes(), *found.board.failures()],
    }


def plain(value: Any) -> Any:
    """None in place of NaN, which JSON does not have."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def show(found: Advice) -> None:
    """Print the contenders, best first: value and gain over random with their 95 % intervals, and the cost."""
    arrow = "↑" if found.better == "higher" else "↓"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("", f"{found.metric} {arrow}", "gain over random", "forwards"):
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    for one in found.contenders[:SHOWN]:
        table.add_row(*row(one, one.name in found.equals and found.best is not None))
    console = Console(highlight=False)
    console.print(Text(f"{found.model}, {found.images} images\n"))
    console.print(table)
    if len(found.contenders) > SHOWN:
        console.print(Text(f"… and {len(found.contenders) - SHOWN} more", "dim"))
    console.print()


def row(one: Contender, among_best: bool) -> list[Text]:
    score = f"{one.score:.3f} ({one.low:.3f} … {one.high:.3f})"
    gain = f"{one.gain:+.3f} ({one.gain_low:+.3f} … {one.gain_high:+.3f})"
    cost = "–" if np.isnan(one.cost) else f"{one.cost:.1f}"
    style = "bold" if among_best else "" if one.beats_random else "dim"
    return [Text(word, style) for word in (one.name, score, gain, cost)]
