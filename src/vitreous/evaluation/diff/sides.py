"""What two models must share to be compared: their classes, by name, and the part of an image that both see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitreous.attribute import attribute
from vitreous.errors import TargetError, Unsupported
from vitreous.evaluation.diff.measures import Corners
from vitreous.models.labels import ClassNames, names
from vitreous.models.match_labels import SAME
from vitreous.models.model import Model
from vitreous.models.survey_run import noise_images
from vitreous.trace.apply import class_methods
from vitreous.trace.trace import Trace

SIZES = ((400, 400), (600, 400), (400, 600))  # of images: what is seen of all of them must lie alike
NEAR = 0.02  # of a view: boxes that differ by less are the same


def usual_method(models: Sequence[Model], beside: Any = None) -> str:
    """The best quick map for a class that works on all, tried on noise; `beside`: what the network gets with it."""
    refused: list[Unsupported] = []
    for declared in class_methods():
        try:
            for model in models:
                trace = Trace(model, noise_images(model, model.size)[:1], beside)
                attribute(trace, declared, None, declared.check({}), strict=False)
            return declared.name
        except Unsupported as error:
            refused.append(error)
    raise refused[0]


def match_classes(a: Model, b: Model) -> tuple[list[int] | None, list[str]]:
    """The second model's number of each class of the first (−1: none), and notes; None if the numbers are the same."""
    for model in (a, b):
        _ = model.layout  # the layout run tells the number of outputs
    count, other = (model.outputs or 0 for model in (a, b))
    if not a.labels or not b.labels:
        if count == other:
            return None, []
        said = f"{a.name} has {count} classes and {b.name} {other}, and not all have names to match them by"
        raise TargetError(f"{said}; give the names: --labels, or Model(net, labels=…)")
    found = by_name(a, b, count)
    if count == other:
        found = in_place(found)
        if found == list(range(count)):
            return None, []
    lost = sum(number < 0 for number in found)
    if lost == count:
        said = f"{a.name} and {b.name} have no class in common ({first(a)} …; {first(b)} …)"
        raise TargetError(f"{said}; two models of the same classes can be compared, under the same names: --labels")
    said = f"{lost} of {count} classes of {a.name} are no classes of {b.name}; such an answer counts as another one"
    return found, [said] if lost else []


def by_name(a: Model, b: Model, count: int) -> list[int]:
    """The class of the same name, that of the same number first; −1: there is none."""
    known = ClassNames(b.labels)
    alike = [bool({*names(a.labels.get(i, ""))} & {*names(b.labels.get(i, ""))}) for i in range(count)]
    return [i if alike[i] else find(known, a.labels.get(i, "")) for i in range(count)]


def in_place(found: list[int]) -> list[int]:
    """If most classes have the same numbers, those without a name in common stand for each other, spelled otherwise."""
    if sum(i == number for i, number in enumerate(found)) <= SAME * len(found):
        return found
    taken = set(found)
    return [i if number < 0 and i not in taken else number for i, number in enumerate(found)]


def find(known: ClassNames, label: str) -> int:
    found = (known.find(name) for name in (label, *label.split(",")) if name.strip())
    return next((number for number in found if number is not None), -1)


def first(model: Model) -> str:
    return next(iter(model.labels.values())).split(",")[0]


def match_views(a: Model, b: Model) -> tuple[list[Corners] | None, list[str]]:
    """What both models see, as shares of the view of each, and notes; None if they see the same."""
    if a.preprocess.varies or b.preprocess.varies:
        return None, []
    found = [shared_part(a.preprocess.box(size), b.preprocess.box(size)) for size in SIZES]
    if all(near(corner, whole) for pair in found for box in pair for corner, whole in zip(box, (0, 0, 1, 1))):
        return None, []
    steady = all(near(x, y) for pair in found for box, usual in zip(pair, found[0]) for x, y in zip(box, usual))
    if not steady:
        said = f"{a.name} and {b.name} cut images of different shapes differently"
        return None, [f"{said}; maps are compared as if both saw the same part"]
    return list(found[0]), [f"{a.name} and {b.name} see different parts of an image; maps are compared where both see"]


def shared_part(one: Corners, other: Corners) -> tuple[Corners, Corners]:
    """The intersection of two boxes, as shares of each."""
    inside = (max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3]))
    return within(inside, one), within(inside, other)


def within(inside: Sequence[float], box: Corners) -> Corners:
    wide, high = box[2] - box[0], box[3] - box[1]
    left, top, right, bottom = inside
    return (left - box[0]) / wide, (top - box[1]) / high, (right - box[0]) / wide, (bottom - box[1]) / high


def near(one: float | int, other: float | int) -> bool:
    return abs(one - other) <= NEAR
