"""`vitreous concept build` and `vitreous concept list`: concepts from a few example images."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitreous.cli.arguments import Backbone, Images, Limit, OutFileIfAny, Replace
from vitreous.cli.groups import grouped
from vitreous.errors import OptionError

if TYPE_CHECKING:
    from vitreous.trace.concept import Concept

app = typer.Typer(help="Build concepts from example images, for --target concept:NAME.")
ROUNDING = 1e-4  # by which the same images may differ from run to run
KINDS = ("dot", "cosine", "l2")


@app.command()
@grouped
def build(
    name: Annotated[str, typer.Argument(help="Name of the concept.", metavar="NAME")],
    images: Images,
    *,
    backbone: Backbone,
    similarity: Annotated[str, typer.Option(help="dot, cosine or l2 (minus the distance).")] = "dot",
    limit: Limit = None,
    out: OutFileIfAny = None,
    overwrite: Replace = False,
) -> None:
    """Average the embeddings of example images and store the result; default: vitreous-concepts/NAME.safetensors.

    A concept is called by its name, so another one of the same name is refused, unless --overwrite is given.
    """
    from vitreous.cli.places import reserved
    from vitreous.images import listing
    from vitreous.trace.concept import FOLDER, Concept

    if similarity not in KINDS:
        raise OptionError(f"--similarity {similarity}: must be one of {', '.join(KINDS)}")
    if not name.strip() or (out is None and Path(name).name != name):
        raise OptionError(f"{name!r} is not a plain name; give the name without folders, and the folder with --out")
    file = out or FOLDER / f"{name}.safetensors"
    listed = listing.look(*images)
    found = listed.files[:limit]
    if listed.note is not None:
        typer.secho(f"note: {listed.note}", err=True, fg="yellow")
    told = similarity, tuple(image.name for image in found)
    refuse_other(file, overwrite, lambda before: (before.similarity, before.examples) == told)
    concept = Concept.from_images(backbone.load(), found, similarity, name=name)
    with reserved(file):
        refuse_other(file, overwrite, lambda before: is_same(before, concept))
        concept.save(file)
    typer.echo(f"{file}  {len(found)} images, {similarity}")
    asked = f"concept:{name if out is None else out}"
    typer.echo(
        f"use it: vitreous explain IMAGE --method cdam --target {asked}"
        + (f" --model {backbone.model}" if backbone.model else "")
    )


def refuse_other(file: Path, overwrite: bool, same: Callable[[Concept], bool]) -> None:
    """Raise if there is another concept in this file, or anything else."""
    from vitreous._support.words import count_of
    from vitreous.errors import InputError, TargetError
    from vitreous.trace.concept import Concept

    if not os.path.lexists(file):
        return
    try:
        before = Concept.load(file)
    except TargetError:
        raise InputError(f"{file}: is there and is not a concept; give another name or --out") from None
    if not overwrite and not same(before):
        what = f"{count_of(len(before.examples), 'image')}, {before.similarity}"
        raise InputError(f"{file}: holds another concept of this name ({what}); give another name, or --overwrite")


def is_same(before: Concept, now: Concept) -> bool:
    """Whether two concepts are of the same images and model, up to rounding."""
    if (before.similarity, before.examples, before.model) != (now.similarity, now.examples, now.model):
        return False
    return bool((before.vector - now.vector).abs().max() <= ROUNDING * now.vector.abs().max())


@app.command("list")
def list_concepts() -> None:
    """List the concepts and latents in the folder vitreous-concepts."""
    from vitreous.trace.concept import FOLDER, Concept
    from vitreous.trace.latents import ENDING, Latents

    files = sorted(FOLDER.glob("*.safetensors"))
    for file in files:
        if file.name.endswith(ENDING):
            latents = Latents.load(file)
            typer.echo(f"{latents.name}  {len(latents)} latents of layer {latents.layer}, {latents.kind}")
            continue
        concept = Concept.load(file)
        typer.echo(f"{file.stem}  {len(concept.examples)} images, {concept.similarity}")
    if not files:
        typer.echo(f"no concepts in {FOLDER}; build one: vitreous concept build NAME IMAGES…")
