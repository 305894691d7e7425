"""Lists of models, methods, metrics, samples and labels."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from vitreous._support.words import plain
from vitreous.images.pan import FRAMES
from vitreous.models.labels import fitting
from vitreous.models.model import Model
from vitreous.models.output import Form
from vitreous.plot.colour import is_control, line_colour
from vitreous.registry import METHODS, METRICS, Metric
from vitreous.trace.apply import is_aimed
from vitreous.trace.tokens import prefix_names, suffix_names
from vitreous.version import VERSION
from vitreous.web import abilities, schema
from vitreous.web import engine as engines
from vitreous.web.clips import closed_tabs, endings
from vitreous.web.common import ImageQuery, ModelQuery, Served
from vitreous.web.kinds import kinds_of
from vitreous.web.limits import FORMATS, bounded
from vitreous.web.regions import places_of
from vitreous.web.targets import heading, resolve, settle

router = APIRouter()


@router.get("/info")
async def info(engine: Served) -> schema.Info:
    """Everything the page needs to draw itself."""
    models = [await describe(engine, served) for served in engine.models.values()]
    limits = engine.limits
    return schema.Info(
        version=VERSION,
        models=models,
        allowed=[name for name in engine.allowed if name not in engine.models],
        samples=[schema.Sample(id=sample, name=path.stem) for sample, path in engine.samples.items()],
        clips=[schema.Sample(id=one, name=engine.name_of(one), frames=FRAMES) for one in engine.clips.samples],
        endings=endings(),
        examples=[
            schema.Example(id=one, name=path.stem, concept=path.parent.name) for one, path in engine.examples.items()
        ],
        limits=schema.LimitInfo(
            upload_bytes=limits.upload_bytes,
            pixels=limits.pixels,
            methods=limits.methods,
            targets=limits.targets,
            maps=limits.maps,
            models=limits.models,
            sheet=limits.sheet,
            examples=limits.examples,
            concepts=limits.concepts,
            formats=list(FORMATS),
            frames=limits.frames,
        ),
        methods=[
            schema.MethodInfo(
                **{**declared.schema, "options": bounded(declared)},
                level=declared.level,
                control=is_control(declared.name),
                colour=line_colour(declared.name),
            )
            for declared in METHODS.values()
        ],
        metrics=[
            schema.MetricInfo(
                **{k: v for k, v in declared.schema.items() if k not in ("masks", "again", "options")},
                usable=usable(declared),
                options=bounded(declared),
            )
            for declared in METRICS.values()
        ],
    )


def usable(declared: Metric) -> bool:
    """Whether a metric can score a single map, without masks and without running the method again."""
    return not declared.masks and not declared.again


async def describe(engine: engines.Engine, served: engines.Served) -> schema.ModelInfo:
    model = served.model
    trace = await engine.seen(served, engine.first(served))
    layout, words = trace.layout, model.form is Form.WORDS
    return schema.ModelInfo(
        name=served.name,
        size=trace.size,
        grid=layout.grid,
        patch=layout.patch,
        prefix=prefix_names(layout),
        suffix=suffix_names(layout),
        layers=layout.layers,
        heads=abilities.heads_of(trace),
        classifies=trace.classifies and not words,
        classes=(model.outputs or 0) if trace.classifies and not words else 0,
        form=model.form.name.lower(),
        aimed=[declared.name for declared in METHODS.values() if is_aimed(model, declared)],
        output=model.meaning.value,
        texts=abilities.takes_text(model),
        kinds=await engine.ask(served, lambda: kinds_of(engine, served, trace)),
        unsupported=abilities.unsupported(model),
        first=abilities.first_methods(trace),
        frames=model.frames,
        times=list(layout.times),
        closed=closed_tabs(model),
    )


@router.get("/labels")
async def labels(
    engine: Served,
    model: ModelQuery = None,
    q: Annotated[str, Query(max_length=100)] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
) -> list[schema.Label]:
    """Classes whose label holds the words, the best match first; a number finds its class."""
    found = search(engine.find(model).model, q.strip(), limit)
    return [schema.Label(index=index, label=label) for index, label in found]


@router.get("/target")
async def target(
    engine: Served,
    image: ImageQuery,
    q: Annotated[str, Query(max_length=300, examples=["tiger cat"])],
    model: ModelQuery = None,
) -> schema.TargetMeaning:
    """What a target means for an image; if it means nothing, the problem names what is meant perhaps."""
    served = engine.find(model)

    def work() -> schema.TargetMeaning:
        trace = engine.trace(served, image)
        found = settle(resolve(engine, served, trace, q), trace)
        return schema.TargetMeaning(target=str(found), title=heading(found, trace), places=places_of(found, trace))

    return await engine.ask(served, work)


def search(model: Model, words: str, limit: int) -> list[tuple[int, str]]:
    """Whole names, then names with these words, then words that begin so, then the rest; all classes for no words."""
    numbered = [int(words)] if words.isdigit() and int(words) in model.labels else []
    ranked = sorted(fitting(words, model.labels), key=lambda one: (one[0], not plain(one[2]).startswith(plain(words))))
    found = [number for _, number, _ in ranked] if words else list(model.labels)
    return [(number, model.labels[number]) for number in dict.fromkeys((*numbered, *found))][:limit]
