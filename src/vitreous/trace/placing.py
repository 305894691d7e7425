"""Put targets on the images of a trace, where the model has an output for each place."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitreous.errors import InputError, TargetError
from vitreous.images import masks
from vitreous.models.model import Model
from vitreous.models.output import Form
from vitreous.trace.area import Area, Drawn, Point, Sides, boxed
from vitreous.trace.concept import Concept, Text
from vitreous.trace.crops import Crop, Crops
from vitreous.trace.detecting import sought
from vitreous.trace.detection import best_detections
from vitreous.trace.parse_target import parse_text
from vitreous.trace.region import Placed, Region, Spot, predicted_shares
from vitreous.trace.target import Class, Contrast, Each, Neuron, Target, Top
from vitreous.trace.trace import Trace


def place(target: Target, trace: Trace) -> Target:
    """The target on the images of a trace: a class without a place means the places where it is predicted."""
    put = sought if trace.model.form is Form.DETECTIONS else placed
    return put(target, trace.model, trace.crops, len(trace))


def best_classes(trace: Trace) -> list[int]:
    """The best class of each image: of an output for each place, the one that is predicted in most of them."""
    model, output = trace.model, trace.output
    if model.form is Form.DENSE:
        return [int(predicted_shares(one, model).argmax()) for one in output]
    if model.detections is not None:
        return [best_detections(one, model, 1)[0][0] for one in output]
    found: list[int] = output.argmax(1).tolist()
    return found


def placed(target: Target, model: Model, crops: Crops, count: int) -> Target:
    if isinstance(target, Contrast):
        return Contrast(*(placed(one, model, crops, count) for one in (target.one, target.other)))
    if isinstance(target, Each):
        each = [placed(one, model, crops.of(i), 1) for i, one in enumerate(target.targets)]
        spots = [spot for one in each if isinstance(one, Placed) for spot in one.spots]
        return Placed(model, tuple(spots)) if len(spots) == len(each) else Each(tuple(each))
    if isinstance(target, Class):
        return Placed(model, tuple(Spot(number, "predicted") for number in target.numbers))
    if isinstance(target, Top):
        return Placed(model, (Spot(target, "predicted"),))
    if isinstance(target, Region):
        return region(target, model, crops, count)
    if isinstance(target, Neuron | Concept | Text):
        said = f"{target}: {model.name} has {model.form.value}, so one number of it, or its embedding, is no score"
        raise TargetError(f"{said} of an image; give CLASS@x,y, CLASS@x0,y0,x1,y1, CLASS@mask.png or CLASS@predicted")
    return target


def region(target: Region, model: Model, crops: Crops, count: int) -> Placed:
    outputs = model.outputs or 0
    found = parse_text(str(target.cls), model, outputs) if isinstance(target.cls, str) else Class(target.cls)
    if not isinstance(found, Top) and not (isinstance(found, Class) and isinstance(found.index, int)):
        raise TargetError(f"{target}: {target.cls!r} is not one class")
    cls = found if isinstance(found, Top) else found.numbers[0]
    if target.predicted:
        return Placed(model, (Spot(cls, target.where),))
    said, pixels = target.where, None
    if target.mask is not None:
        pixels = drawn(target.mask)
        if not isinstance(target.mask, str | Path):
            said = f"mask:{hashlib.sha256(pixels.tobytes()).hexdigest()[:8]}"  # of no file
    areas = (area_of(target, pixels, crops[i], model.name, i) for i in range(count))
    return Placed(model, tuple(Spot(cls, said, area) for area in areas))


def drawn(mask: Any) -> np.ndarray:
    try:
        return masks.open_mask(mask, 0)
    except InputError as error:
        raise TargetError(str(error)) from None


def area_of(target: Region, pixels: np.ndarray | None, crop: Crop, name: str, number: int) -> Area:
    """The part of what the model sees; raise if it sees nothing of it."""
    (wide, high), seen = crop
    if seen is None:
        said = f"{target}: the preprocessing of {name} shows the model no upright rectangle of the image"
        raise TargetError(f"{said}, so a place in it is not known; give CLASS@predicted, or a float tensor")
    if target.point is not None:
        return point_area(target, crop, seen, name)
    if target.box is not None:
        left, top, right, bottom = target.box
        area = boxed((left, top, right, bottom), seen)
    else:
        assert pixels is not None
        masks.check_shape((pixels.shape[1], pixels.shape[0]), crop.size, number)
        across, down = pixels.shape[1] / wide, pixels.shape[0] / high
        area = Drawn(pixels, (seen[0] * across, seen[1] * down, seen[2] * across, seen[3] * down))
    if float(area.coverage((1, 1))) <= 0:
        what = "is empty or " if pixels is not None else ""
        raise TargetError(f"{target} {what}lies outside what {name} sees of the image: {sees(crop, seen)}")
    return area


def point_area(target: Region, crop: Crop, seen: Sides, name: str) -> Point:
    """The point in the middle of a pixel."""
    assert target.point is not None
    x, y = target.point
    wide, high = crop.size
    if not (0 <= x < wide and 0 <= y < high):
        raise TargetError(f"{target} lies outside the image, which has {wide}×{high} pixels")
    middle = partial(share_of, seen=seen)
    across, down = middle(x + (0.5 if x == int(x) else 0), axis=0), middle(y + (0.5 if y == int(y) else 0), axis=1)
    if not (0 <= across < 1 and 0 <= down < 1):
        raise TargetError(f"{target} lies outside what {name} sees of the image: {sees(crop, seen)}")
    return Point(across, down)


def share_of(pixel: float, seen: Sides, axis: int) -> float:
    return (pixel - seen[axis]) / (seen[axis + 2] - seen[axis])


def sees(crop: Crop, seen: Sides) -> str:
    """What is seen of an image, for people."""
    left, top, right, bottom = (round(side, 1) for side in seen)
    wide, high = crop.size
    return f"x from {left:g} to {right:g}, y from {top:g} to {bottom:g} of {wide}×{high} pixels"
