"""`vitreous study`: one command for each kind of study; what they share is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from vitreous.cli.arguments import AsJson, Device, ImageSize, LabelsFile, Memory, ProbeFile
from vitreous.errors import OptionError

app = typer.Typer(
    help="Studies on whole data sets: stored as they go, resumed where they were stopped.", no_args_is_help=True
)
OUT = Path("vitreous-out")
SHOWN = 10  # failures that are named
FEW = 12  # sentences of a study that the terminal shows

SHARED: dict[str, tuple[Any, Any]] = {
    "data": (
        Annotated[
            str,
            typer.Argument(
                help="A folder of pictures or of class folders, a CSV, tar shards, a Hugging Face data set on disk.",
                metavar="DATA",
            ),
        ],
        inspect.Parameter.empty,
    ),
    "model": (
        Annotated[
            list[str] | None,
            typer.Option("--model", "-m", help="timm name, hf/…, torchvision/…, openclip/…. May be repeated."),
        ],
        None,
    ),
    "weights": (
        Annotated[
            list[str] | None,
            typer.Option("--weights", "-w", help="Checkpoint file, or random; one for each --model."),
        ],
        None,
    ),
    "target": (
        Annotated[
            str | None,
            typer.Option("--target", "-t", help="label, top-1, a class, …; several separated by commas."),
        ],
        None,
    ),
    "limit": (Annotated[int | None, typer.Option(help="Only the first so many pictures.", min=1)], None),
    "sample": (Annotated[int | None, typer.Option(help="Only so many pictures, chosen by chance.", min=1)], None),
    "seed": (Annotated[int, typer.Option(help="Of that choice, of noise and of the intervals.", min=0)], 0),
    "out": (Annotated[Path, typer.Option("--out", "-o", help="Folder for the study and its report.")], OUT),
    "engine": (Annotated[str, typer.Option(help="local, or ray: one machine or a cluster.")], "local"),
    "workers": (
        Annotated[
            int | None,
            typer.Option(help="Processes that read pictures; with --engine ray, workers that compute.", min=0),
        ],
        None,
    ),
    "address": (Annotated[str | None, typer.Option(help="Of a Ray cluster; default: Ray is started here.")], None),
    "gpus": (Annotated[float, typer.Option(help="GPUs of each Ray worker.", min=0)], 0.0),
    "batch": (Annotated[int | None, typer.Option(help="Images at a time; default: what memory allows.", min=1)], None),
    "shard": (Annotated[int | None, typer.Option(help="Images whose results are stored at a time.", min=1)], None),
    "labels": (LabelsFile, None),
    "probe": (ProbeFile, None),
    "img_size": (ImageSize, None),
    "device": (Device, None),
    "memory": (Memory, None),
    "as_json": (AsJson, False),
}
Methods = Annotated[str | None, typer.Option("--methods", "-x", help="Separated by commas; see: vitreous methods.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="A method's option: rollout.discard=0.9. May be repeated.")
]
OWN: dict[str, dict[str, tuple[Any, Any]]] = {
    "cass": {
        "samples": (Annotated[int, typer.Option(help="Noisy copies of each picture for the saliency.")], 16),
        "sigma": (Annotated[float, typer.Option(help="Noise, as a share of the picture's range of values.")], 0.15),
        "space": (
            Annotated[str, typer.Option(help="Where attention and saliency are compared: patch or pixel.")],
            "patch",
        ),
    },
    "spread": {
        "aggregate": (
            Annotated[str, typer.Option(help="Whose entropy sorts the images: mean, min, max or rollout.")],
            "mean",
        ),
    },
    "compare": {"methods": (Methods, None), "options": (SetOption, None)},
    "leaderboard": {
        "methods": (Methods, None),
        "metrics": (
            Annotated[str | None, typer.Option(help="Names or families, separated by commas; see: vitreous metrics.")],
            None,
        ),
        "masks": (Annotated[Path | None, typer.Option(help="A folder with a mask for each picture.")], None),
        "options": (SetOption, None),
    },
    "maps": {"methods": (Methods, None), "options": (SetOption, None)},
}
WITHOUT_TARGET = ("spread",)
HELP = {  # the kinds themselves are imported when they run, for they import torch
    "cass": "How alike every head's attention and the saliency of the class are: per layer, per head, per class.",
    "spread": "How widely the model looks: the entropy of its attention, in four levels, with panels of each layer.",
    "compare": "How alike methods are: correlations, sparsity and signs of their scores, beside published values.",
    "leaderboard": "How good methods are, beside controls: as evaluate, but stored as it goes and resumable.",
    "maps": "Compute maps of a whole data set and store them, raw and signed.",
}


def make_command(kind: str) -> Callable[..., None]:
    """A function whose signature is what this kind shares with the others and what is its own."""
    shared = {name: one for name, one in SHARED.items() if not (name == "target" and kind in WITHOUT_TARGET)}
    fields = {**shared, **OWN[kind]}

    def command(**given: Any) -> None:
        from vitreous._support.memory import limit_memory

        with limit_memory(given.pop("memory")):
            run(kind, given)

    usual = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, usual, default=value, annotation=hint) for name, (hint, value) in fields.items()]
    )
    command.__annotations__ = {name: hint for name, (hint, _) in fields.items()}
    command.__name__, command.__doc__ = kind, HELP[kind]
    return command


for each in OWN:
    app.command(each)(make_command(each))


def run(kind: str, given: dict[str, Any]) -> None:
    from vitreous._support.progress import show_progress
    from vitreous.cli.options import parse_settings
    from vitreous.cli.results import check_out
    from vitreous.evaluation.study.plan import plan
    from vitreous.evaluation.study.run import as_targets, carry_out, make_kind, pick_engine
    from vitreous.images.dataset import read_data

    check_out(given["out"])
    engine = pick_engine(given["engine"])
    own = {name: given[name] for name in OWN[kind] if name not in ("methods", "metrics", "masks", "options")}
    settings = parse_settings(given.get("options") or [], metrics=kind == "leaderboard")
    data = read_data(given["data"], given.get("masks")).take(given["limit"], given["sample"], given["seed"])
    made = make_kind(
        kind, given.get("methods"), given.get("metrics"), settings | ({kind: own} if own else {}), data, given["seed"]
    )
    far = given["engine"] == "ray"
    planned, model = plan(
        made,
        sources(given),
        data,
        as_targets(split(given.get("target"))),
        batch=given["batch"],
        shard=given["shard"],
        device="cpu" if far else given["device"],
        choice={name: given[name] for name in ("limit", "sample", "seed")},
    )
    names = ("workers", "address", "gpus") if far else ("workers", "device")
    chosen = {name: given[name] for name in names} | ({} if far else {"loaded": model})
    quiet = given["as_json"]

    def begun(store: Any, done: int) -> None:
        if done and not quiet:
            said = f"going on with {store.folder}: {done} of {store.manifest['shards']} shards are there"
            typer.secho(said, err=True, dim=True)

    for note in planned.notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    try:
        with nullcontext() if quiet else show_progress():
            study = carry_out(planned, given["out"], engine, chosen, begun)
    except (KeyboardInterrupt, OSError) as error:
        tell_stopped(planned, given["out"], error)
        raise
    from vitreous.cli.report import tell

    raise typer.Exit(tell(study, None, quiet))


def tell_stopped(planned: Any, out: Path, error: BaseException) -> None:
    """What is safe, and how to go on."""
    from vitreous.evaluation.study.store import MANIFEST, find_store

    folder = out / f"{planned.manifest['study']}-{planned.id}"
    if not (folder / MANIFEST).is_file():
        return
    store = find_store(folder)
    remedy = "" if isinstance(error, KeyboardInterrupt) else "make room, then "
    count = f"{len(store.done())} of {store.manifest['shards']} shards"
    typer.secho(
        f"stopped: {count} are in {folder}; {remedy}the same command goes on",
        err=True,
        fg="yellow",
    )


def split(target: str | None) -> Any:
    """Several targets, separated by commas."""
    if target is None:
        return None
    words = [word.strip() for word in target.split(",") if word.strip()]
    if not words:
        raise OptionError("--target: names nothing; write label, top-1 or a class")
    return words


def sources(given: dict[str, Any]) -> list[Any]:
    """A model for each --model; --weights belong to them in their order."""
    from vitreous.cli.options import parse_size
    from vitreous.evaluation.study.plan import Source

    names: list[str | None] = list(given["model"] or [None])
    weights: list[str | None] = list(given["weights"] or [])
    if len(names) == 1 < len(weights):  # one architecture, several checkpoints
        names *= len(weights)
    if weights and len(weights) != len(names):
        raise OptionError(f"{len(weights)} --weights for {len(names)} --model; give one for each, in the same order")
    size = parse_size(given["img_size"])
    labels, probe = (None if given[name] is None else str(given[name]) for name in ("labels", "probe"))
    return [Source(name, file, size, labels, probe) for name, file in zip(names, weights or [None] * len(names))]
