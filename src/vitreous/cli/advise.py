"""`vitreous advise`: find the most faithful method, layer and options for a model on given images."""

from __future__ import annotations

import json
import os
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
from vitreous.cli.arguments import Choice, PlaceIfAny
from vitreous.cli.places import placed_folder
from vitreous.cli.results import check_out
from vitreous.evaluation.advice import Advice, Contender, Fresh, advise
from vitreous.evaluation.estimate import Estimate
from vitreous.evaluation.plan import chosen_methods
from vitreous.evaluation.report.files import WRITTEN, identity
from vitreous.images.dataset import read_data
from vitreous.models.model import Model

WIDE = 120  # columns in which a row takes one line
LEAST = 60  # columns in which numbers are not folded
UNBOUNDED = 1000  # columns of a pipe or a file


def run(
    *,
    sources: list[str],
    load: Callable[[], Model],
    metric: str | None,
    methods: str | None,
    target: str | None,
    thorough: bool,
    exhaustive: bool,
    choice: Choice,
    place: PlaceIfAny,
) -> None:
    as_json = place.as_json
    if place.out is not None:
        check_out(place.out)
    data = read_data(sources[0] if len(sources) == 1 else sources).with_inputs(choice.inputs)
    data = data.take(choice.limit, choice.sample, choice.seed)
    names = None if methods is None else chosen_methods(methods)
    asked: dict[str, Any] = {"methods": names, "target": target, "thorough": thorough, "exhaustive": exhaustive}
    with show_progress(False if as_json else None):
        found = advise(load(), data, metric, **asked, seed=choice.seed, before=announce)
    files, notes = save(found, place)
    if as_json:
        typer.echo(json.dumps(told(found, files, notes), indent=2))
    else:
        show(found)
        for line in str(found).splitlines():
            typer.echo(line)
        if files:
            typer.echo(f"\nreport: {files[-1]}")
        for note in [*notes, *found.board.notes(), *found.board.failures()]:
            typer.secho(f"note: {note}", err=True, fg="yellow")
    raise typer.Exit(0 if found.contenders else 2)


def save(found: Advice, place: PlaceIfAny) -> tuple[list[Path], list[str]]:
    """Write the leaderboard where nothing is lost, if it is asked for; and a note if that is not the folder given."""
    if place.out is None:
        return [], []
    with placed_folder(place.out, "leaderboard", WRITTEN, identity(found.board), place.overwrite) as (folder, notes):
        return found.board.save(folder), notes


def announce(estimate: Estimate) -> None:
    """Say what the search will cost; standard output is for the result."""
    typer.echo(str(estimate), err=True)


def told(found: Advice, files: list[Path], notes: list[str]) -> dict[str, Any]:
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
        "estimate": numbers(found.estimate),
        "runs": found.runs,
        "fresh": None if found.fresh is None else numbers(found.fresh),
        "contenders": [numbers(one) for one in found.contenders],
        "files": [str(file) for file in files],
        "notes": [*notes, *found.board.notes(), *found.board.failures()],
    }


def numbers(one: Contender | Estimate | Fresh) -> dict[str, Any]:
    """The fields of a record; None in place of NaN, which JSON does not have."""
    return {name: plain(value) for name, value in asdict(one).items()}


def plain(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def show(found: Advice, console: Console | None = None) -> None:
    """Print every contender, best first: value and gain over random with their 95 % intervals, cost and images.

    Nothing is cut: on a narrow terminal intervals take a line of their own and names are folded; a pipe has no width.
    """
    console = console or Console(highlight=False)
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console = Console(highlight=False, width=UNBOUNDED)
    narrow = console.width < WIDE
    arrow = "↑" if found.better == "higher" else "↓"
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    metric = found.metric.replace(" ", "\n") if narrow else found.metric
    for head in (f"{metric} {arrow}", "gain over\nrandom" if narrow else "gain over random", "forwards", "images"):
        table.add_column(head, justify="right", no_wrap=console.width >= LEAST, overflow="fold")
    for one in found.contenders:
        table.add_row(*row(one, narrow, one.name in found.equals and found.best is not None))
    console.print(Text(f"{found.model}, {found.images} images\n"))
    console.print(table)
    left = [one for one in found.contenders if one.dropped is not None]
    if left:
        said = f"{len(left)} contenders were left out after the images that are listed with them."
        console.print(Text(f"\n{said}", "dim"))
    console.print()


def row(one: Contender, narrow: bool, among_best: bool) -> list[Text]:
    apart, to = ("\n", "…") if narrow else (" ", " … ")
    score, gain = f"{one.score:.3f}", f"{one.gain:+.3f}"
    if np.isfinite(one.low):  # one image has no interval
        score += f"{apart}({one.low:.3f}{to}{one.high:.3f})"
        gain += f"{apart}({one.gain_low:+.3f}{to}{one.gain_high:+.3f})"
    cost = "–" if np.isnan(one.cost) else f"{one.cost:.1f}"
    style = "bold" if among_best else "" if one.beats_random and one.dropped is None else "dim"
    return [Text(word, style) for word in (one.name, score, gain, cost, str(one.images))]
