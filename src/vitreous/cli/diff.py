"""`vitreous diff`: two checkpoints on one data set; the exit code says whether they differ by more than is allowed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitreous.cli.arguments import (
    Bands,
    DataSet,
    Device,
    ImageSize,
    LabelsFile,
    Memory,
    OutputIs,
    SetOption,
)
from vitreous.cli.commands import app
from vitreous.cli.groups import grouped
from vitreous.cli.study import Engine
from vitreous.errors import OptionError

if TYPE_CHECKING:
    from vitreous.evaluation.diff.result import Difference
    from vitreous.evaluation.study.plan import Source

SIDE = "a name as --model takes it, a folder, or a file of weights (of --model); ends with :bfloat16 for a precision."
NONE = "none"


@dataclass(frozen=True)
class Architecture:
    """What both models share."""

    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The architecture, where A or B are files of weights.")
    ] = None
    img_size: ImageSize = None
    bands: Bands = None
    device: Device = None
    labels: LabelsFile = None
    output_is: OutputIs = "auto"
    memory: Memory = None


@dataclass(frozen=True)
class Allowed:
    """How much may differ; a check fails if its whole 95 % interval lies beyond the limit. 1: anything may."""

    max_flips: Annotated[float, typer.Option(help="Share of images with another answer.", min=0, max=1)] = 0.05
    max_drop: Annotated[float, typer.Option(help="Accuracy that may be lost; needs labels.", min=0, max=1)] = 0.02
    max_moved: Annotated[
        float, typer.Option(help="Share with another reason, of the images with the same answer.", min=0, max=1)
    ] = 0.1
    min_correlation: Annotated[
        float | None, typer.Option(help="Median rank correlation of the maps; default: any.", min=-1, max=1)
    ] = None


@app.command()
@grouped
def diff(
    a: Annotated[str, typer.Argument(help=f"The model that was: {SIDE}", metavar="A")],
    b: Annotated[str, typer.Argument(help="The model that is to replace it, given in the same way.", metavar="B")],
    data: DataSet,
    *,
    both: Architecture,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-x", help="One method; see: vitreous methods.", show_default="the best quick map for a class"
        ),
    ] = None,
    metric: Annotated[str, typer.Option("--metric", help="Metric of faithfulness; none: not measured.")] = "srg",
    options: SetOption = None,
    allowed: Allowed,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write the checks as JUnit XML to this file.")] = None,
    engine: Engine,
) -> None:
    """Compare two checkpoints: the same answers, for the same reasons? Exit code 1 if more differs than is allowed."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli.arguments import parse_settings
    from vitreous.evaluation.diff.run import Wanted

    wanted = Wanted(method, None if metric == NONE else metric, parse_settings(options or [], True), engine.seed)
    sources = [side(one, both) for one in (a, b)]
    if both.model is not None and all(source.weights is None for source in sources):
        raise OptionError(f"--model {both.model}: neither {a} nor {b} is a file of weights; name the models themselves")
    with limit_memory(both.memory):
        raise typer.Exit(run(sources, data, both, wanted, allowed, junit, engine))


def side(given: str, both: Architecture) -> Source:
    """One of the two models, with what both share."""
    from dataclasses import replace

    from vitreous.cli.values import parse_bands, parse_size
    from vitreous.evaluation.diff.run import as_side

    labels = None if both.labels is None else str(both.labels)
    more: dict[str, Any] = {"img_size": parse_size(both.img_size), "bands": parse_bands(both.bands)}
    return replace(as_side(given, both.model), labels=labels, output=both.output_is, **more)


def run(
    sources: list[Source],
    data: str,
    both: Architecture,
    wanted: Any,
    allowed: Allowed,
    junit: Path | None,
    engine: Engine,
) -> int:
    """Plan the comparison, compute what is missing, and print and write what it shows."""
    from vitreous.cli.results import check_out
    from vitreous.evaluation.diff.limits import Limits
    from vitreous.evaluation.diff.result import Difference
    from vitreous.evaluation.diff.run import kind_of, plan_diff
    from vitreous.images.dataset import read_data

    check_out(engine.out)
    limits, far = Limits(**asdict(allowed)), engine.engine == "ray"
    found = read_data(data).with_inputs(engine.inputs).take(engine.limit, engine.sample, engine.seed).stamped()
    choice = {"limit": engine.limit, "sample": engine.sample, "seed": engine.seed}
    how: dict[str, Any] = {"batch": engine.batch, "shard": engine.shard, "device": both.device, "far": far}
    planned = plan_diff(sources, found, wanted, choice=choice, **how)
    near = {"workers": engine.workers, "device": both.device}
    cluster = {"workers": engine.workers, "address": engine.address, "gpus": engine.gpus}
    study = computed(planned, engine, cluster if far else near)
    return tell(Difference.of(study, kind_of(study).shared, limits), junit, planned.notes, engine.as_json)


def computed(planned: Any, engine: Engine, chosen: dict[str, Any]) -> Any:
    """Compute both models' rows; on an interrupt, print what is stored and how to resume."""
    from vitreous._support.progress import show_progress
    from vitreous.cli.study import tell_begun, tell_stopped
    from vitreous.evaluation.diff.run import carry_out_diff
    from vitreous.evaluation.study.run import pick_engine

    compute = pick_engine(engine.engine)
    for note in () if engine.as_json else planned.notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    try:
        with nullcontext() if engine.as_json else show_progress():
            return carry_out_diff(planned, engine.out, compute, chosen, tell_begun(engine.as_json))
    except (KeyboardInterrupt, OSError) as error:
        tell_stopped(planned, engine.out, error)
        raise


def tell(result: Difference, junit: Path | None, notes: list[str], quiet: bool) -> int:
    """Write everything and print it; the exit code: 0 within the limits, 1 beyond, 2 if no image could be compared."""
    from vitreous.cli.report import show, tell_failures
    from vitreous.evaluation.diff.run import write
    from vitreous.evaluation.report.study import as_json

    files = write(result)
    files += [] if junit is None else [result.save_junit(junit)]
    found = {result.title: result.findings()}
    report = next(file for file in files if file.name == "report.html")
    if quiet:
        told = as_json(result.study, found) | {"folder": str(result.study.folder), "report": str(report)}
        told |= {"passed": result.passed, "notes": notes, "files": [str(file) for file in files]}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        show(result.study, found)
        for file in (report, *(() if junit is None else (junit,))):
            typer.echo(f"report: {file}")
    tell_failures(result.study)
    return 0 if result.passed else 1 if result.gathered.pairs else 2
