"""`vitreous ask` and `vitreous words`: the commands of models that see and read."""

from __future__ import annotations

from typing import Annotated

import typer

from vitreous.cli.arguments import Backbone, Memory, Place, SetOption
from vitreous.cli.commands import app
from vitreous.cli.groups import grouped

Picture = Annotated[str, typer.Argument(help="An image file.", metavar="IMAGE")]


@app.command()
@grouped
def ask(
    image: Picture,
    question: Annotated[str, typer.Argument(help="The question.", metavar="QUESTION")],
    *,
    backbone: Backbone,
    memory: Memory = None,
    method: Annotated[str, typer.Option("--method", "-x", help="One method; see: vitreous methods.")] = "gae",
    options: SetOption = None,
    answer: Annotated[
        str | None, typer.Option("--answer", help="The answer to explain; default: the model's own.")
    ] = None,
    words: Annotated[
        str,
        typer.Option("--words", help="all, the first N, or words of the answer separated by commas: token:dog,word:3."),
    ] = "all",
    most: Annotated[int, typer.Option("--max-tokens", help="Tokens of an answer at most.", min=1)] = 32,
    place: Place,
) -> None:
    """Ask a vision-language model about an image: one map for each word of its answer."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import answers as command

    with limit_memory(memory):
        command.ask(image, question, backbone, method, options or [], answer, words, most, place)


@app.command()
@grouped
def words(
    image: Picture,
    text: Annotated[str, typer.Argument(help="The text.", metavar="TEXT")],
    *,
    backbone: Backbone,
    method: Annotated[str, typer.Option("--method", "-x", help="gradient, gae or occlusion.")] = "gradient",
    place: Place,
) -> None:
    """Find which words of a text make it fit an image, with a CLIP-like model: a figure and the numbers."""
    from vitreous.cli import answers as command

    command.words(image, text, backbone, method, place)
