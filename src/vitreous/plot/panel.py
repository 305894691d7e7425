"""One map with its legend, its name and options, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitreous.plot import colour
from vitreous.plot.explained import Explained
from vitreous.plot.outline import outlined
from vitreous.plot.overlay import LONG_SIDE, bare, overlay, paint
from vitreous.plot.region import surrounded
from vitreous.plot.sheet import HEAD, PALE, QUIET, SMALL, Sheet, compact, printable
from vitreous.registry import METHODS

MARGIN = 0.25  # inches, as everything below
LEGEND = 0.26  # the strip and its numbers; a signed map's words need one line more
WORDS = 0.13
STRIP = 0.055
AREA = 3.6  # of a panel, in square inches, whatever its shape


@dataclass(frozen=True)
class Panel:
    """One map, coloured, with the numbers its colours stand for."""

    photo: Image.Image | None
    picture: Image.Image
    ends: tuple[float, float]
    span: tuple[float, float] | None  # smallest and largest value; None: no number at all
    signed: bool
    control: bool

    @classmethod
    def of(
        cls,
        attribution: Explained,
        index: int,
        photo: Image.Image | None,
        cells: bool,
        least: int = LONG_SIDE,
    ) -> Panel:
        """The map over its image, or alone where there is none; over an image, its long side has at least `least`."""
        map = attribution.map[index].detach().float().cpu().numpy()
        inside = ~np.isnan(map)
        map = map[inside.any(-1)][:, inside.any(-2)] if inside[0, 0] else map  # beyond a smaller map than another's
        signed, control = attribution.signed, colour.is_control(attribution.method)
        ends = colour.limits(map, signed, colour.is_level(attribution.method))
        if photo is None:
            picture = bare(map, signed, cells=cells, limits=ends, control=control)
        else:
            how: dict[str, Any] = {"cells": cells, "limits": ends, "control": control, "least": least}
            picture = overlay(map, photo, signed, box=attribution.box, **how)
        numbers = map[np.isfinite(map)]
        span = (float(numbers.min()), float(numbers.max())) if numbers.size else None
        around = attribution.boxes[index] if attribution.boxes else None
        region = attribution.regions[index] if attribution.regions else None
        photo = None if photo is None else surrounded(outlined(photo, around), region)
        return cls(photo, surrounded(outlined(picture, around), region), ends, span, signed, control)

    @classmethod
    def unsigned(
        cls,
        map: np.ndarray,
        photo: Image.Image | None,
        cells: bool,
        limits: tuple[float, float] | None = None,
        size: tuple[int, int] | None = None,
    ) -> Panel:
        """A map without a sign, over its image or, at `size`, alone."""
        ends, numbers = limits or colour.limits(map, False), map[np.isfinite(map)]
        span = (float(numbers.min()), float(numbers.max())) if numbers.size else None
        if photo is None:
            picture = bare(map, False, cells=cells, limits=ends, size=size)
        else:
            picture = overlay(map, photo, False, cells=cells, limits=ends)
        return cls(photo, picture, ends, span, signed=False, control=False)

    def draw(self, sheet: Sheet, x: float, y: float, width: float, height: float, column: float) -> None:
        """The image, and under it the legend."""
        framed(sheet, self.picture, x, y, width, height)
        y += height + 0.06
        ramp = paint(np.linspace(0, 1, 256), self.signed, self.control)
        sheet.image(ramp[None].astype(np.uint8), x, y, column, STRIP)
        self.numbers(sheet, x, y + STRIP + 0.09, column)

    def numbers(self, sheet: Sheet, x: float, y: float, room: float) -> None:
        """What the ends of the strip mean; "≥" where the map goes beyond them."""
        if self.span is None or self.span == (0, 0):
            said = "no number in this map" if self.span is None else "0 everywhere"
            sheet.text(said, x, y, room, SMALL)
            return
        (low, high), (least, most) = self.ends, self.span
        margin = 0.05 * (high - low)
        left = ("≤ " if least < low - margin else "") + compact(low)
        right = ("≥ " if most > high + margin else "") + compact(high)
        sheet.text(left, x, y, room / 2, SMALL)
        sheet.text(right, x + room, y, room / 2, SMALL, "right")
        if self.signed:
            if room - sheet.measure(left, SMALL) - sheet.measure(right, SMALL) > 0.5:
                sheet.text("0", x + room / 2, y, room, SMALL, "center")
            sheet.text("against", x, y + WORDS, room / 2, SMALL)
            sheet.text("evidence", x + room, y + WORDS, room / 2, SMALL, "right")


def framed(sheet: Sheet, picture: Image.Image, x: float, y: float, width: float, height: float) -> None:
    """An image with a hairline around it, fitted into the room from the upper left."""
    scale = min(width / picture.width, height / picture.height)
    width, height = picture.width * scale, picture.height * scale
    line = 0.004
    sheet.box(x - line, y - line, width + 2 * line, height + 2 * line, PALE)
    sheet.image(picture, x, y, width, height)


def shape(picture: Image.Image, area: float = AREA) -> tuple[float, float]:
    """Width and height of a panel for images of this shape."""
    aspect = min(4.0, max(0.25, picture.width / picture.height))
    return (area * aspect) ** 0.5, (area / aspect) ** 0.5


def footer(sheet: Sheet, attribution: Explained, image: str) -> None:
    sign(sheet, attribution.model, image, attribution.version)


def sign(sheet: Sheet, model: str, image: str, version: str) -> None:
    """Model, image, version at the foot; long names lose letters in the middle."""
    parts = [printable(model), printable(image), f"vitreous {version}"]
    room = sheet.width - 2 * MARGIN
    while sheet.measure(" · ".join(parts), SMALL) > room and max(map(len, parts[:2])) > 8:
        longest = 0 if len(parts[0]) >= len(parts[1]) else 1
        letters = parts[longest].replace("…", "")
        half = len(letters) // 2
        parts[longest] = f"{letters[:half]}…{letters[half + 1 :]}"
    sheet.text(" · ".join(parts), MARGIN, sheet.height - MARGIN, room, SMALL)


def legend_height(signed: bool) -> float:
    return LEGEND + (WORDS if signed else 0)


def heading(sheet: Sheet, attribution: Explained, x: float, y: float, room: float, *, target: bool = False) -> None:
    """The method's name, under it what was asked of it."""
    told = [changed_options(attribution)]
    if target and attribution.target and len(set(attribution.targets)) == 1:
        told.insert(0, f"target {attribution.target}")
    sheet.text(attribution.method, x, y + 0.07, room, HEAD)
    sheet.text(" · ".join(t for t in told if t), x, y + 0.25, room, QUIET)


def changed_options(attribution: Explained) -> str:
    """The options that differ from their defaults; all of them where the method is not known here."""
    known = attribution.method in METHODS
    fields: Mapping[str, Any] = METHODS[attribution.method].options.model_fields if known else {}
    defaults = {name: settled(field.default) for name, field in fields.items()}
    values = {name: settled(value) for name, value in attribution.options.items()}
    return ", ".join(f"{k}={spell(v)}" for k, v in values.items() if k not in defaults or defaults[k] != v)


def settled(value: Any) -> Any:
    """JSON knows no tuples: (3, 4) comes back from a file as [3, 4]."""
    return tuple(settled(v) for v in value) if isinstance(value, list | tuple) else value


def spell(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(spell(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
