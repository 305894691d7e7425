"""Parse targets at places: "cat@120,80", "3@10,20,50,90", "cat@mask.png", "cat@predicted", "value@120,80"."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vitreous.errors import TargetError
from vitreous.trace.detection import parse_detection
from vitreous.trace.region import PREDICTED, Region
from vitreous.trace.target import Class, Contrast, Target, Top

NUMBER = r"\s*-?\d+(?:\.\d+)?\s*"
VALUE = "value"  # the only number at each place
Name = Callable[[str], Target]  # parses the class


def parse_located(text: str, name: Name, outputs: int) -> Target:
    """Parse a class at a place, or two of them, one rather than the other: "cat@1,2-dog@1,2", "cat-dog@1,2"."""
    if text.count("@") == 1:
        cls, _, where = text.partition("@")
        with suppress(TargetError):
            return at(parse_class(cls.strip(), name, outputs), where.strip())
    for dash in [i for i, c in enumerate(text) if c == "-" and "@" in text[:i] and "@" in text[i + 1 :]]:
        with suppress(TargetError):
            one, other = (parse_located(part.strip(), name, outputs) for part in (text[:dash], text[dash + 1 :]))
            return Contrast(one, other)
    cls, _, where = text.partition("@")
    return at(parse_class(cls.strip(), name, outputs), where.strip())  # raises what is wrong


def parse_class(text: str, name: Name, outputs: int) -> Target:
    if text.lower() != VALUE:
        return name(text)
    if outputs != 1:
        raise TargetError(f"value: the model has {outputs} numbers at each place; say which, from 0: 0@x,y")
    return Class(0)


def at(target: Target, where: str) -> Target:
    """A class, or one rather than the other, at a place."""
    if isinstance(target, Contrast):
        return Contrast(at(target.one, where), at(target.other, where))
    if isinstance(target, Top):
        return region(str(target), where)
    if isinstance(target, Class) and isinstance(target.index, int):
        return region(target.index, where)
    raise TargetError(f"{target}@{where}: only a class has a place")


def region(cls: int | str, where: str) -> Target:
    detection = parse_detection(cls, where)
    if detection is not None:
        return detection
    numbers = [float(part) for part in where.split(",")] if re.fullmatch(f"{NUMBER}(,{NUMBER})*", where) else []
    if len(numbers) == 2:
        return Region(cls, point=(numbers[0], numbers[1]))
    if len(numbers) == 4:
        return Region(cls, box=(numbers[0], numbers[1], numbers[2], numbers[3]))
    if where.lower() == PREDICTED:
        return Region(cls, predicted=True)
    if not numbers and "@" not in where and Path(where).suffix:  # the file is read when it is placed on an image
        return Region(cls, mask=where)
    raise TargetError(
        f"{cls}@{where}: {where!r} is no place and no mask; give CLASS@x,y, CLASS@x0,y0,x1,y1 (pixels of the image), "
        "CLASS@mask.png or CLASS@predicted"
    )
