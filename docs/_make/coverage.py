"""Which methods work on which models: the zoo of the tests, asked through the library's own check."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from _make.places import ROOT
from vitreous import METHODS, Model, Trace, explain
from vitreous.errors import Unsupported
from vitreous.models.layout import Layout
from vitreous.trace.apply import why_not

FAMILIES = dict.fromkeys(one.family for one in METHODS.values())
SHORT = {"attention_gradient": "attention × gradient", "lrp": "relevance", "cam": "CAM"}


def table() -> str:
    """A row for each model of the zoo: its geometry, how many methods of each family work, and why others do not."""
    sys.path.insert(0, str(ROOT / "tests"))
    import test_video as video
    import zoo

    heads = [SHORT.get(family, family) for family in FAMILIES]
    rows = [
        f"| model, as tested | tokens | the classifier reads | {' | '.join(heads)} |",
        "|---|---|---|" + "--|" * len(heads),
    ]
    reasons: dict[str, list[str]] = {}
    done: dict[str, str] = {}
    pictured = [(name, zoo.model(name), zoo.images(name, 1)) for name in zoo.ZOO]
    filmed = [(f"HF {shown}, of videos", video.model(kind), video.clips()[:1]) for kind, shown in video.SHOWN.items()]
    for name, model, images in [*pictured, *filmed]:
        layout = Trace(model, images).layout
        refused = refusals(model, layout, images)
        for said in Counter(refused.values()):
            methods = [m for m, why in refused.items() if why == said]
            reasons.setdefault(f"{said}: {listed(methods)}", []).append(name)
        cells = f"{tokens(layout)} | {reads(layout)} | {' | '.join(shares(refused))}"
        if done.get(name.replace(" eager", " sdpa")) == cells:
            continue
        done[name] = cells
        rows.append(f"| {name.replace(' sdpa', ', sdpa and eager')} | {cells} |")
    notes = [f"* **{', '.join(names)}**: {said}." for said, names in reasons.items()]
    dense = ['<div class="dense" markdown>', "\n".join(rows), "</div>"]
    return "\n\n".join([*dense, "Methods that are refused, and why:", "\n".join(notes)])


def refusals(model: Model, layout: Layout, images: Any) -> dict[str, str]:
    """Each method that cannot work here, with the reason."""
    found = {name: reason(why_not(layout, "", one)) for name, one in METHODS.items() if why_not(layout, "", one)}
    if layout.obstacle is None and len(layout.blocks) != layout.layers:  # whether it matters, only a run can tell
        for name, one in METHODS.items():
            if (one.attention and not one.alone) or name == "value_zeroing":
                try:
                    explain(model, images, name, None if not one.targeted else 1)
                except Unsupported:
                    found[name] = "needs layers that are modules; these are not"
    return found


def reason(said: str | None) -> str:
    """`rollout needs token attention; swin attends in windows. Try …` to its middle."""
    assert said is not None
    first, _, rest = said.partition("; ")
    return f"{first.split(' ', 1)[1]}; this one {rest.split('. Try')[0].strip()}"


def listed(methods: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)


def shares(refused: dict[str, str]) -> list[str]:
    """For each family, whether its methods work."""
    cells = []
    for family in FAMILIES:
        names = [name for name, one in METHODS.items() if one.family == family]
        able = [name for name in names if name not in refused]
        cells.append("✓" if able == names else f"{len(able)} of {len(names)}" if able else "–")
    return cells


def tokens(layout: Layout) -> str:
    parts = [f"{layout.prefix} before" if layout.prefix else "", f"{layout.suffix} after" if layout.suffix else ""]
    extra = ", ".join(part for part in parts if part)
    return "×".join(map(str, layout.cells)) + (f", {extra}" if extra else "")


def reads(layout: Layout) -> str:
    """The tokens that the classifier reads, in words."""
    if layout.obstacle is not None:
        return "–"
    patches = set(range(layout.prefix, layout.prefix + layout.patches))
    read = set(layout.readout)
    if layout.pooled:
        return "all, through its own attention"
    if read == patches:
        return "the patches"
    others = sorted(read - patches)
    words = f"token {', '.join(map(str, others))}"
    return f"{words} and the patches" if read & patches else words
