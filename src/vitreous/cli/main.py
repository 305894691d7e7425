"""The entry point of the command line: all commands, and the messages when one fails."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from typing import Annotated, Any

import typer

from vitreous._support.cpu import work_around_amx
from vitreous.cli import counterfactual as counterfactual  # these modules declare commands
from vitreous.cli import diff as diff
from vitreous.cli import discover as discover
from vitreous.cli import features as features
from vitreous.cli import language as language
from vitreous.cli import told as told
from vitreous.cli.ablate import app as ablate_app
from vitreous.cli.commands import app
from vitreous.cli.concept import app as concept_app
from vitreous.cli.inspect import app as inspect_app
from vitreous.cli.probe import app as probe_app
from vitreous.cli.study import app as study_app
from vitreous.errors import VitreousError
from vitreous.version import VERSION

INTERRUPTED = 130

app.add_typer(ablate_app, name="ablate")
app.add_typer(concept_app, name="concept")
app.add_typer(inspect_app, name="inspect")
app.add_typer(probe_app, name="probe")
app.add_typer(study_app, name="study")


def version(asked: bool | None) -> None:
    if asked:
        typer.echo(f"vitreous {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool | None, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = None,
) -> None:
    """See what a Vision Transformer looks at, and why."""
    notice = work_around_amx()  # before a command imports torch
    if notice:
        typer.secho(f"note: {notice}", err=True)


def main() -> None:
    """Run a command; an expected error prints one line and exits with code 2."""
    warnings.formatwarning = brief
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # messages about its font cache
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot encode ≥ shows a question mark
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except VitreousError as error:
        code = fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        said = explained(error)
        code = crash() if said is None else fail(said)
    if code == INTERRUPTED:
        typer.secho("interrupted", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def fail(said: str) -> int:
    typer.secho(f"error: {said}", err=True, fg="red")
    return 2


def crash() -> int:
    """Print the traceback of an unexpected error, and how to report it."""
    import traceback

    from vitreous.cli.health import one_line

    traceback.print_exc()
    typer.secho(f"\n{one_line()}", err=True)
    said = "this is a bug in vitreous; please report it with the lines above and the output of: vitreous doctor"
    typer.secho(f"error: {said}", err=True, fg="red")
    return 1


def explained(error: Exception) -> str | None:
    """One line for an error of the user or the machine; None for a bug, which needs its traceback."""
    if hasattr(error, "format_message"):  # a usage error from Typer
        known = getattr(typer.main.get_command(app), "commands", {})
        words = ["vitreous", *(word for word in sys.argv[1:2] if word in known), "--help"]
        return f"{' '.join(error.format_message().split()).rstrip('.')}; see: {' '.join(words)}"
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU has too little memory for this; try a smaller --img-size, fewer methods or --device cpu"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "there is too little memory for this, even for one image; try a smaller --img-size"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None


def brief(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Format warnings of vitreous as one line; those of other libraries keep their file and line."""
    return (
        f"note: {message}\n"
        if category.__module__.startswith("vitreous.")
        else usual(message, category, *where, **more)
    )


usual = warnings.formatwarning
