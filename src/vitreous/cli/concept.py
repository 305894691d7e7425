"""`vitreous concept build` and `vitreous concept list`: concepts from a few example images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.arguments import Backbone, Images, OutFileIfAny, grouped
from vitreous.errors import OptionError

app = typer.Typer(help="Build concepts from example images, for --target concept:NAME.")
KINDS = ("dot", "cosine", "l2")


@app.command()
@grouped
def build(
    name: Annotated[str, typer.Argument(help="Name of the concept.", metavar="NAME")],
    images: Images,
    *,
    backbone: Backbone,
    similarity: Annotated[str, typer.Option(help="dot, cosine or l2 (minus the distance).")] = "dot",
    out: OutFileIfAny = None,
) -> None:
    """Average the embeddings of example images and store the result; default: vitreous-concepts/NAME.safetensors."""
    from vitreous.images import pictures
    from vitreous.trace.concept import FOLDER, Concept

    if similarity not in KINDS:
        raise OptionError(f"--similarity {similarity}: must be one of {', '.join(KINDS)}")
    if not name.strip() or (out is None and Path(name).name != name):
        raise OptionError(f"{name!r} is not a plain name; give the name without folders, and the folder with --out")
    found = pictures.find(*images)
    concept = Concept.from_images(backbone.load(), found, similarity, name=name)
    file = concept.save(out or FOLDER / f"{name}.safetensors")
    typer.echo(f"{file}  {len(found)} images, {similarity}")
    asked = f"concept:{name if out is None else out}"
    typer.echo(
        f"use it: vitreous explain IMAGE --method cdam --target {asked}"
        + (f" --model {backbone.model}" if backbone.model else "")
    )


@app.command("list")
def list_concepts() -> None:
    """List the concepts in the folder vitreous-concepts."""
    from vitreous.trace.concept import FOLDER, Concept

    files = sorted(FOLDER.glob("*.safetensors"))
    for file in files:
        concept = Concept.load(file)
        typer.echo(f"{file.stem}  {len(concept.examples)} images, {concept.similarity}")
    if not files:
        typer.echo(f"no concepts in {FOLDER}; build one: vitreous concept build NAME IMAGES…")
