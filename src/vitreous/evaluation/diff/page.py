"""The page of a comparison: the checks, the tables, and the worst images of both models side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from vitreous._support.templates import render
from vitreous._support.words import number, share
from vitreous.evaluation.diff.junit import against
from vitreous.evaluation.diff.pairs import Pair
from vitreous.evaluation.report.page import data_uri, inline_svg
from vitreous.evaluation.study.findings import Table
from vitreous.evaluation.study.read import Study
from vitreous.images.readers import from_jpeg
from vitreous.plot.colour import is_level, limits
from vitreous.plot.differences import differences_figure
from vitreous.plot.overlay import overlay
from vitreous.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOME = "vitreous.evaluation.diff"
MOST = 12  # images of each kind
GONE = "not among the photos that the study keeps"


def scatter(pairs: Sequence[Pair]) -> Figure:
    return differences_figure(
        [pair.distance for pair in pairs], [pair.noisy for pair in pairs], [pair.same for pair in pairs]
    )


def body(
    study: Study,
    pairs: Sequence[Pair],
    lead: str,
    said: Sequence[str],
    tables: Sequence[Table],
    draw: Callable[[], Figure],
    about: str,
) -> Markup:
    """Everything below the header of a study's page."""
    moved, flipped = against("max_moved", pairs)[:MOST], against("max_flips", pairs)[:MOST]
    least = sorted(pairs, key=lambda pair: pair.noisy - pair.distance)[:MOST] if not moved and not flipped else []
    groups = [
        ("Same answer, other reason", "The distance exceeds the noise of the maps most.", moved),
        ("Other answer", "The farthest apart first.", flipped),
        ("Nothing changed; the least alike", "The distance comes nearest to the noise of the maps.", least),
    ]
    wanted = {pair.image for _, _, some in groups for pair in some}
    views = [Views(study.of(name), wanted) for name in study.models]
    return render(
        HOME,
        "diff.html.j2",
        lead=lead,
        passed=lead.startswith("PASSED"),
        said=said,
        tables=tables,
        chart=inline_svg(draw(), "distances of the maps") if pairs else "",
        about=about,
        names=study.models,
        groups=[
            {"title": title, "about": note, "cases": [case(pair, views) for pair in some]}
            for title, note, some in groups
            if some
        ],
    )


class Views:
    """The photos and maps of a few images, as one model sees them."""

    def __init__(self, study: Study, wanted: set[str]) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.study = study
        self.photos: dict[str, bytes] = {}
        for table in study.tables(["image", "photo"]) if wanted else ():
            kept = table.filter(pc.is_in(table["image"], pa.array(sorted(wanted))))
            rows = zip(kept["image"].to_pylist(), kept["photo"].to_pylist())
            self.photos |= {name: photo for name, photo in rows if photo}
        self.maps = {name: one["map"] for name in wanted for one in study.iter_maps(image=name)}
        self.own: dict[str, np.ndarray] = {}  # of the model's own answer, where that is not the target
        for name in wanted:
            for row in study.rows(name):
                if row["answer_map"] is not None and name in self.maps:
                    self.own[name] = np.array(row["answer_map"], np.float32).reshape(self.maps[name].shape)

    def photo(self, image: str) -> str | None:
        return data_uri(from_jpeg(self.photos[image])) if image in self.photos else None

    def map(self, image: str, own: bool = False) -> str | None:
        """The map of the target, or of the model's own answer, on the image."""
        maps = self.own if own else self.maps
        if image not in self.photos or image not in maps:
            return None
        kind, about = self.study.kind, self.study.about
        label, values = next(iter(kind.methods.items()))
        declared = METHODS[kind.declared(label)]
        signed = declared.is_signed(dict(values))
        found = maps[image]
        box: Any = tuple(about["box"]) if about.get("box") else None
        put = partial(overlay, found, from_jpeg(self.photos[image]), signed, box=box)
        return data_uri(put(limits=limits(found, signed, is_level(declared.name))))


def case(pair: Pair, views: Sequence[Views]) -> dict[str, Any]:
    """One image, both maps, both answers and the numbers."""
    return {
        "name": pair.image,
        "photo": views[0].photo(pair.image),
        "gone": GONE,
        "label": pair.name,
        "target": pair.target,
        "sides": [
            {
                "map": view.map(pair.image),
                "own": view.map(pair.image, own=True),
                "answer": pair.answers[i],
                "share": share(pair.shares[i]),
                "right": None if pair.right is None else pair.right[i],
                "aimed": share(pair.aimed[i]),
                "noise": number(max(pair.noise[i])),
                "faithful": number(pair.faithfulness[i], 3),
            }
            for i, view in enumerate(views)
        ],
        "numbers": [
            ("distance", number(pair.distance)),
            ("noise explains", number(pair.noisy)),
            ("in medians of it", f"{number(pair.ratio, 1)} ×"),
            ("rank correlation", number(pair.correlation)),
            ("overlap of the top tenth", number(pair.overlap)),
        ],
    }
