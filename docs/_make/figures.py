"""Pictures of the site: the embedded model on packaged photos."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

import vitreous
from _make.cache import kept, kept_text
from _make.places import PHOTOS
from vitreous.attribution import Attribution
from vitreous.metrics.case import Score
from vitreous.plot.curves import Curve, curves_figure
from vitreous.plot.figure import explanation_figure, save_figure

CHEAPER: dict[str, dict[str, Any]] = {  # so that the site is built in minutes; the figures name these options
    "integrated_gradients": {"steps": 20},
    "optimus": {"single_heads": False},
    "rise": {"masks": 200},
}
CAT, CUP, BOTH = "cat.jpg", "coffee.jpg", "cat_and_coffee.jpg"
BOX = (130, 13, 311, 206)  # of the cup, in pixels of its photo
COMPARED = ("attn_lrp", "gae", "rollout", "random", "centre")  # by which metrics are shown
SUMS = ("integrated_gradients", "input_x_gradient")  # what adds up, and what does not
SHOWN = ("attention", "rollout", "gae", "cdam")  # on the first page
WIDE = 448


@cache
def model() -> vitreous.Model:
    return vitreous.load()


@cache
def trace(photo: str) -> vitreous.Trace:
    return vitreous.Trace(model(), str(PHOTOS / photo))


@cache
def explained(method: str, photo: str) -> Attribution:
    return vitreous.explain(model(), str(PHOTOS / photo), method, **CHEAPER.get(method, {}))


def draw_method(name: str) -> None:
    for photo in (CAT, CUP):
        thumbnail(name, photo)
    method_figure(name)


def draw_metric(name: str) -> None:
    for method in values(name):
        marked(method, name)
    if name in ACROSS:
        metric_figure(name)


def best(photo: str) -> list[tuple[str, float]]:
    """The model's five best classes."""
    values, classes = trace(photo).output.softmax(1)[0].topk(5)
    return [(model().label(int(i)), float(p)) for p, i in zip(values, classes)]


# -------------------------------------------------------------------------------------------------------------- methods


def method_figure(method: str) -> Path:
    """The photo, what the model says of it, and the map."""

    def make(file: Path) -> None:
        top = best(CAT)
        targeted = vitreous.METHODS[method].targeted
        rows = [f"{top[0][0]} {top[0][1]:.2f}"] if targeted else []
        save_figure(explanation_figure([[explained(method, CAT)]], top=top, rows=rows), file)

    return kept(f"methods/{method}.webp", make)


def home_figure() -> Path:
    """One image, two classes, two different maps."""

    def make(file: Path) -> None:
        own, asked = trace(BOTH), ("espresso", "tabby")
        maps = [[vitreous.explain(model(), own, method, target) for method in ("gae", "gradcam")] for target in asked]
        save_figure(explanation_figure(maps, top=best(BOTH), rows=asked), file)

    return kept("home.webp", make)


def thumbnail(method: str, photo: str) -> Path:
    """The map over the photo, small."""

    def make(file: Path) -> None:
        small(explained(method, photo).overlay()).save(file)

    return kept(f"gallery/{method}-{Path(photo).stem}.webp", make)


def photo_thumbnail(photo: str) -> Path:
    def make(file: Path) -> None:
        shown = explained("centre", photo).seen()
        small(shown).save(file)

    return kept(f"gallery/{Path(photo).stem}.webp", make)


def small(picture: Image.Image) -> Image.Image:
    return picture.resize((WIDE, round(WIDE * picture.height / picture.width)), Image.Resampling.LANCZOS)


# -------------------------------------------------------------------------------------------------------------- metrics


def scene(metric: str) -> tuple[str, dict[str, Any]]:
    """The photo on which a metric is shown, and what it needs to know of it."""
    return (CUP, {"masks": [BOX]}) if vitreous.METRICS[metric].masks else (CAT, {})


@cache
def scores(metric: str) -> dict[str, Score]:
    """What a metric says of a few methods, controls among them."""
    photo, more = scene(metric)
    names = SUMS if metric == "completeness" else COMPARED
    path = str(PHOTOS / photo)
    if vitreous.METRICS[metric].others:  # the packaged photos, this one first
        every = [path, *sorted(str(one) for one in PHOTOS.glob("*.jpg") if one.name != photo)]
        return {name: vitreous.evaluate(model(), every, name, metric) for name in names}
    return {name: vitreous.evaluate(model(), path, explained(name, photo), metric, **more) for name in names}


ACROSS = {
    "deletion": "share of patches hidden",
    "insertion": "share of patches shown",
    "token_deletion": "share of tokens removed",
    "srg": "share of tokens removed",
    "road": "share of patches removed",
    "saco": "patches, the most relevant group first",
    "sensitivity_n": "share of patches hidden at random",
    "parameter_randomisation": "parts shuffled, from the classifier down",
}
UP = {
    "srg": "probability, least relevant first − most relevant first",
    "road": "probability, least removed − most removed, halved",
    "saco": "drop of the probability when the group is hidden",
    "sensitivity_n": "correlation of sums and drops",
    "parameter_randomisation": "rank correlation with the map of the trained model",
}


def metric_figure(metric: str) -> Path:
    """The curves of a few methods on one photo."""

    def make(file: Path) -> None:
        found = scores(metric)
        curves = {}
        for name, score in found.items():
            assert score.curve is not None and score.at is not None
            line = score.curve[0].double().cpu().numpy()
            curves[name] = Curve(score.at, line, line, line)
        better = next(iter(found.values())).better
        up = UP.get(metric, f"probability of {best(scene(metric)[0])[0][0]}")
        save_figure(
            curves_figure(curves, f"{metric} on {scene(metric)[0]}", better=better, across=ACROSS[metric], up=up), file
        )

    return kept(f"metrics/{metric}.webp", make)


def marked(method: str, metric: str) -> Path:
    """A map as a metric sees it, with the box of the object where there is one."""
    photo, more = scene(metric)
    if not more:
        return thumbnail(method, photo)

    def make(file: Path) -> None:
        attribution = explained(method, photo)
        picture = small(attribution.overlay())
        left, top, right, bottom = model().preprocess.box(Image.open(PHOTOS / photo).size)
        scale = picture.width / (right - left), picture.height / (bottom - top)
        ends = [(BOX[i] - (left, top)[i % 2]) * scale[i % 2] for i in range(4)]
        draw = ImageDraw.Draw(picture)
        draw.rectangle(ends, outline="white", width=5)
        draw.rectangle(ends, outline="black", width=2)
        picture.save(file)

    return kept(f"gallery/{method}-{Path(photo).stem}-box.webp", make)


def values(metric: str) -> dict[str, str]:
    """What a metric says of a few methods, in words."""

    def make() -> str:
        return json.dumps({name: spoken(float(score.value[0])) for name, score in scores(metric).items()})

    found: dict[str, str] = json.loads(kept_text(f"metrics/{metric}.json", make))
    return found


def spoken(number: float) -> str:
    return "NaN" if math.isnan(number) else f"{number:.3f}" if abs(number) < 100 else f"{number:.0f}"
