"""`vitreous study`: one command for each kind of study."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vitreous.cli.arguments import (
    BATCH,
    OUT,
    AsJson,
    Bands,
    Choice,
    DataSet,
    Device,
    ImageSize,
    LabelsFile,
    Masks,
    Memory,
    MethodRows,
    MethodsOrDefault,
    MetricNames,
    ModelNames,
    OutFolder,
    OutputIs,
    ProbeFile,
    Saliency,
    SetOption,
    Targets,
    WeightsFiles,
)
from vitreous.cli.groups import grouped
from vitreous.errors import OptionError

app = typer.Typer(
    help="Studies on whole data sets: stored as they go, resumed where they were stopped.", no_args_is_help=True
)


@dataclass(frozen=True)
class Sources:
    """As `Source`, for several models."""

    model: ModelNames = None
    weights: WeightsFiles = None
    img_size: ImageSize = None
    bands: Bands = None
    device: Device = None
    labels: LabelsFile = None
    probe: ProbeFile = None
    output_is: OutputIs = "auto"
    memory: Memory = None


@dataclass(frozen=True)
class Engine(Choice):
    """The choice of images, how the study is computed and where it is stored."""

    engine: Annotated[str, typer.Option(help="local, or ray: one machine or a cluster.")] = "local"
    workers: Annotated[
        int | None, typer.Option(help="Processes that read images; with --engine ray, workers that compute.", min=0)
    ] = None
    address: Annotated[str | None, typer.Option(help="Address of a Ray cluster; default: start Ray here.")] = None
    gpus: Annotated[float, typer.Option(help="GPUs of each Ray worker.", min=0)] = 0.0
    batch: Annotated[int | None, BATCH] = None
    shard: Annotated[int | None, typer.Option(help="Images whose results are stored together.", min=1)] = None
    out: OutFolder = OUT
    as_json: AsJson = False


@dataclass(frozen=True)
class Reading(Engine):
    """As `Engine`, with where images are decoded."""

    decode: Annotated[
        str, typer.Option(help="Decode JPEG files on the cpu or the gpu; auto: on the gpu if it can.")
    ] = "cpu"


@app.command()
@grouped
def cass(data: DataSet, *, sources: Sources, target: Targets = None, saliency: Saliency, engine: Reading) -> None:
    """How alike every head's attention and the saliency of the class are: per layer, per head, per class."""
    run("cass", data, sources, engine, target, {"cass": asdict(saliency)})


@app.command()
@grouped
def spread(
    data: DataSet,
    *,
    sources: Sources,
    aggregate: Annotated[str, typer.Option(help="Whose entropy sorts the images: mean, min, max or rollout.")] = "mean",
    engine: Reading,
) -> None:
    """How widely the model looks: the entropy of its attention, in four levels, with panels of each layer."""
    run("spread", data, sources, engine, None, {"spread": {"aggregate": aggregate}})


@app.command()
@grouped
def compare(
    data: DataSet,
    *,
    sources: Sources,
    methods: MethodsOrDefault = None,
    options: SetOption = None,
    target: Targets = None,
    engine: Reading,
) -> None:
    """How alike methods are: correlations, sparsity and signs of their scores, beside published values."""
    run("compare", data, sources, engine, target, parse(options), methods)


@app.command()
@grouped
def leaderboard(
    data: DataSet,
    *,
    sources: Sources,
    methods: MethodRows = None,
    metrics: MetricNames = None,
    options: SetOption = None,
    target: Targets = None,
    masks: Masks = None,
    engine: Reading,
) -> None:
    """How good methods are, beside controls: as evaluate, but stored as it goes and resumable."""
    run("leaderboard", data, sources, engine, target, parse(options, metrics=True), methods, metrics, masks)


@app.command()
@grouped
def maps(
    data: DataSet,
    *,
    sources: Sources,
    methods: MethodsOrDefault = None,
    options: SetOption = None,
    target: Targets = None,
    engine: Reading,
) -> None:
    """Compute maps of a whole data set and store them, raw and signed."""
    run("maps", data, sources, engine, target, parse(options), methods)


@dataclass(frozen=True)
class Cues:
    """How cues are found and tested."""

    layer: Annotated[
        int | None, typer.Option(help="Cluster the patch features of this block; default: the middle one.")
    ] = None
    classes: Annotated[
        str | None, typer.Option(help="Look at these classes only: names or numbers, separated by commas.")
    ] = None
    clusters: Annotated[int, typer.Option(help="Test at most N clusters of a class.", min=1)] = 12
    parts: Annotated[int, typer.Option(help="Parts of an image: its N most relevant patches.", min=1)] = 16
    images: Annotated[int, typer.Option(help="Leave out classes with fewer images.", min=4)] = 10
    hosts: Annotated[int, typer.Option(help="Insert each cue into N images of other classes.", min=4)] = 24
    level: Annotated[float, typer.Option(help="The chance of any false alarm.")] = 0.05


@app.command()
@grouped
def shortcuts(
    data: DataSet,
    *,
    sources: Sources,
    methods: MethodsOrDefault = None,
    options: SetOption = None,
    target: Targets = None,
    masks: Masks = None,
    cues: Cues,
    engine: Reading,
) -> None:
    """Find spurious cues: clusters of relevant patches, removed, inserted into other classes and ranked."""
    own = asdict(cues)
    own["classes"] = None if cues.classes is None else split(cues.classes, "--classes is empty; name some classes")
    run("shortcuts", data, sources, engine, target, {**parse(options), "shortcuts": own}, methods, masks=masks)


def parse(options: list[str] | None, metrics: bool = False) -> dict[str, dict[str, Any]]:
    from vitreous.cli.arguments import parse_settings

    return parse_settings(options or [], metrics)


def run(
    kind: str,
    data: str,
    sources: Sources,
    engine: Reading,
    target: str | None,
    settings: Mapping[str, Mapping[str, Any]],
    methods: str | None = None,
    metrics: str | None = None,
    masks: Path | None = None,
) -> None:
    """Plan a study, compute what is missing and print its findings."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli.report import tell
    from vitreous.cli.results import check_out
    from vitreous.evaluation.study.plan import plan
    from vitreous.evaluation.study.run import as_targets, make_kind, pick_engine
    from vitreous.images.dataset import read_data

    check_out(engine.out)
    compute, far = pick_engine(engine.engine), engine.engine == "ray"
    found = read_data(data, masks).with_inputs(engine.inputs).take(engine.limit, engine.sample, engine.seed).stamped()
    with limit_memory(sources.memory):
        planned, model = plan(
            make_kind(kind, methods, metrics, settings, found, engine.seed),
            models(sources),
            found,
            as_targets(split(target)),
            batch=engine.batch,
            shard=engine.shard,
            device="cpu" if far else sources.device,
            choice={"limit": engine.limit, "sample": engine.sample, "seed": engine.seed},
            decode=engine.decode,
        )
        near = {"workers": engine.workers, "device": sources.device, "loaded": model}
        cluster = {"workers": engine.workers, "address": engine.address, "gpus": engine.gpus}
        study = carry_out(planned, engine, compute, cluster if far else near)
        raise typer.Exit(tell(study, None, engine.as_json, planned.notes))


def carry_out(planned: Any, engine: Engine, compute: Any, chosen: dict[str, Any]) -> Any:
    """Compute the study; on an interrupt, print what is stored and how to resume."""
    from vitreous._support.progress import show_progress
    from vitreous.evaluation.study import run as study

    for note in () if engine.as_json else planned.notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    try:
        with nullcontext() if engine.as_json else show_progress():
            return study.carry_out(planned, engine.out, compute, chosen, tell_begun(engine.as_json))
    except (KeyboardInterrupt, OSError) as error:
        tell_stopped(planned, engine.out, error)
        raise


def tell_begun(quiet: bool) -> Callable[[Any, int], None]:
    """Print what an earlier run has left, before the rest is computed."""

    def begun(store: Any, done: int) -> None:
        if done and not quiet:
            said = f"resuming {store.folder}: {done} of {store.manifest['shards']} shards are complete"
            typer.secho(said, err=True, dim=True)

    return begun


def tell_stopped(planned: Any, out: Path, error: BaseException) -> None:
    """Print what is stored and how to resume."""
    from vitreous.evaluation.study.read import Study
    from vitreous.evaluation.study.store import MANIFEST, find_store

    folder = out / f"{planned.manifest['study']}-{planned.id}"
    if not (folder / MANIFEST).is_file():
        return
    study = Study(find_store(folder))
    remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, then ")
    remedies |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable, then ")
    remedy = remedies.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    typer.secho(
        f"stopped: {study.progress} are in {folder}; {remedy}run the same command again to resume",
        err=True,
        fg="yellow",
    )


def split(given: str | None, empty: str = "--target is empty; give label, top-1 or a class") -> Any:
    """Parse several targets or classes, separated by commas."""
    if given is None:
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not words:
        raise OptionError(empty)
    return words


def models(sources: Sources) -> list[Any]:
    """A model for each --model; --weights are paired with them in order."""
    from vitreous.cli.values import parse_bands, parse_size
    from vitreous.evaluation.study.plan import Source

    names: list[str | None] = [*sources.model] if sources.model else [None]
    weights: list[str | None] = [*(sources.weights or [])]
    if len(names) == 1 < len(weights):  # one architecture, several checkpoints
        names *= len(weights)
    if weights and len(weights) != len(names):
        raise OptionError(f"{len(weights)} --weights for {len(names)} --model; give one for each, in the same order")
    size, bands = parse_size(sources.img_size), parse_bands(sources.bands)
    labels, probe = (None if file is None else str(file) for file in (sources.labels, sources.probe))
    kind, pairs = sources.output_is, zip(names, weights or [None] * len(names))
    return [Source(name, file, size, labels, probe, bands=bands, output=kind) for name, file in pairs]
