"""`vitreous doctor`: print what a problem report needs, ready to paste."""

from __future__ import annotations

import json

import typer

from vitreous.cli.health import Health, examine


def run(as_json: bool) -> None:
    found = examine()
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        show(found)
    raise typer.Exit(1 if found.problems else 0)


def show(found: Health) -> None:
    say = typer.echo
    say(f"vitreous {found.vitreous}, {found.methods} methods, {found.metrics} metrics")
    say(f"Python {found.python}, {found.system}\n")
    rows = [(one.name, one.version or "–", one.extra or "", one.problem or "ok") for one in found.packages]
    widths = [max(map(len, column)) + 2 for column in zip(*rows)][:3]
    for row in rows:
        say("".join(word.ljust(width) for word, width in zip(row, widths)) + row[-1])
    say()
    for device in found.devices:
        said = device.problem or "the embedded model runs, its attention is verified"
        say(f"{device.name}: {device.told}; {said}")
    say()
    for problem in found.problems:
        say(f"to fix: {problem}")
    if not found.problems:
        say("no problems found; to report one, paste these lines with the command and its output")
