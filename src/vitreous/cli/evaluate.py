"""`vitreous evaluate`: measure methods on a data set; prints a table and verdicts, writes the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from vitreous._support.progress import show_progress
from vitreous._support.statistics import Summary
from vitreous.cli.arguments import Choice, Settings
from vitreous.cli.places import placed_folder
from vitreous.cli.results import SHOWN, check_out
from vitreous.evaluation.leaderboard import Leaderboard
from vitreous.evaluation.plan import make_plan
from vitreous.evaluation.report.files import WRITTEN, Log, identity, told
from vitreous.images.dataset import read_data
from vitreous.models.model import Model
from vitreous.plot.colour import is_control

SIGNS = {1: ("▲", "green"), -1: ("▼", "red"), 0: (" ", "")}
NAME, CELL = 18, 15  # characters of a method's name, and of a value with its interval


def run(
    *,
    data: str,
    load: Callable[[], Model],
    methods: str | None,
    metrics: str | None,
    masks: Path | None,
    target: str | None,
    settings: Settings,
    choice: Choice,
    out: Path,
    overwrite: bool,
    as_json: bool,
) -> None:
    check_out(out)
    found = read_data(data, masks).with_inputs(choice.inputs).take(choice.limit, choice.sample, choice.seed)
    plan = make_plan(methods, metrics, settings, found, target, choice.seed)
    board = Leaderboard(load(), found, plan)
    with placed_folder(out, "leaderboard", WRITTEN, identity(board), overwrite) as (folder, note):
        board.plan = replace(plan, notes=(*plan.notes, *note))
        complete, log = is_finished(folder), Log(board, folder)
        try:
            with show_progress(False if as_json else None):
                board.run(log)
        except BaseException:
            if complete:
                log.drop()
                said = f"note: stopped; {folder / WRITTEN[0]} is this evaluation, finished before, and stays"
                typer.secho(said, err=True, fg="yellow")
            elif board.done.any():
                tell(board, board.save(folder), as_json)
            raise
        tell(board, board.save(folder), as_json)
    raise typer.Exit(0 if measured(board) else 2)


def is_finished(folder: Path) -> bool:
    """Whether a finished leaderboard is there already."""
    try:
        return bool(json.loads((folder / WRITTEN[0]).read_text(encoding="utf-8")).get("finished"))
    except (OSError, ValueError, AttributeError):
        return False


def measured(board: Leaderboard) -> bool:
    """Whether any method other than the controls has a value."""
    real = [m for m, name in enumerate(board.methods) if not is_control(name)]
    return bool(np.isfinite(board.values[real or slice(None)]).any())


def tell(board: Leaderboard, files: list[Path], as_json: bool) -> None:
    """Print the table and the verdicts, or JSON; failures go to standard error."""
    summary = board.summary()
    if as_json:
        written = {file.name: str(file) for file in files}
        typer.echo(json.dumps({**told(board, summary), "files": written}, indent=2, ensure_ascii=False))
        return
    show(board, summary)
    typer.echo(f"\nreport: {files[-1]}")
    failures = board.failures()
    for note in (*board.notes(), *failures[:SHOWN]):
        typer.secho(f"note: {note}", err=True, fg="yellow")
    if len(failures) > SHOWN:
        typer.secho(f"note: {len(failures) - SHOWN} more of these in the report", err=True, fg="yellow")


def show(board: Leaderboard, summary: Summary) -> None:
    """Print as many metrics side by side as fit on the terminal, then the verdicts."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    done = int(board.done.sum())
    console.print(Text(f"{board.about.name}, {done} image{'' if done == 1 else 's'} of {board.data.source}\n"))
    across = max(1, (console.width - NAME) // (CELL + 2))
    for start in range(0, len(summary.metrics), across):
        console.print(values_table(summary, range(len(summary.metrics))[start : start + across]))
        console.print()
    console.print(verdict_table(board, summary))


def values_table(summary: Summary, metrics: range) -> Any:
    """A table of means, the half-widths of their intervals, and ▲ or ▼ where they differ from random."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method", no_wrap=True)
    for k in metrics:
        table.add_column(f"{summary.metrics[k]} {'↑' if summary.better[k] == 'higher' else '↓'}", justify="right")
    for m in summary.order:
        name = Text(summary.methods[m], "dim" if is_control(summary.methods[m]) else "bold")
        table.add_row(name, *(value(summary, m, k) for k in metrics))
    return table


def value(summary: Summary, m: int, k: int) -> Any:
    from rich.text import Text

    mean, half = summary.mean[m, k], (summary.high[m, k] - summary.low[m, k]) / 2
    if np.isnan(mean):
        return Text("–  ", "dim")
    mark, colour = SIGNS[int(summary.effect[m, k])]
    near = "" if np.isnan(half) else f" ±{summary.spell(float(half), k)}".replace("±0.", "±.")
    return Text.assemble(summary.spell(float(mean), k), (near, "dim"), (f" {mark}", colour))


def verdict_table(board: Leaderboard, summary: Summary) -> Any:
    """A table of mean ranks, costs and verdicts, best first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("method", "rank", "forwards", "verdict"):
        table.add_column(head, justify="right" if head in ("rank", "forwards") else "left", no_wrap=head == "method")
    costs = board.costs()
    for m in summary.order:
        name, rank = summary.methods[m], summary.mean_rank[m]
        cost = f"{costs[name].ratio:.1f}" if name in costs else "–"
        style = "dim" if is_control(name) else ""
        shown = (name, "–" if np.isnan(rank) else f"{rank:.1f}", cost, summary.verdict(m))
        table.add_row(*(Text(word, style) for word in shown))
    return table
