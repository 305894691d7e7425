"""The Faithfulness tab: curves with their random control, and an eraser."""

from __future__ import annotations

from typing import Any

import torch
from fastapi import APIRouter
from torch import Tensor

from vitreous._support.progress import steps
from vitreous._support.words import finite
from vitreous.errors import Unsupported, one_line
from vitreous.metrics.case import Case, Measured, measure
from vitreous.registry import METHODS, METRICS, Metric
from vitreous.trace.apply import read_by
from vitreous.trace.perturb.drop_tokens import cuts, refuse_dropping
from vitreous.trace.perturb.dropped_runs import kept as kept_tokens
from vitreous.trace.perturb.dropped_runs import run_keeping
from vitreous.trace.perturb.fills import filled
from vitreous.trace.perturb.hide_patches import hide_pixels
from vitreous.trace.run import Finished
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.common import JOB, Client, Served, best, chances, each_number
from vitreous.web.engine import Engine, Kept
from vitreous.web.info import usable
from vitreous.web.jobs import Cancelled, Job, note
from vitreous.web.limits import check_options
from vitreous.web.problems import Problem, of_error
from vitreous.web.targets import expect, heading, resolve, settle

router = APIRouter()


@router.post("/curves", status_code=202, responses=JOB)
async def curves(engine: Served, client: Client, asked: schema.CurvesAsked) -> schema.Started:
    """Measure maps: each one's curve, with that of random maps beside it."""
    declared = METRICS[asked.metric]
    if not usable(declared):
        raise Problem(422, f"{declared.name} needs more than one map; use vitreous evaluate")
    given = {} if asked.steps is None or "steps" not in declared.options.model_fields else {"steps": asked.steps}
    values = check_options(declared, given)
    maps = [engine.map(one) for one in dict.fromkeys(asked.maps)]
    if len({one.model for one in maps}) > 1:
        raise Problem(422, "these maps are of several models; measure one model at a time")
    served = engine.find(maps[0].model)
    for one in maps:
        engine.expect(one.image)
    if any(one.target is None for one in maps):
        await expect(engine, served, maps[0].image, [asked.target])

    def work(job: Job) -> None:
        for one in job.each(maps):
            try:
                told = one_curve(engine, served, one, declared, values, asked)
                job.tell("curve", told.model_dump(mode="json"))
            except Cancelled:
                raise
            except Exception as error:
                note(error)
                job.tell("problem", {**of_error(error), "map": one.meta["id"]})

    return schema.Started(job=engine.start(client, served, work).id)


def one_curve(
    engine: Engine,
    served: engines.Served,
    one: Kept,
    declared: Metric,
    values: dict[str, Any],
    asked: schema.CurvesAsked,
) -> schema.CurveMeta:
    trace = engine.trace(served, one.image).fork()
    target = one.target or settle(resolve(engine, served, trace, asked.target), trace)
    trace, target = read_by(trace, target)
    case = Case(trace, one.attribution.map.to(trace.images.device), target)
    found = measure(declared, case, values)
    band = random_band(engine, served, one.image, trace, target, declared, values, asked.random)
    return schema.CurveMeta(
        map=one.meta["id"],
        metric=declared.name,
        target=str(target),
        title=heading(target, trace),
        better=declared.direction(values),
        at=None if found.at is None else list(found.at),
        values=None if found.curve is None else each_number(found.curve[0]),
        value=finite(found.value[0]),
        random=band,
        order=case.order[0].tolist(),
    )


def random_band(
    engine: Engine,
    served: engines.Served,
    image: str,
    trace: Trace,
    target: Target,
    declared: Metric,
    values: dict[str, Any],
    count: int,
) -> schema.Band | None:
    """The curve of random maps, computed once for each target."""
    if count == 0:
        return None
    key = served.name, image, target.identity, declared.name, repr(values), count
    band: schema.Band | None = engine.bands.get(key)
    if band is None:
        random = METHODS["random"]
        maps = (random.run(trace, target, seed=seed) for seed in range(count))
        told = steps(maps, count, "random control")
        band = spread([measure(declared, Case(trace, one, target), values) for one in told])
        engine.bands.put(key, band)
    return band


def spread(found: list[Measured]) -> schema.Band:
    mean_value = finite(torch.cat([one.value for one in found]).mean())
    curves = [one.curve for one in found if one.curve is not None]
    if not curves:
        return schema.Band(mean=[], low=[], high=[], value=mean_value)
    all_curves = torch.cat(curves)  # [n T]
    mean, low, high = all_curves.mean(0), all_curves.amin(0), all_curves.amax(0)
    return schema.Band(mean=each_number(mean), low=each_number(low), high=each_number(high), value=mean_value)


# -------------------------------------------------------------------------------------------------------------- eraser


@router.post("/erase")
async def erase(engine: Served, asked: schema.EraseAsked) -> schema.Erased:
    """The model's prediction for an image without some of its patches."""
    served = engine.find(asked.model)

    def work() -> schema.Erased:
        trace = engine.trace(served, asked.image)
        targets = [(str(text), settle(resolve(engine, served, trace, text), trace)) for text in asked.targets]
        gone = removed_of(trace, asked.removed)
        record, why = without(trace, gone)
        assert record.output is not None and record.embedding is not None
        output = record.output[0].float()
        scores = [schema.TargetScore(target=text, score=score(trace, target, record, gone)) for text, target in targets]
        return schema.Erased(
            way="tokens" if why is None else "pixels",
            why=why,
            top=best(served.model, output, 5) if trace.classifies else [],
            classes=chances(served.model, output, asked.classes) if trace.classifies else [],
            scores=scores,
        )

    return await engine.ask(served, work)


def score(trace: Trace, target: Target, record: Finished, gone: list[int]) -> float | None:
    """The score of a target; that of a latent is read from another run."""
    own, target = read_by(trace, target)
    if own is not trace:
        record = without(own, gone)[0]
    assert record.output is not None and record.embedding is not None
    score: float | None = finite(target(record.output.float(), record.embedding.float())[0])
    return score


def removed_of(trace: Trace, removed: list[int]) -> list[int]:
    gone, patches = sorted(set(removed)), trace.layout.patches
    if gone and gone[-1] >= patches:
        raise Problem(422, f"patch {gone[-1]} is out of range: there are patches 0 to {patches - 1}")
    if len(gone) == patches:
        raise Problem(422, "nothing would be left to look at; leave at least one patch")
    return gone


def without(trace: Trace, gone: list[int]) -> tuple[Finished, str | None]:
    """Run without the tokens of these patches or, where that is impossible, with the patches greyed; and say why."""
    if not gone:
        return trace.whole(), None
    with torch.no_grad():
        try:
            refuse_dropping(trace)
        except Unsupported as error:
            hidden = torch.zeros(1, trace.layout.patches, dtype=torch.bool, device=trace.images.device)
            hidden[0, gone] = True
            hide = hide_pixels(trace, filled(trace, "mean"))
            return hide([0], hidden.view(1, *trace.layout.cells)), one_line(error)
        left: Tensor = torch.tensor([sorted(set(range(trace.layout.patches)) - set(gone))], device=trace.images.device)
        return run_keeping(trace, [0], kept_tokens(trace, left), cuts(trace)), None
