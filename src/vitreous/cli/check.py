"""`vitreous models --check`: print what is known of a model, what was verified and which methods work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import typer

from vitreous.cli.arguments import Backbone
from vitreous.errors import OptionError, WeightsError
from vitreous.inspect.check.check import check
from vitreous.models.model import Model


def run(asked: Backbone, methods: str | None, as_json: bool) -> None:
    found = check(load(asked), methods=methods)
    typer.echo(json.dumps(found.as_dict(), indent=2, ensure_ascii=False) if as_json else str(found))
    raise typer.Exit(0 if found.right else 1)


def load(asked: Backbone) -> Model:
    """The named model; a file is taken for weights of the embedded architecture."""
    name = asked.model
    if name is None or not Path(name).is_file():
        return asked.load()
    if asked.weights is not None:
        raise OptionError(f"--check {name} is a file; give either --check FILE, or --check NAME --weights FILE")
    try:
        return replace(asked, model=None, weights=name).load()
    except WeightsError as error:
        remedy = f"if it is of another architecture, name that: vitreous models --check NAME --weights {name}"
        raise WeightsError(f"{error}; {remedy}") from None
