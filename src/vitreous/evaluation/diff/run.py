"""Runs `diff`: the first model explains its labels or answers, then the second explains the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitreous.errors import OptionError
from vitreous.evaluation.diff.kind import Diff, refuse
from vitreous.evaluation.diff.limits import Limits, write_limits
from vitreous.evaluation.diff.result import Difference
from vitreous.evaluation.diff.sides import match_classes, match_views, usual_method
from vitreous.evaluation.leaderboard import show_inputs
from vitreous.evaluation.report.study import write_report
from vitreous.evaluation.study.kind import Settings
from vitreous.evaluation.study.plan import Planned, Source, plan
from vitreous.evaluation.study.read import Study
from vitreous.evaluation.study.run import as_source, carry_out, pick_engine
from vitreous.evaluation.study.store import Store
from vitreous.images.dataset import Data, read_data
from vitreous.models.model import Model
from vitreous.registry import METHODS, METRICS

DTYPES = ("float32", "float64", "bfloat16", "float16")
Given = Model | nn.Module | str | Path | Source
Begun = Callable[[Store, int], None]


def diff(
    a: Given,
    b: Given,
    data: str | Path | Sequence[str | Path] | Data,
    out: str | Path = "vitreous-out",
    *,
    method: str | None = None,
    metric: str | None = "srg",
    options: Settings | None = None,
    max_flips: float | int | None = 0.05,
    max_drop: float | int | None = 0.02,
    max_moved: float | int | None = 0.1,
    min_correlation: float | int | None = None,
    inputs: str | Path | Mapping[str, Any] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    gpus: float = 0.0,
    batch: int | None = None,
    shard: int | None = None,
    device: str | None = None,
) -> Difference:
    """Compare two checkpoints on a data set: the same answers, for the same reasons? Stored, and resumed if stopped.

    `a`, `b`: models or what `load` takes; "NAME:bfloat16" is a model in another precision. `method`: whose maps are
    compared; None: the best quick one for a class. `metric`: of faithfulness; None: not measured. `options`: of method
    and metric, {"srg": {"of": "logit"}}. The limits are those of the command: shares of the images, None for any.
    Everything else as in `run_study`. The report, findings.json and images.parquet are written to the study's folder.
    """
    whole = data if isinstance(data, Data) else read_data(data)
    found = whole.with_inputs(inputs).take(limit, sample, seed).stamped()
    limits = Limits(max_flips, max_drop, max_moved, min_correlation)
    planned = plan_diff(
        [as_side(one) for one in (a, b)],
        found,
        Wanted(method, metric, options or {}, seed),
        choice={"limit": limit, "sample": sample, "seed": seed},
        batch=batch,
        shard=shard,
        device=device,
        far=engine == "ray",
    )
    far = {"workers": workers, "address": address, "gpus": gpus}
    made = carry_out_diff(
        planned, Path(out), pick_engine(engine), far if engine == "ray" else {"workers": workers, "device": device}
    )
    result = Difference.of(made, kind_of(made).shared, limits)
    write(result)
    return result


@dataclass(frozen=True)
class Wanted:
    """What is computed of each image."""

    method: str | None
    metric: str | None
    settings: Settings
    seed: int


def as_side(given: Given, model: str | None = None) -> Source:
    """A model from its name or file, perhaps with a precision; `model`: the architecture of a file of weights."""
    if not isinstance(given, str | Path):
        return as_source(given)
    text = str(given)
    head, _, tail = text.rpartition(":")
    spec, dtype = (head, tail) if head and tail in DTYPES else (text, None)
    file = Path(spec.partition("#")[0]).expanduser()
    if model is not None and file.is_file():
        return Source(model, spec, dtype=dtype)
    return Source(spec, dtype=dtype)


def plan_diff(
    sources: Sequence[Source],
    data: Data,
    wanted: Wanted,
    *,
    choice: dict[str, Any],
    batch: int | None = None,
    shard: int | None = None,
    device: str | None = None,
    far: bool = False,
) -> Planned:
    """Check that the two models can be compared, and plan the study."""
    models = [source.load("cpu" if far else device) for source in sources]
    for model in models:
        show_inputs(model, data)
        refuse(model)
    kind, notes = make_kind(models[0], models[1], wanted, data.beside([0]))
    ready = sources if far else [replace(one, ready=model) for one, model in zip(sources, models)]
    planned, _ = plan(kind, ready, data, batch=batch, shard=shard, device="cpu" if far else device, choice=choice)
    return replace(planned, notes=[*planned.notes, *notes])


def make_kind(a: Model, b: Model, wanted: Wanted, beside: Any = None) -> tuple[Diff, list[str]]:
    """The kind of study with all its options, checked, and notes for the reader."""
    name = METHODS[wanted.method].name if wanted.method else usual_method((a, b), beside)
    if not METHODS[name].targeted:
        raise OptionError(f"{name} does not depend on a class, so its maps are no reasons for one; try centred_lrp")
    measure = None if wanted.metric is None else METRICS[wanted.metric]
    if measure is not None and (measure.family != "faithfulness" or measure.masks):
        raise OptionError(f"{measure.name} does not measure faithfulness; give srg, token_deletion or None")
    known = {name, *([] if measure is None else [measure.name])}
    for other in wanted.settings:
        if other not in known:
            raise OptionError(f"options for {other}: it is neither the method nor the metric ({', '.join(known)})")
    settings = {one: dict(wanted.settings.get(one, {})) for one in known}
    classes, notes = match_classes(a, b)
    seen, more = match_views(a, b)
    kind = Diff(
        name,
        METHODS[name].check(settings[name]),
        None if measure is None else measure.name,
        {} if measure is None else measure.check(settings[measure.name]),
        classes,
        None if seen is None else [list(box) for box in seen],
        wanted.seed,
    )
    return kind, [*notes, *more]


def carry_out_diff(
    planned: Planned,
    out: Path,
    run: Callable[..., None],
    settings: Mapping[str, Any],
    begun: Begun | None = None,
) -> Study:
    """The shards of the first model, then those of the second, which explains what the first did."""
    first = carry_out(replace(planned, data=planned.data[:1]), out, run, settings, begun)
    kind = planned.recipe.kind
    assert isinstance(kind, Diff)
    aimed = kind.aimed(targets_of(first.of(planned.recipe.names[0])))
    return carry_out(replace(planned, recipe=replace(planned.recipe, kind=aimed)), out, run, settings)


def targets_of(study: Study) -> list[int | None]:
    """The class that the first model explained in each image; None where it failed."""
    return [None if one is None else int(one) for one in study.to_arrow(["target"])["target"].to_pylist()]


def kind_of(study: Study) -> Diff:
    assert isinstance(study.kind, Diff)
    return study.kind


def write(result: Difference) -> list[Path]:
    """The report, the findings and the table of images, in the study's folder."""
    write_limits(result.study.folder, result.limits)
    images = [result.save_images()] if result.gathered.pairs else []
    return [*images, *write_report(result.study, None, {result.title: result.findings()})]
