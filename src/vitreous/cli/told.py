"""`vitreous show` and `vitreous doctor`: what made a result, and what is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.arguments import AsJson
from vitreous.cli.commands import app


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A figure, .npz or .json file that vitreous wrote.", metavar="FILE")],
    as_json: AsJson = False,
) -> None:
    """Show what made a result: weights, image, method, options, target and versions, as the file itself tells."""
    from vitreous.cli import show as command

    command.run(file, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices, what is installed and whether it works: the first lines of a problem report."""
    from vitreous.cli import doctor as command

    command.run(as_json)
