"""`vitreous ablate`: what a model loses without each attention head, MLP or layer; checkpoints without some."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vitreous.cli.arguments import DataSet, Targets
from vitreous.cli.groups import grouped
from vitreous.cli.study import Engine, Sources, carry_out, models, split
from vitreous.errors import OptionError

app = typer.Typer(
    help="What a model loses without each of its parts: truly run and predicted, stored as it goes, resumed.",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class Ablating:
    """What takes the place of a part, and what is measured."""

    by: Annotated[str, typer.Option("--by", help="What takes its place: zero, mean or resample.")] = "zero"
    target: Targets = None
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Also a step of the same length in a random direction.")
    ] = True
    maps: Annotated[
        bool, typer.Option("--maps", help="Also how the class-specific map changes: a map for each part and image.")
    ] = False
    points: Annotated[
        int,
        typer.Option("--points", help="Points at which gradients are averaged to predict; 0: first order only.", min=0),
    ] = 1


@dataclass(frozen=True)
class Pruning:
    """Which parts a checkpoint is written without."""

    save: Annotated[
        Path | None, typer.Option("--save", help="Write a checkpoint without some parts: FILE.safetensors.")
    ] = None
    prune: Annotated[
        int | None, typer.Option("--prune", help="How many parts it lacks: those that are needed least.")
    ] = None
    remove: Annotated[str | None, typer.Option("--remove", help="Without these: 3.1,5.0 are heads, 3,5 others.")] = None
    rank: Annotated[
        str, typer.Option("--rank", help="Needed least by the true or predicted change, or by its size.")
    ] = "true"

    def check(self) -> None:
        if self.save is None and (self.prune is not None or self.remove is not None):
            raise OptionError("--prune and --remove say what a checkpoint lacks; name it: --save FILE.safetensors")
        if self.save is not None and (self.prune is None) == (self.remove is None):
            raise OptionError("--save needs either --prune COUNT or --remove NAMES, such as 3.1,5.0")
        if self.save is not None and self.save.suffix != ".safetensors":
            raise OptionError(f"--save {self.save}: a checkpoint is written as .safetensors; name such a file")


@app.command()
@grouped
def heads(data: DataSet, *, sources: Sources, ablating: Ablating, pruning: Pruning, engine: Engine) -> None:
    """Ablate every attention head: accuracy, confidence and maps without it."""
    run("heads", data, sources, ablating, pruning, engine)


@app.command()
@grouped
def mlps(data: DataSet, *, sources: Sources, ablating: Ablating, pruning: Pruning, engine: Engine) -> None:
    """Ablate the MLP of every layer: accuracy, confidence and maps without it."""
    run("mlps", data, sources, ablating, pruning, engine)


@app.command()
@grouped
def layers(data: DataSet, *, sources: Sources, ablating: Ablating, pruning: Pruning, engine: Engine) -> None:
    """Ablate every layer: accuracy, confidence and maps when its block is skipped."""
    run("layers", data, sources, ablating, pruning, engine)


def run(what: str, data: str, sources: Sources, ablating: Ablating, pruning: Pruning, engine: Engine) -> None:
    """Plan the ablation, compute what is missing, print its findings, and write the checkpoint."""
    from vitreous._support.memory import limit_memory
    from vitreous.cli.report import tell
    from vitreous.cli.results import check_out
    from vitreous.evaluation.study.run import pick_engine
    from vitreous.inspect.ablate.ablate import Ablation, planned_ablation

    pruning.check()
    check_out(engine.out)
    given = models(sources)
    if len(given) > 1:
        raise OptionError("ablate takes one model at a time; run it once for each --model")
    compute, far = pick_engine(engine.engine), engine.engine == "ray"
    options = {
        "what": what,
        "by": ablating.by,
        "control": ablating.control,
        "maps": ablating.maps,
        "points": ablating.points,
    }
    with limit_memory(sources.memory):
        planned, model, found = planned_ablation(
            given[0],
            data,
            {**options, "seed": engine.seed},
            split(ablating.target),
            inputs=engine.inputs,
            choice={"limit": engine.limit, "sample": engine.sample, "seed": engine.seed},
            batch=engine.batch,
            shard=engine.shard,
            device="cpu" if far else sources.device,
        )
        near = {"workers": engine.workers, "device": sources.device, "loaded": model}
        cluster = {"workers": engine.workers, "address": engine.address, "gpus": engine.gpus}
        study = carry_out(planned, engine, compute, cluster if far else near)
        code = tell(study, None, engine.as_json, planned.notes)
        if pruning.save is not None and code == 0:
            tell_saved(Ablation(study, model, found), pruning)
    raise typer.Exit(code)


def tell_saved(made: Any, pruning: Pruning) -> None:
    """Write the checkpoint and say how far it is from the ablated network."""
    saved = made.save(pruning.save, prune=pruning.prune, remove=pruning.remove, rank=pruning.rank)
    typer.echo(saved.said, err=True)
