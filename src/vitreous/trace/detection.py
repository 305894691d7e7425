"""Targets of a detector: a class at one of its queries.

Detection("cat", query=17)                  "cat@query:17"                at this query
Detection("cat", box=(10, 20, 200, 180))    "cat@box:10,20,200,180"       at the query whose box fits this one best
"cat"   the query with the highest probability of the class      "top-1"   the best detection      "top-2"   the second
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitreous.errors import TargetError
from vitreous.models.detected import Detections
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning, Of
from vitreous.trace.area import Sides
from vitreous.trace.target import Target, Top, checked
from vitreous.types import Box, Output, Scores

QUERY, BOX = "query:", "box:"


@dataclass(frozen=True)
class Detection(Target):
    """The score of a class at one query of a detector.

    `cls`: a class by number or name; "top-1": the best class there. Give one of: `query`, its number from 0, or `box`
    (left, top, right, bottom), in pixels of the image that is explained: the query whose box overlaps it most (highest
    intersection over union; of equal ones, the one with the higher score). It is found in the image as it is, before
    anything is perturbed. The pixels of a float tensor are its own.
    """

    cls: int | str
    _: KW_ONLY
    query: int | None = None
    box: Sequence[float | int] | None = None
    names_classes = True

    def __post_init__(self) -> None:
        if (self.query is None) == (self.box is None):
            raise TargetError("a Detection is at one query: give query=17 or box=(x0, y0, x1, y1)")
        if self.box is None:
            return
        if len(self.box) != 4:
            raise TargetError(f"box={tuple(self.box)}: give 4 numbers, in pixels of the image")
        left, top, right, bottom = (float(side) for side in self.box)
        if not (left < right and top < bottom):
            raise TargetError(f"box={tuple(self.box)} is not (left, top, right, bottom)")
        object.__setattr__(self, "box", (left, top, right, bottom))

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        raise TargetError("a Detection is placed on an image by vitreous.explain; its coordinates are pixels of it")

    def check(self, model: Model, outputs: int) -> None:
        if model.form is not Form.DETECTIONS:
            said = f"{model.name} has {model.form.value}, so it has no {self}"
            raise TargetError(f"{said}; queries and their boxes are those of detectors: give a class")
        if isinstance(self.cls, int):
            checked(self.cls, outputs, "class")

    @property
    def where(self) -> str:
        """The query or its box, as text."""
        return f"{QUERY}{self.query}" if self.box is None else BOX + ",".join(f"{side:.10g}" for side in self.box)

    def __str__(self) -> str:
        return f"{self.cls}@{self.where}"


def parse_detection(cls: int | str, where: str) -> Detection | None:
    """Parse what stands behind the "@"; None if it is no query and no box."""
    kind, _, rest = where.lower().partition(":")
    if kind == "query":
        if not re.fullmatch(r"\s*\d+\s*", rest):
            raise TargetError(f"{cls}@{where}: {rest!r} is not the number of a query; write {cls}@{QUERY}17")
        return Detection(cls, query=int(rest))
    if kind != "box":
        return None
    try:
        left, top, right, bottom = (float(side) for side in rest.split(","))
    except ValueError:
        raise TargetError(f"{cls}@{where}: a box is four numbers; write {cls}@{BOX}x0,y0,x1,y1") from None
    return Detection(cls, box=(left, top, right, bottom))


@dataclass(frozen=True)
class Sought:
    """A class and a query in one image; what is not known yet is chosen by the model's output."""

    cls: int | Top  # a rank: the class that is so good there, or without a query, the detection
    query: int | None = None
    box: Sides | None = None  # left, top, right, bottom as shares of what the model sees
    said: str = ""  # where, as `parse` reads it

    @property
    def known(self) -> bool:
        return self.query is not None and isinstance(self.cls, int)

    def __str__(self) -> str:
        return f"{self.cls}@{self.said}" if self.said else str(self.cls)


@dataclass(frozen=True, eq=False)
class Detected(Target):
    """Detections in the images of one batch: the score of a class at a query, one for each image or for all."""

    model: Model
    each: tuple[Sought, ...]
    scale: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)  # of the scores of a query
    names_classes = True

    @property
    def read(self) -> Detections:
        found = self.model.detections
        assert found is not None, "a detector was never run"
        return found

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        if output.ndim != 3 or len(output) % len(self.each):
            said = f"{len(self.each)} targets for {len(output)} images; give one, or one for each image"
            raise TargetError(said if output.ndim == 3 else f"{self} needs an output for each query")
        check_queries([one.query for one in self.each], output.shape[1], self.model)
        count = len(output) // len(self.each)
        fixed = self if self.fixed else self._fixed(output.detach()[::count])
        rows = torch.arange(len(output), device=output.device)
        queries, numbers = (
            torch.tensor(some, device=output.device).repeat_interleave(len(output) // len(some))
            for some in (fixed.numbers_of_queries, fixed.numbers)
        )
        scores = output[rows, queries, : self.read.scores]
        return (scores if self.scale is None else self.scale(scores))[rows, numbers]

    @property
    def fixed(self) -> bool:
        return all(one.known for one in self.each)

    @property
    def varies(self) -> bool:
        return not self.fixed

    @property
    def numbers(self) -> list[int]:
        """The classes, once they are known."""
        return [one.cls for one in self.each if isinstance(one.cls, int)]

    @property
    def numbers_of_queries(self) -> list[int]:
        return [one.query for one in self.each if one.query is not None]

    def queries(self, images: int) -> list[tuple[int, ...]] | None:
        found = self.numbers_of_queries
        return [(query,) for query in found * (images // len(found))] if len(found) == len(self.each) else None

    def check(self, model: Model, outputs: int) -> None:
        for number in self.numbers:
            checked(number, outputs, "class")

    def fix(self, output: Output) -> Target:
        return self if self.fixed else self._fixed(output)

    def _fixed(self, output: Output) -> Detected:
        each = self.each * len(output) if len(self.each) == 1 else self.each
        found = tuple(find(one, rows.detach().float(), self.model) for one, rows in zip(each, output))
        return replace(self, each=found)

    def of_rows(self, rows: Sequence[int]) -> Target:
        return self if len(self.each) == 1 else replace(self, each=tuple(self.each[row] for row in rows))

    def graded(self, meaning: Meaning = Meaning.LOGITS, of: Of = "probability", exclusive: bool = True) -> Target:
        return replace(self, scale=meaning.scale(of, exclusive))

    def strings(self) -> list[str]:
        return [str(one) for one in self.each]

    def __str__(self) -> str:
        return ";".join(self.strings())

    def title(self, model: Model, output: Output, index: int) -> str:
        one = self.each[index if len(self.each) > 1 else 0]
        cls, query, share, _ = found_at(one, output[index].detach().float(), model)
        return f"{model.label(cls)} {model.meaning.written(share)} (query {query})"

    @property
    def identity(self) -> Hashable:
        return tuple(self.each)


def detected_shares(each: Sequence[Detected], output: Output, model: Model) -> dict[str, Any]:
    """The name of each image's detection, its probability, and its box (top, left, bottom, right, as shares)."""
    found = [found_at(one.each[0], rows.detach().float(), model) for one, rows in zip(each, output)]
    return {
        "labels": tuple(f"{model.label(cls)} (query {query})" for cls, query, _, _ in found),
        "probabilities": tuple(share for _, _, share, _ in found),
        "boxes": tuple(box for _, _, _, box in found),
    }


def found_at(one: Sought, output: Tensor, model: Model) -> tuple[int, int, float, Box]:
    """The class, the query, its probability and its box in one output [Q C+4]."""
    one, read = find(one, output, model), model.detections
    assert isinstance(one.cls, int) and one.query is not None and read is not None
    left, top, right, bottom = read.boxes(output[one.query]).tolist()
    return one.cls, one.query, float(read.probabilities(output[one.query])[one.cls]), (top, left, bottom, right)


def best_detections(output: Tensor, model: Model, count: int) -> list[tuple[int, int, float, Box]]:
    """The best detections in one output [Q C+4], best first."""
    ranks = range(1, min(count, len(output)) + 1)
    return [found_at(Sought(Top(rank)), output.detach().float(), model) for rank in ranks]


# ---------------------------------------------------------------------------------------------------- what is detected


def find(one: Sought, output: Tensor, model: Model) -> Sought:
    """The class and the query in one output [Q C+4]."""
    read = model.detections
    assert read is not None
    check_queries([one.query], len(output), model)
    shares = read.probabilities(output).nan_to_num(0)  # [Q C]
    query = one.query if one.query is not None else find_query(one, shares, read.boxes(output), model)
    rank = one.cls.rank if isinstance(one.cls, Top) and one.said else 1
    if rank > shares.shape[1]:
        raise TargetError(f"{one} is out of range: {model.name} has {shares.shape[1]} classes")
    cls = one.cls if isinstance(one.cls, int) else int(shares[query].topk(rank).indices[-1])
    return Sought(cls, query, said=f"{QUERY}{query}")


def check_queries(asked: Sequence[int | None], count: int, model: Model) -> None:
    for query in asked:
        if query is not None and query >= count:
            raise TargetError(f"query {query} is out of range: {model.name} has queries 0 to {count - 1}")


def find_query(one: Sought, shares: Tensor, boxes: Tensor, model: Model) -> int:
    """The query with the best box, or of the best detection, or with the highest probability of the class."""
    scores = shares[:, one.cls] if isinstance(one.cls, int) else shares.max(1).values  # [Q]
    if one.box is None:
        rank = 1 if isinstance(one.cls, int) else one.cls.rank
        if rank > len(scores):
            raise TargetError(f"{one} is out of range: {model.name} has {len(scores)} queries")
        return int(scores.topk(rank).indices[-1])
    fits = overlaps(boxes, torch.tensor(one.box).to(boxes))
    if not fits.max() > 0:
        raise TargetError(f"{one}: no box of {model.name} overlaps it in this image; give another, or {one.cls}")
    return int(torch.where(fits == fits.max(), scores, -1).argmax())


def overlaps(boxes: Tensor, box: Tensor) -> Tensor:
    """Intersection over union of boxes [Q 4] with one, [Q]."""
    inner = (torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])).clamp_min(0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp_min(0).prod(1)
    return inner / (areas + (box[2:] - box[:2]).prod() - inner).clamp_min(1e-12)
