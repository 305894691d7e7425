"""Which methods work on which models: the zoo of the tests, asked through the library's own check."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from _make.places import ROOT
from vitreous import METHODS, Model, Trace, explain
from vitreous.errors import EmptyMap, Unsupported
from vitreous.models.layout import Layout
from vitreous.models.output import Form
from vitreous.trace.apply import why_not

FAMILIES = dict.fromkeys(one.family for one in METHODS.values())
SHORT = {"attention_gradient": "attention × gradient", "lrp": "relevance", "cam": "CAM"}


WINDOWED = ("SwinV2", "MaxViT", "Hiera", "MViTv2", "PVTv2", "Twins", "DaViT", "SAM", "LeViT")
DENSE = ("SegFormer", "DPT", "Depth Anything", "EoMT", "Mask2Former")
WORDS = ("llava", "qwen2_5")
LONGEST = 160  # letters of a reason


def table() -> str:
    """A row for each model of the zoo: its geometry, how many methods of each family work, and why others do not."""
    sys.path.insert(0, str(ROOT / "tests"))

    heads = [SHORT.get(family, family) for family in FAMILIES]
    rows = [
        f"| model, as tested | tokens | the classifier reads | {' | '.join(heads)} |",
        "|---|---|---|" + "--|" * len(heads),
    ]
    reasons: dict[str, list[str]] = {}
    done: dict[str, str] = {}
    for name, model, images in tested():
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


def tested() -> Iterator[tuple[str, Model, Any]]:
    """Tiny models of every kind, each with an image or a video."""
    import detectors
    import test_dense_families as dense
    import test_language as language
    import test_video as video
    import windowed
    import zoo

    for name in zoo.ZOO:
        yield name, zoo.model(name), zoo.images(name, 1)
    for name in WINDOWED:
        model, images = windowed.model(name)
        yield name, model, images[:1]
    for name in DENSE:
        yield f"HF {name}, for each place", Model(dense.FAMILIES[name][0](), name=name), torch.randn(1, 3, 64, 64)
    for name, net, size in (("DETR", detectors.detr(), detectors.LARGE), ("YOLOS", detectors.yolos(), detectors.WIDE)):
        yield f"HF {name}, detector", Model(net, name=name), torch.randn(1, 3, *size)
    for name in WORDS:
        yield f"HF {name}, word by word", language.answered(name), language.images(1)
    for kind, shown in video.SHOWN.items():
        yield f"HF {shown}, of videos", video.model(kind), video.clips()[:1]


def refusals(model: Model, layout: Layout, images: Any) -> dict[str, str]:
    """Each method that cannot work here, with the reason."""
    found = {name: reason(why_not(layout, "", one)) for name, one in METHODS.items() if why_not(layout, "", one)}
    modules = layout.obstacle is None and len(layout.blocks) == layout.layers
    if modules and model.form is Form.VECTOR and model.frames is None:
        return found
    for name, one in METHODS.items():  # what else it needs, only a run can tell
        if name in found or one.alone or one.costly or one.family in ("control", "perturbation", "gradient"):
            continue
        try:
            target = None if model.form is not Form.VECTOR else 1 if one.targeted else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                explain(model, images, name, "word:1" if model.form is Form.WORDS else target, **dict(one.cheap))
        except EmptyMap:
            continue
        except Unsupported as error:
            found[name] = "needs layers that are modules; these are not" if modules else own_reason(str(error), name)
    return found


def own_reason(said: str, name: str) -> str:
    """What a method says when it is run, without its name and its advice."""
    short = said.removeprefix(f"{name} ").removeprefix(f"{name}: ").partition(". Try")[0].partition("; try")[0]
    return short if len(short) < LONGEST else f"{short[:LONGEST]}…"


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
    if not others:
        return "some of the patches"
    words = f"token {', '.join(map(str, others))}"
    return f"{words} and the patches" if read & patches else words
