"""Maps without their model, as the page asks for them: what is there was computed before.

Each attribution is a column; attributions of one method with the same options stand below each other.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from PIL import Image

from vitreous._support.arrays import plain
from vitreous._support.words import finite
from vitreous.attribution import Attribution
from vitreous.errors import InputError, Unsupported
from vitreous.notebook.address import text
from vitreous.plot.colour import is_control, is_level, limits, line_colour
from vitreous.plot.figure import attribution_figure, explanation_figure, png_bytes
from vitreous.registry import METHODS
from vitreous.trace.own_sizes import differ
from vitreous.version import VERSION
from vitreous.web import problems, schema
from vitreous.web.engine import Kept, key_of
from vitreous.web.explain import notes_of
from vitreous.web.exports import arrange
from vitreous.web.limits import FORMATS, Limits, bounded
from vitreous.web.place import Kind
from vitreous.web.problems import Problem

ROW = "explained"  # the first row; the next ones have a number
FINE = 64  # values a side; finer maps are pointed at in blocks
MOST = 8  # images in the figure of a notebook without kernel
NO_MODEL = "these are maps without their model; vitreous.view(model, image) shows the model too"


@dataclass(frozen=True, eq=False)
class Place:
    """Where an attribution stands."""

    found: Attribution
    column: int
    row: int


class Recorded:
    """The maps, and what can be told of them."""

    def __init__(self, maps: Sequence[Attribution]) -> None:
        check(maps)
        self.maps, self.first = list(maps), maps[0]
        self.places = placed(self.maps)
        self.methods = [place.found for place in self.places if place.row == 0]
        self.rows = [ROW, *(f"{ROW}-{n + 1}" for n in range(1, 1 + max(place.row for place in self.places)))]
        self.images = [key_of("image", i, name) + "00000000" for i, name in enumerate(self.first.names)]
        self.kept = {kept.meta["id"]: kept for kept in map(self._keep, self._all())}
        self.jobs: dict[str, list[tuple[str, dict[str, Any]]]] = {}

    def _all(self) -> list[tuple[int, Place, int]]:
        return [(n, place, i) for n, place in enumerate(self.places) for i in range(len(self.images))]

    def _keep(self, at: tuple[int, Place, int]) -> Kept:
        """One map as the page's server keeps it."""
        number, place, index = at
        one = place.found[index]
        values = one.map[0].detach().float().cpu()
        meta = schema.MapMeta(
            id=self.id_of(number, index),
            method=one.method,
            options=options_of(one),
            target=None if one.target is None else self.rows[place.row],
            resolved=one.target,
            title=None if one.target is None else title(one),
            shape=tuple(values.shape),
            signed=one.signed,
            level=is_level(one.method),
            control=is_control(one.method),
            min=finite(values.nan_to_num(0).min()),
            max=finite(values.nan_to_num(0).max()),
            limits=limits(values.numpy(), one.signed, is_level(one.method)),
            seconds=0.0,
            cached=True,
            notes=notes_of(one),
        ).model_dump(mode="json")
        slim = replace(one, map=values[None], views=None)
        return Kept(meta, slim, one.provenance, self.first.model, self.images[index], None)

    def id_of(self, number: int, index: int) -> str:
        return key_of("map", number, index)

    # -------------------------------------------------------------------------------------------------------- answers

    def info(self) -> schema.Info:
        bounds = Limits()
        return schema.Info(
            version=VERSION,
            models=[self.model()],
            samples=[schema.Sample(id=one, name=name) for one, name in zip(self.images, self.first.names)],
            clips=[],
            examples=[],
            limits=schema.LimitInfo(
                **{name: getattr(bounds, name) for name in schema.LimitInfo.model_fields if hasattr(bounds, name)},
                clips=[],
                formats=list(FORMATS),
            ),
            methods=[method_info(one) for one in {one.method: one for one in self.methods}.values()],
            metrics=[],
        )

    def model(self) -> schema.ModelInfo:
        high, wide = min((tuple(one.map.shape[-2:]) for one in self.maps), key=lambda shape: shape[0] * shape[1])
        step = -(-max(high, wide) // FINE)
        grid = -(-high // step), -(-wide // step)
        seen = None if self.first.views is None else self.first.views[0]
        return schema.ModelInfo(
            name=self.first.model,
            size=(16 * grid[0], 16 * grid[1]) if seen is None else (seen.height, seen.width),
            grid=grid,
            patch=None,
            prefix=[],
            suffix=[],
            layers=0,
            heads=[],
            classifies=False,
            classes=0,
            form="vector",
            aimed=sorted({one.method for one in self.maps if one.target is not None}),
            output="logits",
            texts=False,
            kinds=dict.fromkeys(get_args(Kind), NO_MODEL),
            unsupported={},
            first=[],
        )

    def said(self) -> str:
        signed = any(one.signed for one in self.maps)
        colours = " Orange is evidence for the target, blue is evidence against it." if signed else ""
        return f"Maps of {self.first.model}.{colours} Point at a patch to read its value."

    def explain(self, asked: schema.ExplainAsked) -> str:
        """The events of a job that has everything."""
        index = self.index(asked.image)
        told: list[tuple[str, dict[str, Any]]] = []
        for row, target in enumerate(map(str, asked.targets)):
            for one in asked.methods:
                column = next((n for n, m in enumerate(self.methods) if same(m, one)), None)
                free = column is None or self.methods[column].target is None
                if row and free:
                    continue
                found = self.find(column, 0 if free else self.row(target))
                if found is None:
                    wrong = problems.described(404, "there is no such map here")
                    told.append(("problem", {**wrong, "method": one.name, "target": target}))
                else:
                    told.append(("map", self.kept[self.id_of(found, index)].meta))
        job = key_of("job", asked.model_dump_json())
        self.jobs[job] = [*told, ("done", {"seconds": 0.0})]
        return job

    def find(self, column: int | None, row: int) -> int | None:
        """The number of the attribution at a place."""
        return next((n for n, p in enumerate(self.places) if (p.column, p.row) == (column, row)), None)

    def row(self, target: str) -> int:
        return self.rows.index(target) if target in self.rows else -1

    def index(self, image: str) -> int:
        if image not in self.images:
            raise Problem(404, NO_MODEL)
        return self.images.index(image)

    def seen(self, image: str) -> bytes:
        """The image, or grey where it is not known."""
        index, held = self.index(image), io.BytesIO()
        high, wide = self.model().size
        known = self.first.views is not None
        shown = self.first.seen(index=index) if known else Image.new("RGB", (wide, high), (128, 128, 128))
        shown.save(held, "WEBP", quality=90, method=2)
        return held.getvalue()

    def figure(self, asked: schema.FigureAsked) -> bytes:
        kept = [self.one(number) for number in dict.fromkeys(asked.maps)]
        index = self.images.index(kept[0].image)
        views = None if self.first.views is None else self.first.views.part(slice(index, index + 1))
        rows, heads = arrange([(one.meta, replace(one.attribution, views=views)) for one in kept])
        return png_bytes(explanation_figure(rows, rows=heads, cells=asked.cells))

    def one(self, number: str) -> Kept:
        if number not in self.kept:
            raise Problem(404, "there is no such map here")
        return self.kept[number]

    def still(self) -> bytes:
        """The figure that a notebook without kernel shows."""
        return png_bytes(attribution_figure(self.first[:MOST]))

    @property
    def address(self) -> list[tuple[str, str]]:
        """What the page shows at first; without images, the maps alone."""
        bare = [("bare", "true")] if self.first.views is None else []
        methods = [("method", text(one.method, options_of(one))) for one in self.methods]
        return [("image", self.images[0]), *bare, *methods, *(("target", row) for row in self.rows)]


# ---------------------------------------------------------------------------------------------------------------- parts


def check(maps: Sequence[Attribution]) -> None:
    if len({len(one) for one in maps}) > 1 or len({one.model for one in maps}) > 1:
        raise InputError("maps that are viewed together must be of one model and of the same images")
    if any(one.map.ndim != 3 for one in maps):
        raise Unsupported('a view shows maps of images; save("maps.gif") draws those of a video')
    if not len(maps[0]):
        raise InputError("this attribution holds no map, so there is nothing to view")
    if any(len(one) > 1 and differ(one.map) for one in maps):
        raise Unsupported("a view shows images of one size; view one of them, e.g. found[0].view()")
    if maps[0].views is not None:
        maps[0].seen()  # an image that cannot be drawn is refused now, not by the notebook


def placed(maps: Sequence[Attribution]) -> list[Place]:
    columns: list[Attribution] = []
    places: list[Place] = []
    for found in maps:
        number = next((n for n, one in enumerate(columns) if alike(one, found)), len(columns))
        columns += [found] if number == len(columns) else []
        places.append(Place(found, number, sum(place.column == number for place in places)))
    return places


def alike(one: Attribution, other: Attribution) -> bool:
    return (one.method, options_of(one)) == (other.method, options_of(other))


def same(one: Attribution, asked: schema.MethodAsked) -> bool:
    return one.method == asked.name and text(one.method, options_of(one)) == text(asked.name, asked.options)


def options_of(one: Attribution) -> dict[str, Any]:
    """Those that differ from the default."""
    usual = METHODS[one.method].check({}) if one.method in METHODS else {}
    return {k: plain(v) for k, v in one.options.items() if k not in usual or v != usual[k]}


def title(one: Attribution) -> str:
    label = one.labels[0] if one.labels else None
    share = one.probabilities[0] if one.probabilities else None
    name = label or str(one.target)
    return name if share is None or not 0 <= share <= 1 else f"{name} {share:.0%}"


def method_info(one: Attribution) -> schema.MethodInfo:
    more = {"level": is_level(one.method), "control": is_control(one.method), "colour": line_colour(one.method)}
    if one.method in METHODS:
        declared = METHODS[one.method]
        return schema.MethodInfo(**{**declared.schema, "options": bounded(declared), **more})
    traits = dict.fromkeys(("attention", "tokens"), False)
    words = dict.fromkeys(("family", "summary", "formula", "cite"), "")
    targeted = one.target is not None
    return schema.MethodInfo(
        name=one.method, signed=one.signed, targeted=targeted, options={}, **words, **traits, **more
    )
