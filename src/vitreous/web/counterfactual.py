"""What would change it: the smallest set of patches whose removal turns the decision, for the Faithfulness tab."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from vitreous._support.words import finite
from vitreous.counterfactuals.aim import ANY, aim
from vitreous.counterfactuals.find import counterfactual
from vitreous.counterfactuals.result import Counterfactual, Named
from vitreous.trace.target import Target
from vitreous.trace.trace import Trace
from vitreous.web import schema
from vitreous.web.clips import only_images
from vitreous.web.common import JOB, Client, Served
from vitreous.web.engine import Engine
from vitreous.web.engine import Served as ServedModel
from vitreous.web.jobs import Job
from vitreous.web.targets import resolve, settle

router = APIRouter()


class CounterfactualAsked(schema.OfImage):
    to: schema.TargetText | None = None  # the wanted class; "any": any other; None: the runner-up
    search: Literal["map", "greedy"] = "greedy"
    proof: Annotated[int, Field(ge=0, le=65_536)] = 512


class Turn(BaseModel):
    """A class, with its probability before and after the change."""

    index: int
    label: str
    before: schema.Number
    after: schema.Number


class TwoCurves(BaseModel):
    """The probabilities of the class that is left and of the wanted one after 0, 1, 2, … patches are removed."""

    source: list[float]
    to: list[float]


class CounterfactualMeta(BaseModel):
    """The SSE event `counterfactual`."""

    source: Turn
    to: Turn
    decision: Turn
    patches: list[int]  # in order
    grid: tuple[int, int]
    way: Literal["tokens", "pixels"]
    why: str | None
    certified: bool
    minimal: bool
    optimal: bool
    bound: int
    impossible: bool
    path: TwoCurves  # along the patches
    curve: TwoCurves  # along the order of the contrast map
    first: int | None
    passes: int
    method: str
    sentence: str


@router.post("/counterfactual", status_code=202, responses=JOB)
async def turned(engine: Served, client: Client, asked: CounterfactualAsked) -> schema.Started:
    """The smallest set of patches, as far as it can be found, whose removal turns the decision."""
    served = engine.find(asked.model)
    only_images(served.model, "counterfactual")
    engine.expect(asked.image)

    def check() -> None:  # a class that does not exist, or is the decision already, begins no job
        trace = engine.trace(served, asked.image)
        aim(trace, wanted(engine, served, trace, asked.to))

    await engine.ask(served, check)

    def work(job: Job) -> None:
        trace = engine.trace(served, asked.image).fork()
        to = wanted(engine, served, trace, asked.to)
        found = counterfactual(served.model, trace, to, search=asked.search, proof=asked.proof)
        job.tell("counterfactual", told(found).model_dump(mode="json", by_alias=True))

    return schema.Started(job=engine.start(client, served, work).id)


def wanted(engine: Engine, served: ServedModel, trace: Trace, asked: str | int | None) -> Target | str | None:
    """The class that is wanted; no name in it reaches the file system."""
    if asked is None or asked == ANY:
        return asked if asked is None else ANY
    return settle(resolve(engine, served, trace, asked), trace)


def told(found: Counterfactual) -> CounterfactualMeta:
    def named(one: Named) -> Turn:
        return Turn(index=one.index, label=one.label, before=finite(one.before), after=finite(one.after))

    return CounterfactualMeta(
        source=named(found.source),
        to=named(found.to),
        decision=named(found.decision),
        patches=list(found.patches),
        grid=found.grid,
        way="tokens" if found.way == "tokens" else "pixels",
        why=found.why,
        certified=found.certified,
        minimal=found.minimal,
        optimal=found.optimal,
        bound=found.bound,
        impossible=found.impossible,
        path=TwoCurves(source=list(found.path.source), to=list(found.path.to)),
        curve=TwoCurves(source=list(found.curve.source), to=list(found.curve.to)),
        first=found.first,
        passes=found.passes,
        method=found.map.method,
        sentence=found.sentence,
    )
