"""`vitreous probe train` and `vitreous probe eval`: a linear classifier for your own classes on a frozen backbone."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitreous.cli.arguments import BATCH, AsJson, Backbone, ClassFolders, OutFile, Seed, Source, grouped
from vitreous.errors import OptionError

if TYPE_CHECKING:
    from vitreous.models.probe.evaluate import Evaluation
    from vitreous.models.probe.progress import Progress
    from vitreous.models.probe.train import Report

OUT = Path("probe.safetensors")
SHOWN = 10  # skipped images that are listed
FEW = 100  # steps of Adam

app = typer.Typer(help="Train a linear classifier for classes of your own, and measure it.")


@app.command()
@grouped
def train(
    data: ClassFolders,
    *,
    backbone: Backbone,
    epochs: Annotated[int, typer.Option(help="Passes over the images.", min=1)] = 10,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    validation: Annotated[
        float, typer.Option(help="Share of every class that is kept to choose the best epoch.")
    ] = 0.1,
    augment: Annotated[
        bool, typer.Option(help="Use random crops and mirroring; without, each image runs once.")
    ] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted run.")] = False,
    seed: Seed = 0,
    batch: Annotated[int, BATCH] = 128,
    out: OutFile = OUT,
    as_json: AsJson = False,
) -> None:
    """Train a linear classifier for the classes of a folder. An interrupted run goes on where it was."""
    from vitreous.images.class_folders import open_folder
    from vitreous.models.probe.resume import unfinished
    from vitreous.models.probe.train import train as train_probe

    if backbone.weights == "random":
        raise OptionError("--weights random: random weights differ on every load, so the probe could not be used again")
    open_folder(data)  # raises before a model is loaded if the folder is wrong
    network = backbone.load()
    try:
        with bar(hidden=as_json) as show:
            report = train_probe(
                network,
                data,
                out,
                epochs=epochs,
                batch=batch,
                lr=lr,
                validation=validation,
                augment=augment,
                seed=seed,
                resume=not fresh,
                progress=show,
            )
    except KeyboardInterrupt:
        if unfinished(out):
            typer.secho("note: run the same command again to resume from here", err=True, fg="yellow")
        raise
    given = {"--model": backbone.model, "--weights": backbone.weights, "--img-size": backbone.img_size}
    given |= {"--channels": backbone.bands, "--probe": str(out)}
    tell_trained(report, [word for pair in given.items() if pair[1] is not None for word in pair if word], as_json)


@app.command("eval")
@grouped
def evaluate(
    file: Annotated[Path, typer.Argument(help="A file of vitreous probe train.", metavar="PROBE")],
    data: ClassFolders,
    *,
    backbone: Backbone,
    batch: Annotated[int, BATCH] = 128,
    as_json: AsJson = False,
) -> None:
    """Measure a probe on a folder of classes: its accuracy, in all and for each class."""
    from vitreous.images.class_folders import open_folder
    from vitreous.models.probe.attach import load_probe
    from vitreous.models.probe.evaluate import evaluate as measure

    open_folder(data, load_probe(file).classes)
    probed = Source(**asdict(backbone), probe=file).load()
    with bar(hidden=as_json) as show:
        found = measure(probed, data, batch=batch, progress=show)
    tell_measured(found, as_json)


@contextmanager
def bar(hidden: bool) -> Iterator[Callable[[Progress], None]]:
    """Show the progress, loss, accuracy and time left on a terminal."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[said]}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as shown:
        tasks: dict[str, rich.TaskID] = {}

        def show(at: Progress) -> None:
            if at.stage not in tasks:
                tasks[at.stage] = shown.add_task(at.stage, total=at.total, said="")
            shown.update(tasks[at.stage], completed=at.done, total=at.total, said=said(at))

        yield show


def said(at: Progress) -> str:
    loss = "" if at.loss is None else f"loss {at.loss:.3f}  "
    return loss + ("" if at.accuracy is None else f"accuracy {at.accuracy:.1%}")


def tell_trained(report: Report, use: list[str], as_json: bool) -> None:
    """Print the file written, its accuracy and how to use it."""
    if as_json:
        told = {**asdict(report), "out": str(report.out), "skipped": as_list(report.skipped)}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        typer.echo(
            f"{report.out}: {len(report.classes)} classes on {report.backbone}, from {report.learned} images; "
            f"accuracy {report.accuracy:.1%} on {report.validated} (epoch {report.best} of {len(report.epochs)})"
        )
        typer.echo(f"use it: vitreous explain IMAGE {shlex.join(use)}")
        if report.steps < FEW:
            more = math.ceil(FEW / report.steps) * len(report.epochs)
            note = f"the data set is small, so training took only {report.steps} steps; try --epochs {more}"
            typer.secho(f"note: {note}", err=True, fg="yellow")
    tell_skipped(report.skipped)


def tell_measured(found: Evaluation, as_json: bool) -> None:
    if as_json:
        classes = [{**asdict(score), "accuracy": score.accuracy} for score in found.classes]
        told = {**asdict(found), "classes": classes, "skipped": as_list(found.skipped)}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        show_table(found)
        typer.echo(f"\naccuracy {found.accuracy:.1%} on {found.images} images, {found.model}")
    tell_skipped(found.skipped)


def show_table(found: Evaluation) -> None:
    """Print one row per class."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("class", "images", "accuracy", "most confused with"):
        table.add_column(head, justify="right" if head in ("images", "accuracy") else "left", overflow="fold")
    for score in found.classes:
        share = "–" if score.accuracy is None else f"{score.accuracy:.1%}"
        confused = "" if score.confused is None else f"{score.confused} ({score.times}×)"
        table.add_row(Text(score.name), str(score.images), share, Text(confused))
    Console(highlight=False).print(table)


def as_list(skipped: dict[str, str]) -> list[dict[str, Any]]:
    return [{"image": image, "reason": reason} for image, reason in skipped.items()]


def tell_skipped(skipped: dict[str, str]) -> None:
    for reason in list(skipped.values())[:SHOWN]:
        typer.secho(f"skipped: {reason}", err=True, fg="yellow")
    if len(skipped) > SHOWN:
        typer.secho(f"skipped: {len(skipped)} images in all", err=True, fg="yellow")
