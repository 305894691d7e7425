"""`vitreous counterfactual`: declared here, worked in `cli/turned.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from vitreous.cli.arguments import Images, PlaceOfImages, SetOption, Source
from vitreous.cli.commands import app
from vitreous.cli.groups import grouped


@app.command()
@grouped
def counterfactual(
    images: Images,
    *,
    source: Source,
    method: Annotated[
        str | None, typer.Option("--method", "-x", help="One method; see: vitreous methods.", show_default="the best")
    ] = None,
    options: SetOption = None,
    to: Annotated[
        str | None, typer.Option("--to", help="The wanted class; any: any other; default: the second best one.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="The class that must be decided for now; default: whichever is.")
    ] = None,
    other: Annotated[
        str | None, typer.Option("--with", help="A second image: exchange patches with it instead of removing them.")
    ] = None,
    places: Annotated[
        str, typer.Option("--places", help="Which patches of the second image: at the same places, or matched.")
    ] = "same",
    search: Annotated[
        str, typer.Option("--search", help="map: the map's order alone; greedy: also the true effect of each patch.")
    ] = "greedy",
    pool: Annotated[int, typer.Option("--pool", help="Patches that greedy tries at each step.", min=1)] = 24,
    proof: Annotated[
        int, typer.Option("--proof", help="Runs, at most, to show that no smaller set does it.", min=0)
    ] = 4096,
    place: PlaceOfImages,
) -> None:
    """Find the smallest set of patches whose removal turns the decision, and certify it; code 1 if there is none."""
    from vitreous.cli import turned as command

    with source.limited():
        command.run(
            sources=images,
            load=source.load,
            method=method,
            settings=options or [],
            asked={"to": to, "from_": from_, "other": other, "places": places},
            how={"search": search, "pool": pool, "proof": proof},
            place=place,
        )
