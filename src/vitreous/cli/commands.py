"""The commands and their options. The code behind a command is imported when it runs, since most of it needs torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from vitreous.cli.arguments import (
    OUT,
    AsJson,
    Backbone,
    Bands,
    Beside,
    Cells,
    Choice,
    DataSet,
    Device,
    Frames,
    Images,
    ImageSize,
    Limit,
    Masks,
    Memory,
    MethodRows,
    MethodsOrDefault,
    MetricNames,
    ModelNames,
    OneOrMoreMethods,
    OutFolder,
    Overwrite,
    Place,
    PlaceIfAny,
    PlaceOfMaps,
    Saliency,
    Seed,
    SetOption,
    Source,
    Target,
    Targets,
    WeightsFile,
    WeightsFiles,
    spelling,
)
from vitreous.cli.groups import grouped
from vitreous.cli.serve_options import AllowedModels, LatentsFiles, Workers
from vitreous.errors import OptionError

app = typer.Typer(
    name="vitreous",
    help="See what a Vision Transformer looks at, and why.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": spelling},
)


@app.command()
@grouped
def explain(
    images: Images,
    *,
    source: Source,
    methods: OneOrMoreMethods = None,
    options: SetOption = None,
    target: Targets = None,
    beside: Beside,
    cells: Cells = False,
    frames: Frames = None,
    place: PlaceOfMaps,
) -> None:
    """Explain images, or videos if the model takes them: one figure and one .npz of raw maps for each."""
    from vitreous.cli import explain as command
    from vitreous.cli.arguments import parse_settings

    with source.limited():
        command.run(
            sources=images,
            load=source.load_any,
            methods=methods,
            target=target,
            settings=parse_settings(options or []),
            beside=beside,
            cells=cells,
            place=place,
            frames=frames,
        )


@app.command()
@grouped
def evaluate(
    data: DataSet,
    *,
    source: Source,
    methods: MethodRows = None,
    metrics: MetricNames = None,
    options: SetOption = None,
    target: Target = None,
    masks: Masks = None,
    choice: Choice,
    out: OutFolder = OUT,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure how good methods are on your images: a leaderboard with controls, intervals and verdicts.

    Without --method and --metric it is a quick choice of them; without --target the label where it is known.
    """
    from vitreous.cli import evaluate as command
    from vitreous.cli.arguments import parse_settings

    with source.limited():
        command.run(
            data=data,
            load=source.load,
            methods=methods,
            metrics=metrics,
            masks=masks,
            target=target,
            settings=parse_settings(options or [], metrics=True),
            choice=choice,
            out=out,
            overwrite=overwrite,
            as_json=as_json,
        )


@app.command()
@grouped
def advise(
    images: Annotated[list[str], typer.Argument(help="Image files, folders, patterns or a CSV.", metavar="IMAGE...")],
    *,
    source: Source,
    methods: MethodRows = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="The faithfulness metric that decides; default: srg.")
    ] = None,
    target: Target = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also try methods that cost a hundred forward passes and more.")
    ] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every contender on every image, not in stages.")
    ] = False,
    choice: Choice,
    place: PlaceIfAny,
) -> None:
    """Find out which method, layer and options are most faithful for your model on your images."""
    from vitreous.cli import advise as command

    with source.limited():
        command.run(
            sources=images,
            load=source.load,
            metric=metric,
            methods=methods,
            target=target,
            thorough=thorough,
            exhaustive=exhaustive,
            choice=choice,
            place=place,
        )


@app.command()
@grouped
def cass(
    images: Images,
    *,
    source: Source,
    target: Target = None,
    saliency: Saliency,
    limit: Limit = None,
    seed: Seed = 0,
    place: Place,
) -> None:
    """Compare every head's attention with the saliency of a class: which heads look where the class is."""
    from vitreous.cli import cass as command

    with source.limited():
        command.run(
            sources=images,
            load=source.load,
            target=target,
            options={**asdict(saliency), "seed": seed},
            limit=limit,
            place=place,
        )


@dataclass(frozen=True)
class Ascent:
    """The options of activation maximisation."""

    steps: Annotated[int, typer.Option(help="Steps of the ascent.")] = 256
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the start and of the random views. Repeated: one image for each.")
    ] = None
    canvas: Annotated[str, typer.Option(help="What is optimised: fourier (frequencies) or pixel.")] = "fourier"
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.08
    decay: Annotated[float, typer.Option(help="fourier: fine detail moves less, as frequency^-decay.")] = 1.25
    copies: Annotated[int, typer.Option(help="Random views of the image in each step.")] = 2
    jitter: Annotated[int, typer.Option(help="Shift each view by up to N pixels.")] = 16
    scale: Annotated[float, typer.Option(help="Resize each view by up to 1 + scale, either way.")] = 0.25
    rotate: Annotated[float, typer.Option(help="Turn each view by up to N degrees.")] = 10.0
    noise: Annotated[float, typer.Option(help="Add noise of this standard deviation to each view.")] = 0.1
    colour: Annotated[float, typer.Option(help="Stretch each channel of a view by up to e^colour.")] = 0.3
    l2: Annotated[float, typer.Option(help="Weight of the distance from grey.")] = 0.0
    tv: Annotated[float, typer.Option(help="Weight of the total variation.")] = 0.05
    continuity: Annotated[float, typer.Option(help="Weight of steps where patches meet.")] = 1.0


@app.command()
@grouped
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
    *,
    source: Source,
    ascent: Ascent,
    place: Place,
) -> None:
    """Find the image that a class, a channel, a token or a head answers to most: figure, image and film."""
    from vitreous.cli import maximize as command

    seeds = ascent.seed or [0]
    options = {**asdict(ascent), "seed": seeds if len(seeds) > 1 else seeds[0]}
    with source.limited():
        command.run(units=unit, load=source.load, options=options, place=place)


@app.command()
@grouped
def report(
    path: Annotated[Path, typer.Argument(help="A study's folder, or the --out it was written to.", metavar="STUDY")],
    place: PlaceIfAny,
) -> None:
    """Say what a study tells, and write it as a page with figures; without --out into the study's own folder."""
    from vitreous.cli import report as command

    command.run(path, place.out, place.overwrite, place.as_json)


@app.command()
def serve(
    model: ModelNames = None,
    weights: WeightsFiles = None,
    bands: Bands = None,
    device: Device = None,
    memory: Memory = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other computers reach needs --token or --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="VITREOUS_TOKEN", help="Token that visitors give once.", show_envvar=True)
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Host name under which browsers may reach this server. May be repeated.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    latents: LatentsFiles = None,
    tokens: Annotated[
        Path | None, typer.Option(help="TOML file of tokens, each with its own limits; read again at SIGHUP.")
    ] = None,
    workers: Workers = None,
    grace: Annotated[
        float,
        typer.Option(help="Seconds that running requests and jobs get to finish after SIGTERM.", min=0, max=3600),
    ] = 5.0,
    log: Annotated[str, typer.Option(help="text: only problems; json: every request and job as a line.")] = "text",
    allow_model: AllowedModels = None,
) -> None:
    """Serve the web page, which explains and inspects models in a browser."""
    from vitreous.cli import serve as command

    place = command.Place(host, port, token, allow_host or [], tokens)
    running = command.Running(workers, memory, grace, log, browse)
    devices = [one.strip() or None for one in (device or "").split(",")]
    later = [command.named(text) for text in allow_model or []]
    loading = command.Loading(model or [None], weights or [], bands, devices, command.named_latents(latents), later)
    command.run(loading, place, running)


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
    check: Annotated[
        str | None,
        typer.Option(
            "--check", help="Check one model, named as by --model, or a file of weights: what was verified, what works."
        ),
    ] = None,
    weights: WeightsFile = None,
    img_size: ImageSize = None,
    device: Device = None,
    methods: MethodsOrDefault = None,
    as_json: AsJson = False,
) -> None:
    """List the models that can be loaded by name, or check one: the first lines of a bug report.

    A check exits with code 1 if something disagrees or fails, and with 0 if methods are only refused.
    """
    if (check is None and any((weights, img_size, device, methods))) or (check and pattern):
        raise OptionError("give --check NAME, with its own options, or only a pattern of names to list")
    if check is None:
        from vitreous.cli import listing

        listing.models(pattern, as_json)
    else:
        from vitreous.cli import check as command

        command.run(Backbone(check, weights, img_size, device=device), methods, as_json)
