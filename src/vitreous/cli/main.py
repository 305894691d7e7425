"""`vitreous`: the commands and their options."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from vitreous._support.cpu import work_around_amx
from vitreous.cli.arguments import (
    AsJson,
    Device,
    ImageSize,
    LabelsFile,
    Memory,
    ModelName,
    ProbeFile,
    WeightsFile,
)
from vitreous.cli.concept import app as concept_app
from vitreous.cli.inspect import app as inspect_app
from vitreous.cli.probe import app as probe_app
from vitreous.cli.study import app as study_app
from vitreous.errors import VitreousError
from vitreous.version import VERSION

INTERRUPTED = 130
OUT = Path("vitreous-out")
COMMANDS = (
    "advise",
    "cass",
    "concept",
    "doctor",
    "evaluate",
    "explain",
    "inspect",
    "maximize",
    "methods",
    "metrics",
    "models",
    "probe",
    "report",
    "serve",
    "study",
)

app = typer.Typer(
    name="vitreous",
    help="See what a Vision Transformer looks at, and why.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(concept_app, name="concept")
app.add_typer(inspect_app, name="inspect")
app.add_typer(probe_app, name="probe")
app.add_typer(study_app, name="study")


def version(asked: bool | None) -> None:
    if asked:
        typer.echo(f"vitreous {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool | None, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = None,
) -> None:
    """See what a Vision Transformer looks at, and why."""
    notice = work_around_amx()  # before a command imports torch
    if notice:
        typer.secho(f"note: {notice}", err=True)


@app.command()
def explain(
    images: Annotated[list[str], typer.Argument(help="Pictures, folders or patterns.", metavar="IMAGE...")],
    model: ModelName = None,
    weights: WeightsFile = None,
    method: Annotated[
        str, typer.Option("--method", "-x", help="One or more, separated by commas, or all; see: vitreous methods.")
    ] = "attention,rollout",
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Class number or name, top-1, a-b; several separated by commas."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the figures and the raw maps.")] = OUT,
    options: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="A method's option: rollout.discard=0.9. May be repeated.")
    ] = None,
    labels: LabelsFile = None,
    probe: ProbeFile = None,
    img_size: ImageSize = None,
    device: Device = None,
    memory: Memory = None,
    cells: Annotated[bool, typer.Option("--cells", help="Show the true patches, not a smooth map.")] = False,
    as_json: AsJson = False,
) -> None:
    """Explain pictures: one figure and one .npz of raw maps for each."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import explain as command
    from vitreous.cli.options import load_model, parse_settings

    with limit_memory(memory):
        command.run(
            sources=images,
            load=lambda: load_model(model, weights, device, img_size, labels, probe),
            methods=method,
            target=target,
            settings=parse_settings(options or []),
            out=out,
            cells=cells,
            as_json=as_json,
        )


@app.command()
def evaluate(
    data: Annotated[
        str,
        typer.Argument(
            help="A folder of pictures or of class folders, or a CSV (image, label, mask or box).", metavar="DATA"
        ),
    ],
    model: ModelName = None,
    weights: WeightsFile = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", "-x", help="Separated by commas, or all; default: a quick choice. See: vitreous methods."
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Names or families, separated by commas, or all; see: vitreous metrics."),
    ] = None,
    masks: Annotated[
        Path | None, typer.Option("--masks", help="A folder with a mask for each picture, of the same name.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="label, top-1, a class, …; default: the label where it is known."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many pictures.", min=1)] = None,
    sample: Annotated[int | None, typer.Option(help="Only so many pictures, chosen by chance.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of that choice and of the intervals.", min=0)] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report and the tables.")] = OUT,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="A method's or metric's option: deletion.steps=20. May be repeated."),
    ] = None,
    labels: LabelsFile = None,
    probe: ProbeFile = None,
    img_size: ImageSize = None,
    device: Device = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Measure how good methods are on your pictures: a leaderboard with controls, intervals and verdicts."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import evaluate as command
    from vitreous.cli.options import load_model, parse_settings

    with limit_memory(memory):
        command.run(
            data=data,
            load=lambda: load_model(model, weights, device, img_size, labels, probe),
            methods=methods,
            metrics=metrics,
            masks=masks,
            target=target,
            settings=parse_settings(options or [], metrics=True),
            limit=limit,
            sample=sample,
            seed=seed,
            out=out,
            as_json=as_json,
        )


@app.command()
def advise(
    images: Annotated[list[str], typer.Argument(help="Pictures, folders, patterns or a CSV.", metavar="IMAGE...")],
    model: ModelName = None,
    weights: WeightsFile = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="The faithfulness metric that decides; default: srg.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-x", help="Only these, separated by commas; default: all quick ones.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="label, top-1, a class, …")] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also methods that cost a hundred forward passes and more.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first so many pictures.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the intervals.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the whole table and a report.")] = None,
    labels: LabelsFile = None,
    probe: ProbeFile = None,
    img_size: ImageSize = None,
    device: Device = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Find out which method, layer and options are most faithful for your model on your pictures."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import advise as command
    from vitreous.cli.options import load_model

    with limit_memory(memory):
        command.run(
            sources=images,
            load=lambda: load_model(model, weights, device, img_size, labels, probe),
            metric=metric,
            methods=methods,
            target=target,
            thorough=thorough,
            limit=limit,
            seed=seed,
            out=out,
            as_json=as_json,
        )


@app.command()
def cass(
    images: Annotated[list[str], typer.Argument(help="Pictures, folders or patterns.", metavar="IMAGE...")],
    model: ModelName = None,
    weights: WeightsFile = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="Class number or name, top-1, a-b.")] = None,
    samples: Annotated[int, typer.Option(help="Noisy copies of each picture for the saliency.")] = 16,
    sigma: Annotated[float, typer.Option(help="Noise, as a share of the picture's range of values.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Another seed gives other noise.")] = 0,
    space: Annotated[str, typer.Option(help="Where attention and saliency are compared: patch or pixel.")] = "patch",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the figures and the numbers.")] = OUT,
    labels: LabelsFile = None,
    probe: ProbeFile = None,
    img_size: ImageSize = None,
    device: Device = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Compare every head's attention with the saliency of a class: which heads look where the class is."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import cass as command
    from vitreous.cli.options import load_model

    with limit_memory(memory):
        command.run(
            sources=images,
            load=lambda: load_model(model, weights, device, img_size, labels, probe),
            target=target,
            options={"samples": samples, "sigma": sigma, "seed": seed, "space": space},
            out=out,
            as_json=as_json,
        )


@app.command()
def maximize(
    unit: Annotated[
        list[str],
        typer.Option(
            "--unit",
            "-u",
            help="class:NAME, neuron:K, block:L/channel:C, token:L/T (a number, cls or row,column), "
            "token:L/T/channel:C, head:L/H/q:C or head:L/H/k:C. May be repeated, or separated by commas.",
        ),
    ],
    model: ModelName = None,
    weights: WeightsFile = None,
    steps: Annotated[int, typer.Option(help="Of the ascent.")] = 256,
    seed: Annotated[
        list[int] | None, typer.Option(help="Of the start and the random views. Repeated: a picture for each.")
    ] = None,
    canvas: Annotated[str, typer.Option(help="What is moved: fourier (frequencies) or pixel.")] = "fourier",
    rate: Annotated[float, typer.Option(help="How far a step goes.")] = 0.08,
    decay: Annotated[float, typer.Option(help="fourier: fine detail moves less, as frequency^-decay.")] = 1.25,
    copies: Annotated[int, typer.Option(help="Random views of the picture in each step.")] = 2,
    jitter: Annotated[int, typer.Option(help="Views are shifted by up to so many pixels,")] = 16,
    scale: Annotated[float, typer.Option(help="resized by up to 1 + scale either way,")] = 0.25,
    rotate: Annotated[float, typer.Option(help="turned by up to so many degrees,")] = 10.0,
    noise: Annotated[float, typer.Option(help="given noise of this deviation,")] = 0.1,
    colour: Annotated[float, typer.Option(help="and each channel stretched by up to e^colour.")] = 0.3,
    l2: Annotated[float, typer.Option(help="Weight of the distance from grey.")] = 0.0,
    tv: Annotated[float, typer.Option(help="Weight of the total variation.")] = 0.05,
    continuity: Annotated[float, typer.Option(help="Weight of steps where patches meet.")] = 1.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = OUT,
    labels: LabelsFile = None,
    probe: ProbeFile = None,
    img_size: ImageSize = None,
    device: Device = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Find the picture that a class, a channel, a token or a head answers to most: figure, picture and film."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import maximize as command
    from vitreous.cli.options import load_model

    options = {
        "steps": steps,
        "seed": seed if seed and len(seed) > 1 else seed[0] if seed else 0,
        "canvas": canvas,
        "rate": rate,
        "decay": decay,
        "copies": copies,
        "jitter": jitter,
        "scale": scale,
        "rotate": rotate,
        "noise": noise,
        "colour": colour,
        "l2": l2,
        "tv": tv,
        "continuity": continuity,
    }
    with limit_memory(memory):
        command.run(
            units=unit,
            load=lambda: load_model(model, weights, device, img_size, labels, probe),
            options=options,
            out=out,
            as_json=as_json,
        )


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="A study's folder, or the --out it was written to.", metavar="STUDY")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the page and the figures; default: the study's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a study tells, and write it as a page with figures."""
    from vitreous.cli import report as command

    command.run(path, out, as_json)


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="As for explain; may be repeated. Default: the embedded one."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", "-w", help="Checkpoint file, or random: one for each --model, in the same order."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this computer it needs --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="VITREOUS_TOKEN", help="What visitors must bring, once.", show_envvar=True)
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which visitors may call this server. May be repeated.")
    ] = None,
    device: Device = None,
    memory: Memory = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Look around inside models in the browser."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli import serve as command

    with limit_memory(memory):
        place = command.Place(host, port, token, allow_host or [])
        command.run(model or [None], weights or [], device, place, browse)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its formula and options.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or show one with its formula and options."""
    from vitreous.cli import listing

    listing.methods(name, as_json)


@app.command()
def metrics(
    name: Annotated[str | None, typer.Argument(help="One metric, with its formula and options.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the metrics, or show one with its formula and options."""
    from vitreous.cli import listing

    listing.metrics(name, as_json)


@app.command()
def models(
    pattern: Annotated[str | None, typer.Argument(help="Part of a name, or a pattern with *.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that can be loaded by name."""
    from vitreous.cli import listing

    listing.models(pattern, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, devices, what is installed and whether it works: the first lines of a report of a problem."""
    from vitreous.cli import doctor as command

    command.run(as_json)


def main() -> None:
    """Run a command; what goes wrong on purpose is one line and exit code 2."""
    warnings.formatwarning = brief
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where it keeps its fonts is no news
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ≥ shows a question mark
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except VitreousError as error:
        code = fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        said = explained(error)
        code = crash() if said is None else fail(said)
    if code == INTERRUPTED:
        typer.secho("interrupted", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def fail(said: str) -> int:
    typer.secho(f"error: {said}", err=True, fg="red")
    return 2


def crash() -> int:
    """What we did wrong: the whole traceback, and how to report it."""
    import traceback

    from vitreous.cli.health import one_line

    traceback.print_exc()
    typer.secho(f"\n{one_line()}", err=True)
    said = "this is a mistake in vitreous; please report it with the lines above and those of: vitreous doctor"
    typer.secho(f"error: {said}", err=True, fg="red")
    return 1


def explained(error: Exception) -> str | None:
    """One line for what the user or the machine did; nothing for what we did wrong: that needs its traceback."""
    if hasattr(error, "format_message"):  # a usage error of Typer's
        words = " ".join(sys.argv[1:2]) if sys.argv[1:2] and sys.argv[1] in COMMANDS else ""
        said = " ".join(error.format_message().split()).rstrip(".")
        return f"{said}; see: {f'vitreous {words}'.strip()} --help"
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU has too little memory for this; try a smaller --img-size, fewer methods or --device cpu"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "there is too little memory for this, even for one image; try a smaller --img-size"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None


def brief(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Our own warnings are one line; others keep the place they come from."""
    return (
        f"note: {message}\n"
        if category.__module__.startswith("vitreous.")
        else usual(message, category, *where, **more)
    )


usual = warnings.formatwarning
