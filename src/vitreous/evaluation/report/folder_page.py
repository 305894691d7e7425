"""The index of a folder of explanations: one page that works offline, sorted and filtered in the browser."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from vitreous._support.words import count_of, number, percent, spoken
from vitreous.evaluation.report.page import HOME, whole_page

Row = dict[str, Any]
SEEN = (".png", ".svg", ".jpg", ".jpeg", ".webp")  # figures that a browser shows within the page


def page(results: Sequence[Sequence[Row]], failed: Sequence[Row]) -> str:
    """`results`: the rows of each."""
    entries = [entry(rows) for rows in results]
    classes = Counter(one["label"] for one in entries if one["label"])
    models = dict.fromkeys(row["model"] for rows in results for row in rows)
    methods = dict.fromkeys(row["method"] for rows in results for row in rows)
    return whole_page(
        "folder.html.j2",
        title="Explanations",
        lead=f"{count_of(len(entries), 'result')} of {spoken([*models])} with {spoken([*methods])}" if entries else "",
        entries=entries,
        failed=failed,
        classes=sorted(classes.items(), key=lambda pair: pair[0].lower()),
        shares=any(one["share"] is not None for one in entries),
        agreeing=any(one["agreement"] is not None for one in entries),
        own_style=asset("folder.css"),
        script=asset("folder.js"),
    )


def asset(name: str) -> Markup:
    return Markup((files(HOME) / name).read_text(encoding="utf-8"))


def entry(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page says of one result."""
    first = rows[0]
    share = first["predicted_probability"]
    value = first["predicted_value"] if share is None else share
    agreed = agreement(rows)
    thumbnail = next((row["thumbnail"] for row in rows if row["thumbnail"]), None)
    figure = first["figure"]
    return {
        "name": os.path.splitext(figure or first["maps"])[0],
        "image": first["image"],
        "file": PurePath(first["image"]).name,
        "label": first["predicted"],
        "share": share,
        "value": value,
        "told": "–" if value is None else percent(value) if share is not None else f"{value:.4g}",
        "agreement": agreed,
        "agreed": "–" if agreed is None else number(agreed),
        "maps": [map_of(row) for row in rows],
        "figure": quote(figure) if figure else None,
        "shown": bool(figure) and figure.lower().endswith(SEEN),
        "numbers": quote(first["maps"]) if first["maps"] else None,
        "thumbnail": f"data:image/webp;base64,{base64.b64encode(thumbnail).decode()}" if thumbnail else None,
    }


def agreement(rows: Sequence[Row]) -> float | None:
    """The mean over the targets of a result."""
    by_target = {row["target"]: row["agreement"] for row in rows if row["agreement"] is not None}
    return sum(by_target.values()) / len(by_target) if by_target else None


def map_of(row: Row) -> dict[str, str]:
    """A method, what it explains, and its options and notes in words."""
    label, share = row["target_label"] or row["target"], row["target_probability"]
    aim = "" if label is None else label if share is None else f"{label} {share:.2g}"
    told = {**json.loads(row["options"] or "{}"), **json.loads(row["notes"] or "{}")}
    return {"method": row["method"], "target": aim, "told": ", ".join(f"{key} {value}" for key, value in told.items())}
