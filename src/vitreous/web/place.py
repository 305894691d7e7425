"""The kinds of targets, and where a target is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Kind = Literal["classes", "regions", "boxes", "words", "texts", "concepts", "latents", "neurons", "contrasts"]


class Place(BaseModel):
    """Where a target is, in shares of what the model sees."""

    kind: Literal["point", "box", "mask"]
    sides: list[float] = []  # of a point x, y; of a box left, top, right, bottom
    shape: tuple[int, int] | None = None  # of a mask: rows, columns
    runs: list[int] = []  # of a mask: the lengths of runs, row by row, first of what is outside
