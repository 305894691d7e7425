"""`vitreous concept discover`: find the concepts that a layer is made of."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitreous.cli.arguments import OUT, AsJson, DataSet, Limit, OutFolder, Replace, Sample, Seed, Source
from vitreous.cli.concept import app
from vitreous.cli.groups import grouped
from vitreous.errors import InputError, OptionError, TargetError

if TYPE_CHECKING:
    from vitreous.evaluation.discover.discover import Discovered


@dataclass(frozen=True)
class Latents:
    """What is fitted, and how it is ranked and named."""

    name: Annotated[str | None, typer.Option(help="Name of the latents; default: that of the data set.")] = None
    by: Annotated[str, typer.Option(help="sae (a TopK sparse autoencoder) or nmf (semi-NMF).")] = "sae"
    latents: Annotated[
        int | None, typer.Option(help="How many; default: by the number of patches.", min=1, show_default=False)
    ] = None
    k: Annotated[
        int | None,
        typer.Option("--k", help="Latents that a patch may have, of sae; default: by --latents.", min=1),
    ] = None
    seeds: Annotated[int, typer.Option(help="Dictionaries that are fitted to tell which latents are stable.")] = 3
    steps: Annotated[
        int | None, typer.Option(help="Steps of the fit; default: 1500 of sae, 60 of nmf.", min=1, show_default=False)
    ] = None
    candidates: Annotated[int, typer.Option(help="Latents that are ablated for each class.")] = 8
    per_class: Annotated[int, typer.Option(help="Images of each class that they are ablated in, at most.")] = 32
    words: Annotated[
        Path | None, typer.Option(help="A file of words, one a line, to name latents by: needs a text tower.")
    ] = None


@app.command()
@grouped
def discover(
    data: DataSet,
    *,
    source: Source,
    layer: Annotated[int, typer.Option(help="The block whose patch tokens are taken apart; -2 is the last but one.")],
    asked: Latents,
    limit: Limit = None,
    sample: Sample = None,
    seed: Seed = 0,
    out: OutFolder = OUT,
    overwrite: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Find concepts without labels: latents of the patch tokens of a layer, for --target latent:NAME#NUMBER.

    Latents are ranked by what classes lose without them. An interrupted run goes on where it was.
    """
    from vitreous._support.progress import show_progress
    from vitreous.evaluation.discover.discover import discover as find
    from vitreous.evaluation.discover.discover import named_after
    from vitreous.images.dataset import read_data
    from vitreous.trace.concept import FOLDER
    from vitreous.trace.latents import ENDING

    given = read_data(data)
    called = asked.name or named_after(given)
    if not called.strip() or Path(called).name != called or "#" in called:
        raise OptionError(f"--name {called!r}: give a plain name without folders and #")
    file = FOLDER / f"{called}{ENDING}"
    model = source.load()
    options: dict[str, Any] = {
        **vars(asked),
        "layer": layer,
        "name": called,
        "limit": limit,
        "sample": sample,
        "seed": seed,
    }
    folder = out / called
    try:
        with source.limited(), show_progress(False if as_json else None):
            found = find(model, given, layer, **options, out=folder)
    except KeyboardInterrupt:
        typer.secho("note: run the same command again to resume from here", err=True, fg="yellow")
        raise
    refuse_other(file, found, overwrite)
    files = [found.latents.save(file), *found.save(folder)]
    tell(found, files, as_json)


def refuse_other(file: Path, found: Discovered, overwrite: bool) -> None:
    """Raise if there are other latents in this file, or anything else."""
    from vitreous.trace.latents import Latents as Stored

    if not os.path.lexists(file) or overwrite:
        return
    try:
        before = Stored.load(file)
    except TargetError:
        raise InputError(f"{file}: is there and holds no latents; give another --name") from None
    if before.digest != found.latents.digest:
        raise InputError(f"{file}: holds other latents of this name; give another --name, or --overwrite")


def tell(found: Discovered, files: list[Path], as_json: bool) -> None:
    """Print what was found, or all of it as JSON."""
    from vitreous._support.words import count_of
    from vitreous.evaluation.discover.report import findings

    if as_json:
        typer.echo(json.dumps({**findings(found), "files": list(map(str, files))}, indent=2, default=str))
        return
    latents, stability = found.latents, found.stability
    images = count_of(len(found.seen["number"]), "image")
    typer.echo(f"{latents.name}: {len(latents)} latents of layer {latents.layer} of {found.model.name}, {images}")
    dead = f"{found.quality.dead} that no patch has"
    typer.echo(f"explained variance {found.explained}, {found.quality.active.mean():.1f} latents a patch, {dead}")
    if stability is not None:
        said = f"{int(stability.stable.sum())} of {len(latents)} are stable over seeds"
        typer.echo(f"{said} (mean cosine {stability.mean.mean():.2f}, random {stability.control.mean():.2f})")
    best = sorted(found.effects, key=lambda one: -one.logit.mean)[:5]
    for one in best:
        said = f"without latent {latents.label(one.latent)}, {one.label} loses {one.logit}"
        typer.echo(f"{said} (random direction {one.control})")
    for note in found.notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    if found.failed:
        first = next(iter(found.failed.values()))
        typer.secho(f"note: {count_of(len(found.failed), 'image')} could not be read: {first}", err=True, fg="yellow")
    for file in files:
        typer.echo(str(file))
    top = next(iter(found.order), 0)
    typer.echo(f"use them: vitreous explain IMAGE --method gae --target latent:{latents.name}#{top}")
