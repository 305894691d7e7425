"""Put targets on the images of a trace of a detector."""

from __future__ import annotations

from vitreous.errors import TargetError
from vitreous.models.model import Model
from vitreous.trace.area import Sides
from vitreous.trace.concept import Concept, Text
from vitreous.trace.crops import Crop, Crops
from vitreous.trace.detection import Detected, Detection, Sought
from vitreous.trace.parse_target import parse_text
from vitreous.trace.region import Region
from vitreous.trace.target import Class, Contrast, Each, Neuron, Target, Top, checked


def sought(target: Target, model: Model, crops: Crops, count: int) -> Target:
    """The target on the images of a detector."""
    if isinstance(target, Contrast):
        return Contrast(*(sought(one, model, crops, count) for one in (target.one, target.other)))
    if isinstance(target, Each):
        return together([sought(one, model, crops.of(i), 1) for i, one in enumerate(target.targets)])
    if isinstance(target, Class):
        return Detected(model, tuple(Sought(number) for number in target.numbers))
    if isinstance(target, Top):
        return Detected(model, (Sought(target),))
    if isinstance(target, Detection):
        return detected(target, model, crops, count)
    if isinstance(target, Neuron | Concept | Text | Region):
        said = f"{target}: {model.name} has {model.form.value}"
        raise TargetError(f"{said}; give CLASS@query:17, CLASS@box:x0,y0,x1,y1, a class or top-1")
    return target


def together(each: list[Target]) -> Target:
    """One target for each image; of detections, one target that finds them all."""
    found = [one for one in each if isinstance(one, Detected) and len(one.each) == 1]
    if len(found) < len(each):
        return Each(tuple(each))
    return Detected(found[0].model, tuple(one.each[0] for one in found))


def detected(target: Detection, model: Model, crops: Crops, count: int) -> Detected:
    cls = class_of(target, model)
    if target.query is not None:
        return Detected(model, (Sought(cls, target.query, said=target.where),))
    return Detected(
        model, tuple(Sought(cls, box=seen_box(target, crops[i], model.name), said=target.where) for i in range(count))
    )


def class_of(target: Detection, model: Model) -> int | Top:
    if isinstance(target.cls, int):
        return checked(target.cls, model.outputs or 0, "class")
    found = parse_text(target.cls, model, model.outputs or 0)
    if isinstance(found, Top):
        return found
    if isinstance(found, Class) and isinstance(found.index, int):
        return found.index
    raise TargetError(f"{target}: {target.cls!r} is not one class")


def seen_box(target: Detection, crop: Crop, name: str) -> Sides:
    """A box in pixels of the image as shares of what the model sees of it."""
    if crop.seen is None:
        said = f"{target}: the preprocessing of {name} shows the model no upright rectangle of the image"
        raise TargetError(f"{said}, so a place in it is not known; give {target.cls}@query:17")
    left, top, right, bottom = crop.seen
    assert target.box is not None
    x0, y0, x1, y1 = target.box
    wide, high = right - left, bottom - top
    return (x0 - left) / wide, (y0 - top) / high, (x1 - left) / wide, (y1 - top) / high
