"""`vitreous report`: summarise a study on the terminal and write it as a page with figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from vitreous.cli.places import placed_folder
from vitreous.cli.results import check_out
from vitreous.evaluation.report.study import WRITTEN, as_json, identity, write_report
from vitreous.evaluation.study.findings import Findings, Table
from vitreous.evaluation.study.read import Study, open_study

SENTENCES = 12  # of each model, on the terminal
FAILURES = 10


def run(path: Path, out: Path | None, overwrite: bool, quiet: bool) -> None:
    study = open_study(path)
    if out is None or os.path.abspath(out) == os.path.abspath(study.folder):
        raise typer.Exit(tell(study, None, quiet))
    check_out(out)
    with placed_folder(out, "report", WRITTEN, identity(study), overwrite) as (folder, notes):
        code = tell(study, folder, quiet, notes)
    for note in () if quiet else notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    raise typer.Exit(code)


def tell(study: Study, out: Path | None, quiet: bool, notes: Sequence[str] = ()) -> int:
    """Write the report and print its findings, for programs with `notes`; return exit code 2 if nothing is computed."""
    found = study.findings()
    files = write_report(study, out, found)
    counts = study.counts()
    done = sum(good for good, _ in counts.values())
    if quiet:
        told = {**as_json(study, found), "folder": str(study.folder), "report": str(files[-1]), "notes": [*notes]}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        show(study, found)
        typer.echo(f"report: {files[-1]}")
    tell_failures(study)
    return 0 if done else 2


def tell_failures(study: Study) -> None:
    """Name the first images that failed, and count the others."""
    failed = study.failed()
    for image, reason in list(failed.items())[:FAILURES]:
        said = reason if image in reason else f"{image}: {reason}"
        typer.secho(f"failed: {said}", err=True, fg="yellow")
    if len(failed) > FAILURES:
        typer.secho(f"failed: {len(failed) - FAILURES} more, see the report", err=True, fg="yellow")


def show(study: Study, found: dict[str, Findings]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    failed = len(study.failed())
    state = "" if study.finished else f", not finished: {study.progress}"
    typer.echo(
        f"{study.kind.name}: {study.images} images of {study.manifest['source']}"
        f"{f', {failed} failed' if failed else ''}{state}\n"
    )
    for model, one in found.items():
        typer.secho(f"{model}: {one.lead}" if one.lead else model, bold=True)
        for said in one.told[:SENTENCES]:
            typer.echo(f"  {said}")
        if len(one.told) > SENTENCES:
            typer.echo(f"  … and {len(one.told) - SENTENCES} more in the report")
        for table in one.tables:
            typer.echo("")
            console.print(drawn(table))
        typer.echo("")


def drawn(table: Table) -> Any:
    from rich.table import Table as Drawn
    from rich.text import Text

    made = Drawn(box=None, pad_edge=False, header_style="dim", title=table.title, title_justify="left", title_style="")
    for i, head in enumerate(table.head):
        made.add_column(Text(head), justify="left" if i == 0 else "right")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    return made
