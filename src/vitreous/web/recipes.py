"""Python code and shell commands that compute what the tabs show: attention, curves, what is inside, features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from vitreous.registry import METHODS, METRICS
from vitreous.trace.apply import is_aimed
from vitreous.web import engine as engines
from vitreous.web import schema
from vitreous.web.common import Served
from vitreous.web.engine import Engine
from vitreous.web.limits import check_options
from vitreous.web.snippet import Recipe, begin, calling, command_words, recipe, words
from vitreous.web.targets import expect

router = APIRouter()
LayerNumber = Annotated[int, Field(ge=-1000, le=1000)]
HeadText = Annotated[str, Field(pattern=r"^(mean|\d{1,3})$")]
TokenText = Annotated[str, Field(pattern=r"^(readout|\d{1,6})$")]
PatchNumber = Annotated[int, Field(ge=0, le=10**6)]
NO_COMMAND = "# The curves and the eraser of one image have no command; use the copied Python.\n"


class AttentionShown(schema.OfImage):
    layer: LayerNumber = -1
    head: HeadText = "mean"
    token: TokenText = "readout"
    direction: Literal["reads", "read_by"] = "reads"
    discard: Annotated[float, Field(ge=0, lt=1)] = 0.0
    heads: Literal["mean", "min", "max"] = "mean"
    residual: Annotated[float, Field(ge=0, le=1)] = 0.5


class InsideShown(schema.OfImage):
    target: schema.TargetText = "top-1"
    layer: LayerNumber = -1
    head: HeadText = "mean"
    token: TokenText = "readout"


class FeaturesShown(schema.OfImage):
    layer: LayerNumber = -1
    among: Literal["image", "samples"] = "image"
    patch: PatchNumber = 0


class CurvesShown(schema.ExplainAsked):
    """The maps of the curves, their metric, what the eraser removed and the class that was wanted."""

    metric: Annotated[str, Field(max_length=100)] = "deletion"
    random: Annotated[int, Field(ge=0, le=20)] = 5
    removed: Annotated[Sequence[PatchNumber], Field(max_length=20_000)] = ()
    classes: Annotated[Sequence[PatchNumber], Field(max_length=20)] = ()
    turned: bool = False  # whether a counterfactual was found
    to: schema.TargetText | None = None


def place_of(served: engines.Served, patch: int) -> tuple[int, int]:
    row, column = divmod(patch, served.model.layout.grid[1])
    return row, column


def place_text(place: tuple[int, int]) -> str:
    return f"{place[0]},{place[1]}"


def layer_words(layer: int, head: str) -> list[str]:
    return [f"--layer={layer}", "--head", head]


def made(request: Request, engine: Engine, asked: schema.OfImage, targets: list[str]) -> tuple[engines.Served, Recipe]:
    served = engine.find(asked.model)
    engine.expect(asked.image)
    return served, recipe(engine, served, asked.image, targets, alone=request.app.state.alone)


# ---------------------------------------------------------------------------------------------------------- attention


@router.post("/snippet/attention")
async def attention(request: Request, engine: Served, asked: AttentionShown) -> schema.Snippet:
    """Python and commands that give the maps of the Attention tab."""
    served, given = made(request, engine, asked, [])
    place = None if asked.token == "readout" else place_of(served, int(asked.token))
    head = "mean" if asked.head == "mean" else int(asked.head)
    at = "" if place is None else f", patch={place}"
    rolled = schema.MethodAsked(
        name="rollout", options={"discard": asked.discard, "heads": asked.heads, "residual": asked.residual}
    )
    python = begin(given) + [
        f"flow = vitreous.inspect.flow(model, image{at}, layer={asked.layer}, head={head!r})",
        f"chosen = flow.{asked.direction}[0]",
        f"rollout = {calling(rolled)}.map[0]",
        "heads = vitreous.inspect.heads(model, image).maps  # every layer and head: where the read-out looks",
    ]
    settings = [part for key, value in rolled.options.items() for part in ("--set", f"rollout.{key}={value}")]
    patch = [] if place is None else ["--patch", place_text(place)]
    cli = [
        words(
            "vitreous",
            "inspect",
            "flow",
            given.file,
            *given.model,
            *patch,
            f"--layer={asked.layer}",
            "--head",
            asked.head,
        ),
        words("vitreous", "explain", given.file, *given.model, "--method", "rollout", *settings),
        words("vitreous", "inspect", "heads", given.file, *given.model),
    ]
    return schema.Snippet(python="\n".join(python) + "\n", cli=command_words(given, cli))


# ------------------------------------------------------------------------------------------------------------- inside


@router.post("/snippet/inside")
async def inside(request: Request, engine: Served, asked: InsideShown) -> schema.Snippet:
    """Python and commands that give the numbers of the Inside tab."""
    served, given = made(request, engine, asked, [str(asked.target)])
    await expect(engine, served, asked.image, [asked.target])
    (target,) = given.targets
    python = begin(given) + [
        "from vitreous.trace.tokens import one_head, projections",
        "from vitreous.web.attention import query",
        "from vitreous.web.heads import dots",
        "",
        f"scores = vitreous.cass(model, trace, {target!r}, samples=16)[0]  # of every layer and head",
        "layers = vitreous.inspect.layers(model, image).maps",
        f"q, k, scale = projections(trace, one_head(trace.layer({asked.layer}), {asked.head!r}))",
        f"query_key = trace.map(dots(q, k, scale, query(trace, {asked.token!r})))[0]",
    ]
    cli = [
        words("vitreous", "cass", given.file, *given.model, "--target", target, "--samples", "16"),
        words("vitreous", "inspect", "layers", given.file, *given.model),
    ]
    return schema.Snippet(python="\n".join(python) + "\n", cli=command_words(given, cli))


# ----------------------------------------------------------------------------------------------------------- features


@router.post("/snippet/features")
async def features(request: Request, engine: Served, asked: FeaturesShown) -> schema.Snippet:
    """Python and commands that give the maps of the Features tab."""
    served, given = made(request, engine, asked, [])
    place, layer = place_of(served, asked.patch), asked.layer
    lines, cli, basis = begin(given), list[str](), list[str]()
    if asked.among == "samples" and served.model.channels in (1, 3):
        lines += [
            'photos = sorted((Path(vitreous.__file__).parent / "assets" / "photos").glob("*.jpg"))',
            f"basis = vitreous.inspect.features(model, photos, layers=[{layer}]).basis",
        ]
        alone, photos = request.app.state.alone, engine.samples.values()
        names = [str(path) if alone else f"src/vitreous/assets/photos/{path.name}" for path in photos]
        basis = ["--basis", "basis.npz"]
        cli.append(
            words(
                "vitreous", "inspect", "features", *names, *given.model, f"--layer={layer}", "--save-basis", "basis.npz"
            )
        )
    told = ", basis=basis" if basis else ""
    lines += [
        f"features = vitreous.inspect.features(model, image, layers=[{layer}]{told})",
        "(components,), (shares,) = features.components.values(), features.shares.values()",
        f"(similar,) = vitreous.inspect.similarity(model, image, patch={place}, layers=[{layer}]).maps.values()",
    ]
    asks = ["vitreous", "inspect", "features", given.file, *given.model, f"--layer={layer}"]
    cli += [words(*asks, *basis), words(*asks, "--patch", place_text(place))]
    return schema.Snippet(python="\n".join(lines) + "\n", cli=command_words(given, cli))


# ------------------------------------------------------------------------------------------------------- faithfulness


@router.post("/snippet/curves")
async def curves(request: Request, engine: Served, asked: CurvesShown) -> schema.Snippet:
    """Python that gives the curves, the eraser's classes and the counterfactual; a command for the last."""
    check_options(METRICS[asked.metric], {})
    for one in asked.methods:
        check_options(METHODS[one.name], one.options)
    wanted = [] if asked.to in (None, "any") else [str(asked.to)]
    served, given = made(request, engine, asked, [*map(str, asked.targets[:1]), *wanted])
    await expect(engine, served, asked.image, [*asked.targets[:1], *wanted])
    target = given.targets[0]
    aimed = [is_aimed(served.model, METHODS[one.name]) for one in asked.methods]
    measured = f"{asked.metric!r}, target={target!r}"
    lines = begin(given) + ["maps = ["]
    lines += [f"    {calling(one, target if own else None)}," for one, own in zip(asked.methods, aimed)]
    lines += ["]", f"curves = [vitreous.evaluate(model, trace, one, {measured}) for one in maps]"]
    if asked.random:
        random = f"vitreous.explain(model, trace, 'random', target={target!r}, seed=seed)"
        lines += [f"chance = [vitreous.evaluate(model, trace, {random}, {measured}) for seed in range({asked.random})]"]
    if asked.removed:
        lines += [
            "from vitreous.web.common import chances",
            "from vitreous.web.faithfulness import without",
            "",
            f"run, why = without(trace, {sorted(set(asked.removed))})  # the eraser",
            f"erased = chances(model, run.output[0].float(), {list(asked.classes)})",
        ]
    cli = []
    if asked.turned:
        to = given.targets[-1] if wanted else asked.to
        to_python = "" if to is None else f", {to!r}"
        lines += [f"turned = vitreous.counterfactual(model, image{to_python}, proof=512)"]
        more = [] if to is None else ["--to", str(to)]
        cli = [words("vitreous", "counterfactual", given.file, *given.model, *more, "--proof", "512")]
    return schema.Snippet(python="\n".join(lines) + "\n", cli=command_words(given, cli) if cli else NO_COMMAND)
