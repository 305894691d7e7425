"""The findings of a study of shortcuts: sentences, the table of clusters, and contact sheets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitreous._support.words import count_of, number, share, span
from vitreous.evaluation.study.columns import flat_arrays
from vitreous.evaluation.study.findings import Chart, Findings, Table
from vitreous.evaluation.study.kind import Rows
from vitreous.evaluation.study.shortcuts.design import SHEET
from vitreous.evaluation.study.shortcuts.options import Options
from vitreous.evaluation.study.shortcuts.score import Judged, frame_rows, judge, measure
from vitreous.images.readers import from_jpeg
from vitreous.plot.shortcuts import Tile, contact_figure, scores_figure

if TYPE_CHECKING:
    import pyarrow

SHOWN = 8  # clusters with a contact sheet: the first by rank, and every alarm up to twice as many
LISTED = 30  # rows of the table on the page; all are in clusters.parquet
CHARTED = 40


def shortcut_findings(options: Options, study: Rows) -> Findings:
    """Findings of one model; before the second phase is there, they say so."""
    second = study.second
    design = None if second is None else second.manifest["options"]["designs"].get(study.model or second.models[0])
    if second is None or design is None:
        return Findings("The first phase is not finished: no cluster has been tested yet.")
    ranked = judge(design, measure(design, second), options)
    names = study.to_arrow(["image"])["image"].to_pylist()
    frames = {"clusters": table_of(frame_rows(study.model, ranked, names))} if ranked else {}
    return Findings(
        lead(ranked, design, options.level),
        [*told(ranked), *left_out(design)],
        [clusters_table(ranked), classes_table(design)] if design["classes"] else [],
        charts(ranked, study, second, names) if ranked else [],
        {"clusters": [plain(row) for row in frame_rows(study.model, ranked, names)], "classes": design["classes"]},
        frames=frames,
    )


def table_of(rows: list[dict[str, Any]]) -> pyarrow.Table:
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = {"rank": pa.int64(), "image_names": pa.list_(pa.string()), "image_shares": pa.list_(pa.float64())}
    kinds |= {"places": pa.list_(pa.list_(pa.int64())), "alarm": pa.bool_(), "model": pa.string(), "label": pa.string()}
    kinds |= dict.fromkeys(("cluster", "class", "images", "parts"), pa.int64())
    return pa.table({name: pa.array([row[name] for row in rows], kinds.get(name, pa.float64())) for name in names})


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row for findings.json: the first images only."""
    kept = {name: value for name, value in row.items() if name not in ("image_shares", "places")}
    return {**kept, "image_names": row["image_names"][:SHEET]}


# --------------------------------------------------------------------------------------------------------------- words


def lead(ranked: Sequence[Judged], design: dict[str, Any], level: float) -> str:
    looked = [one for one in design["classes"] if one["skipped"] is None]
    if not ranked:
        why = "no class has enough images" if not looked else "no patches of a class stand together"
        return f"Nothing was tested: {why}."
    tested = f"{count_of(len(ranked), 'cluster')} of {count_of(len(looked), 'class').replace('classs', 'classes')}"
    alarms = [one for one in ranked if one.alarm]
    if not alarms:
        return f"No alarm at {share(level)} among {tested}."
    said = ", ".join(title(one) for one in alarms[:4]) + (" and others" if len(alarms) > 4 else "")
    return f"{count_of(len(alarms), 'alarm')} at {share(level)} among {tested}: {said}."


def title(one: Judged) -> str:
    return f"cluster {one.told['cluster']} of {one.told['label']}"


def told(ranked: Sequence[Judged]) -> Iterator[str]:
    """A sentence on each alarm, and on the first cluster if there is none."""
    some = [one for one in ranked if one.alarm] or list(ranked[:1])
    for one in some[:SHOWN]:
        yield sentence(one)


def sentence(one: Judged) -> str:
    v, about = one.values, one.told
    small = ", few" if about["images"] < 5 else ""
    said = f"{title(one).capitalize()} ({count_of(about['images'], 'image')}{small}): "
    if not np.isfinite(v["score"]):
        return said + "could not be inserted, as there are no images of other classes with which to test it."
    said += (
        f"inserted into {int(v['insertions'])} images of other classes, it adds {number(v['inserted'])} to the "
        f"probability of the class, {number(v['score'])} {span((v['score_low'], v['score_high']))} more than ordinary "
        f"parts of the class, and turns {share(v['flips'])} of the answers"
    )
    if np.isfinite(v["confidence_change"]):
        ends = v["confidence_change_low"], v["confidence_change_high"]
        said += f"; its removal changes the probability by {number(v['confidence_change'])} {span(ends)} beside random "
        said += f"tokens, and the accuracy by {number(v['accuracy_change'])}"
    said += f"; it occurs in {share(v['here'])} of the images of the class and in {share(v['elsewhere'])} of the others"
    if np.isfinite(v["outside"]):
        said += f"; {share(v['outside'])} of its relevance lies outside the masks"
    return f"{said}. p = {min(1.0, one.p):.2g}, uncorrected."


def left_out(design: dict[str, Any]) -> Iterator[str]:
    """Classes that were not looked at, and why."""
    reasons: dict[str, list[str]] = {}
    for one in design["classes"]:
        if one["skipped"] is not None:
            why = one["skipped"] if one["skipped"].startswith("not") else "too few images"
            reasons.setdefault(why, []).append(f"{one['label']} ({one['images']})")
    for why, some in reasons.items():
        yield f"Left out, {why}: {', '.join(some[:12])}{f' and {len(some) - 12} more' if len(some) > 12 else ''}."
    for one in design["classes"]:
        if one["skipped"] is None and not one["clusters"]:
            yield f"{one['label']}: none of its relevant patches stand together in as many images as a cluster needs."


def clusters_table(ranked: Sequence[Judged]) -> Table:
    head = (
        "cluster",
        "rank",
        "alarm",
        "score",
        "added",
        "removed",
        "accuracy",
        "images",
        "here",
        "elsewhere",
        "outside",
    )
    rows = []
    for one in ranked[:LISTED]:
        v = one.values
        rows.append(
            (
                f"{one.told['cluster']}: {one.told['label']}",
                str(one.rank or "–"),
                "yes" if one.alarm else "no",
                both(v, "score"),
                both(v, "inserted"),
                both(v, "confidence_change"),
                both(v, "accuracy_change"),
                f"{one.told['images']}" + (" (few)" if one.told["images"] < 5 else ""),
                share(v["here"]),
                share(v["elsewhere"]) if np.isfinite(v["elsewhere"]) else "–",
                both(v, "outside"),
            )
        )
    return Table(
        "Clusters by rank",
        head,
        rows,
        "Score: what the cue adds to the probability of the class in images of other classes, less what ordinary parts "
        "of the class add. Added: without that control. Removed, accuracy: the change of probability and accuracy "
        "without the cluster's tokens, less that without as many random tokens. Here, elsewhere: the share of images "
        "of the class and of other classes in which it occurs, counted, without interval. In brackets, 95 % intervals.",
    )


def both(values: dict[str, float], name: str) -> str:
    """A mean and its interval."""
    if not np.isfinite(values[name]):
        return "–"
    ends = values[f"{name}_low"], values[f"{name}_high"]
    return number(values[name]) + (f" {span(ends)}" if np.isfinite(ends).all() else "")


def classes_table(design: dict[str, Any]) -> Table:
    rows = [
        (one["label"], f"{one['images']:,}", str(one["clusters"]), share(one["unclustered"]), one["skipped"] or "–")
        for one in design["classes"]
    ]
    about = "In no cluster: relevant patches that are alone or in clusters that are too small or too unstable."
    return Table("Classes", ("class", "images", "clusters", "in no cluster", "left out"), rows[:LISTED], about)


# -------------------------------------------------------------------------------------------------------------- charts


def charts(ranked: Sequence[Judged], study: Rows, second: Rows, names: Sequence[str]) -> list[Chart]:
    known = [one for one in ranked if one.rank is not None][:CHARTED]
    found = []
    if known:
        bars = [(title(v), v.values["score"], v.values["score_low"], v.values["score_high"]) for v in known]
        found.append(
            Chart(
                "scores",
                "Scores of the clusters",
                "What each cue adds to the probability of its class in images of other classes, less what ordinary "
                "parts of the class add, with 95 % intervals; alarms are dark.",
                partial(scores_figure, bars, [one.alarm for one in known]),
            )
        )
    shown = [one for i, one in enumerate(ranked) if i < SHOWN or one.alarm][: 2 * SHOWN]
    wanted = {number for one in shown for number in one.told["members"][:SHEET]}
    photos, maps = photos_of(second, {names[n] for n in wanted}), maps_of(study, {names[n] for n in wanted})
    box = tuple(study.about["box"]) if "box" in study.about else None
    for one in shown:
        tiles = [
            Tile(names[n], photos[names[n]], maps[names[n]], places, box)
            for n, places in list(zip(one.told["members"], one.told["places"]))[:SHEET]
            if names[n] in photos and names[n] in maps
        ]
        if tiles:
            head = f"Rank {one.rank or '–'}: {title(one)}{', alarm' if one.alarm else ''}"
            about = sentence(one)
            draw = partial(contact_figure, tiles, head, f"score {both(one.values, 'score')}")
            found.append(Chart(f"cluster-{one.told['cluster']}", head, about, draw))
    return found


def photos_of(second: Rows, names: set[str]) -> dict[str, Any]:
    return {one.name: from_jpeg(one.photo) for one in second.examples() if one.name in names}


def maps_of(study: Rows, names: set[str]) -> dict[str, np.ndarray]:
    """The maps of some images."""
    found: dict[str, np.ndarray] = {}
    for table in study.tables(["image", "map", "map_shape"]):
        rows = zip(table["image"].to_pylist(), flat_arrays(table["map"]), table["map_shape"].to_pylist())
        found |= {name: flat.reshape(shape) for name, flat, shape in rows if name in names and shape is not None}
    return found
