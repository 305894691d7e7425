"""Options of `vitreous serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LatentsFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="Latents that visitors may choose as targets: a file written by vitreous concept discover, or a folder. "
        "May be repeated; default: vitreous-concepts."
    ),
]
AllowedModels = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=WEIGHTS]", help="A model that visitors may add on the page, loaded then. May be repeated."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Worker processes, each with its own copy of the models; default: one for each --device.", min=1, max=64
    ),
]
