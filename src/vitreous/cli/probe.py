"""`vitreous probe train` and `vitreous probe eval`: a linear classifier for your own classes on a frozen backbone."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitreous.cli.arguments import (
    BATCH,
    AsJson,
    Backbone,
    OutFile,
    ProbeFile,
    Replace,
    Seed,
    Source,
)
from vitreous.cli.groups import grouped
from vitreous.errors import OptionError

if TYPE_CHECKING:
    from vitreous.images.class_folders import ImageFolder
    from vitreous.models.probe.evaluate import Evaluation
    from vitreous.models.probe.progress import Progress
    from vitreous.models.probe.train import Report

OUT = Path("probe.safetensors")
SHOWN = 10  # skipped images that are listed
FEW = 100  # steps of Adam
CLASSES = typer.Argument(help="A folder with one sub-folder of images for each class.", metavar="DATA")
LimitOfClass = Annotated[int | None, typer.Option("--limit", help="Use only the first N images of each class.", min=1)]

app = typer.Typer(help="Train a linear classifier for classes of your own, and measure it.")


@app.command()
@grouped
def train(
    data: Annotated[Path, CLASSES],
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
    limit: LimitOfClass = None,
    seed: Seed = 0,
    batch: Annotated[int, BATCH] = 128,
    out: OutFile = OUT,
    overwrite: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Train a linear classifier for the classes of a folder. An interrupted run goes on where it was.

    Another probe in the same file is not replaced, unless --overwrite is given.
    """
    from vitreous.cli.places import reserved
    from vitreous.images.class_folders import open_folder
    from vitreous.models.fingerprint import fingerprint
    from vitreous.models.probe.resume import unfinished
    from vitreous.models.probe.train import train as train_probe

    if backbone.weights == "random":
        raise OptionError("--weights random: random weights differ on every load, so the probe could not be used again")
    folder = open_folder(data, limit=limit)  # raises before a model is loaded if the folder is wrong
    network = backbone.load()
    told = {"epochs": epochs, "batch": batch, "lr": lr, "validation": validation, "augment": augment, "seed": seed}
    refuse_other(out, overwrite, fingerprint(network), {**told, "images": folder.digest})
    try:
        with reserved(out), bar(hidden=as_json) as show:
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
                limit=limit,
                resume=not fresh,
                progress=show,
            )
    except KeyboardInterrupt:
        if unfinished(out):
            typer.secho("note: run the same command again to resume from here", err=True, fg="yellow")
        raise
    given = {"--model": backbone.model, "--weights": backbone.weights, "--img-size": backbone.img_size}
    given |= {"--channels": backbone.bands, "--probe": str(out)}
    use = [word for pair in given.items() if pair[1] is not None for word in pair if word]
    tell_trained(report, use, notes_of(folder, as_json), as_json)


def refuse_other(out: Path, overwrite: bool, backbone: str, told: dict[str, Any]) -> None:
    """Raise if there is a probe in this file that was trained otherwise, or anything else."""
    from vitreous.errors import InputError, WeightsError
    from vitreous.models.probe.attach import load_probe

    if not os.path.lexists(out) or out.is_dir():
        return
    try:
        before = load_probe(out)
    except WeightsError:
        raise InputError(f"{out}: is there and is not a probe; give another --out") from None
    if not overwrite and (before.fingerprint, before.options) != (backbone, told):
        what = f"{len(before.classes)} classes on {before.backbone}, trained otherwise or on other images"
        raise InputError(f"{out}: holds another probe ({what}); give another --out, or --overwrite")


@app.command("eval")
@grouped
def evaluate(
    data: Annotated[list[Path], CLASSES],
    *,
    backbone: Backbone,
    probe: ProbeFile = None,
    limit: LimitOfClass = None,
    batch: Annotated[int, BATCH] = 128,
    as_json: AsJson = False,
) -> None:
    """Measure a probe on a folder of classes: its accuracy, in all and for each class."""
    from vitreous.images.class_folders import open_folder
    from vitreous.models.probe.attach import load_probe
    from vitreous.models.probe.evaluate import evaluate as measure

    if probe is None and len(data) == 2:  # as it was written before there was --probe
        probe, data = data[0], data[1:]
    if probe is None or len(data) != 1:
        raise OptionError("give one folder of classes, and the probe with --probe FILE")
    folder = open_folder(data[0], load_probe(probe).classes, limit)
    probed = Source(**asdict(backbone), probe=probe).load()
    with bar(hidden=as_json) as show:
        found = measure(probed, data[0], batch=batch, limit=limit, progress=show)
    tell_measured(found, notes_of(folder, as_json), as_json)


def notes_of(folder: ImageFolder, quiet: bool) -> list[str]:
    """What is to be said of a folder; said at once, or for JSON by the caller."""
    notes = [] if folder.note is None else [folder.note]
    for note in () if quiet else notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    return notes


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


def tell_trained(report: Report, use: list[str], notes: list[str], as_json: bool) -> None:
    """Print the file written, its accuracy and how to use it."""
    if as_json:
        told = {**asdict(report), "out": str(report.out), "skipped": as_list(report.skipped), "notes": notes}
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


def tell_measured(found: Evaluation, notes: list[str], as_json: bool) -> None:
    if as_json:
        classes = [{**asdict(score), "accuracy": score.accuracy} for score in found.classes]
        told = {**asdict(found), "classes": classes, "skipped": as_list(found.skipped), "notes": notes}
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
