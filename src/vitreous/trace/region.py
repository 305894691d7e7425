"""Targets at places of the image, for a model with an output for each place: the mean of a class over a region.

Region(3, point=(120, 80))            "3@120,80"             at one pixel of the image
Region("cat", box=(10, 20, 50, 90))   "cat@10,20,50,90"      in a box: left, top, right, bottom
Region("cat", mask="cat.png")         "cat@cat.png"          in a mask of the image
Region("cat", predicted=True)         "cat@predicted"        where the class is the best one
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitreous.capture.attention import widen
from vitreous.errors import TargetError
from vitreous.models.model import Model
from vitreous.models.output import Form, Meaning, along_classes
from vitreous.trace.area import Area, Weighed
from vitreous.trace.target import Target, Top, checked
from vitreous.types import Output, Scores

PREDICTED = "predicted"
SHOWN = 5  # classes that a refusal names


@dataclass(frozen=True, eq=False)
class Region(Target):
    """The mean of a class's output over a part of the image, for models with an output for each place.

    `cls`: a class by number or name; "top-1": the best class there. Give one of: `point` (x, y), `box` (left, top,
    right, bottom), `mask` (a file, a PIL image or an array [Y, X]), all in pixels of the image that is explained, or
    `predicted=True`, the places where the class is the best one. The pixels of a float tensor are its own.
    """

    cls: int | str
    _: KW_ONLY
    point: Sequence[float | int] | None = None
    box: Sequence[float | int] | None = None
    mask: Any = None
    predicted: bool = False
    names_classes = True

    def __post_init__(self) -> None:
        given = [self.point is not None, self.box is not None, self.mask is not None, bool(self.predicted)]
        if sum(given) != 1:
            raise TargetError("a Region is one place: give point=(x, y), box=(x0, y0, x1, y1), mask= or predicted=True")
        for name, numbers in (("point", 2), ("box", 4)):
            values = getattr(self, name)
            if values is not None and len(values) != numbers:
                raise TargetError(f"{name}={tuple(values)}: give {numbers} numbers, in pixels of the image")
            if values is not None:
                object.__setattr__(self, name, tuple(float(value) for value in values))
        if self.box is not None and not (self.box[0] < self.box[2] and self.box[1] < self.box[3]):
            raise TargetError(f"box={self.box} is not (left, top, right, bottom)")

    @property
    def varies(self) -> bool:
        return self.predicted

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        raise TargetError("a Region is placed on an image by vitreous.explain; its coordinates are pixels of the image")

    def check(self, model: Model, outputs: int) -> None:
        if model.form is not Form.DENSE:
            said = f"{model.name} has {model.form.value}, so it has no {self}"
            raise TargetError(f"{said}; regions are for models with an output for each place: give a class")
        if isinstance(self.cls, int):
            checked(self.cls, outputs, "class")

    @property
    def where(self) -> str:
        """The place as text."""
        if self.predicted:
            return PREDICTED
        numbers = self.point if self.point is not None else self.box
        return str(self.mask) if numbers is None else ",".join(f"{value:.10g}" for value in numbers)

    def __str__(self) -> str:
        return f"{self.cls}@{self.where}"


@dataclass(frozen=True, eq=False)
class Spot:
    """A class in one image, and where."""

    cls: int | Top  # a rank: the class that is so good there
    said: str  # the place, as `parse` reads it
    area: Area | None = None  # None: where the class is predicted

    def __str__(self) -> str:
        return f"{self.cls}@{self.said}" if self.area is not None or isinstance(self.cls, int) else str(self.cls)


@dataclass(frozen=True, eq=False)
class Placed(Target):
    """Regions on the images of one batch: the mean of a class's output over the places, one for each image or for all.

    y = Σ_p w_p output[c, p], where w_p is the share of the region that lies in place p.
    """

    model: Model
    spots: tuple[Spot, ...]
    names_classes = True

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        if output.ndim != 4 or len(output) % len(self.spots):
            raise TargetError(
                f"{len(self.spots)} targets for {len(output)} images; give one, or one for each image"
                if output.ndim == 4
                else f"{self} needs an output for each place, not {list(output.shape)}"
            )
        copies = len(output) // len(self.spots) if len(self.spots) > 1 else 1
        fixed = self if self.fixed else self._fixed(output.detach()[::copies])
        count = len(output) // len(fixed.spots)
        numbers = torch.tensor(fixed.numbers, device=output.device).repeat_interleave(count)
        planes = widen(output[torch.arange(len(output), device=output.device), numbers])
        return (planes * fixed.weights(planes, count)).sum((-2, -1))

    def weights(self, planes: Tensor, count: int) -> Tensor:
        """w of each image, [B Y X]; its rows sum to one."""
        each = [spot.area.weights(planes) for spot in self.spots if spot.area is not None]
        return torch.stack(each).repeat_interleave(count, 0)

    @property
    def fixed(self) -> bool:
        return all(spot.area is not None and isinstance(spot.cls, int) for spot in self.spots)

    @property
    def numbers(self) -> list[int]:
        return [spot.cls for spot in self.spots if isinstance(spot.cls, int)]

    @property
    def varies(self) -> bool:
        return not self.fixed

    @property
    def one_class(self) -> bool:
        return False

    def fix(self, output: Output) -> Target:
        return self if self.fixed else self._fixed(output)

    def _fixed(self, output: Output) -> Placed:
        spots = self.spots * len(output) if len(self.spots) == 1 else self.spots
        return replace(self, spots=tuple(fixed(spot, one, self.model) for spot, one in zip(spots, output.detach())))

    def of_rows(self, rows: Sequence[int]) -> Target:
        return self if len(self.spots) == 1 else replace(self, spots=tuple(self.spots[row] for row in rows))

    def for_any_model(self) -> Target:
        return self

    def strings(self) -> list[str]:
        return [str(spot) for spot in self.spots]

    def __str__(self) -> str:
        return ";".join(self.strings())

    def title(self, model: Model, output: Output, index: int) -> str:
        one = output[index : index + 1]
        spot = self.of_image(index).fix(one)
        assert isinstance(spot, Placed)
        return f"{spot.names[0]}, {model.meaning.written(float(spot.graded(model.meaning)(one, one)))}"

    @property
    def names(self) -> list[str]:
        """The class and the place of each spot, for people."""
        return [f"{self.model.label(spot.cls)} {told(spot)}" for spot in self.spots if isinstance(spot.cls, int)]

    @property
    def identity(self) -> Hashable:
        return str(self), tuple(None if spot.area is None else spot.area.key for spot in self.spots)


def placed_shares(each: Sequence[Placed], output: Output, model: Model) -> dict[str, Any]:
    """The name of each image's target, and its mean probability (of a value, its mean) at the places."""
    rows = (output[i : i + 1].detach() for i in range(len(each)))
    shares = [one.graded(model.meaning)(row, row) for one, row in zip(each, rows)]
    names = tuple(name for one in each for name in one.names)
    regions = tuple(spot.area for one in each for spot in one.spots)
    return {"labels": names, "probabilities": tuple(map(float, shares)), "regions": regions}


def told(spot: Spot) -> str:
    """The place, for people: "at 120,80"."""
    if spot.said == PREDICTED:
        return "where it is predicted"
    return f"{'at' if spot.said.count(',') == 1 else 'in'} {spot.said}"


# ------------------------------------------------------------------------------------------------------ what is there


def fixed(spot: Spot, output: Tensor, model: Model) -> Spot:
    """The spot with its class and its places in one output [C Y X]."""
    if spot.area is None:
        number = spot.cls if isinstance(spot.cls, int) else ranked(predicted_shares(output, model), spot.cls, model)
        return Spot(number, PREDICTED, predicted_area(output, number, model))
    if isinstance(spot.cls, int):
        return spot
    means = (widen(output) * spot.area.weights(widen(output[0]))).sum((-2, -1))
    return replace(spot, cls=int(means.topk(spot.cls.rank).indices[-1]))


def predictions(output: Tensor, model: Model) -> Tensor:
    """Where each class is predicted, [C Y X]: the best one of classes that exclude each other; a value, everywhere."""
    if model.meaning is Meaning.VALUE:
        return torch.ones_like(output, dtype=torch.bool)
    if model.meaning is Meaning.SIGMOID or not model.exclusive or len(output) == 1:
        return along_classes(model.meaning.probabilities, output[None])[0] > 0.5
    return torch.arange(len(output), device=output.device)[:, None, None] == output.argmax(0)


def predicted_shares(output: Tensor, model: Model) -> Tensor:
    """The share of the image where each class is predicted, [C]; of values, which are everywhere, their mean."""
    if model.meaning is Meaning.VALUE:
        return widen(output).mean((-2, -1))
    return predictions(output, model).float().mean((-2, -1))


def widest(output: Tensor, model: Model, count: int) -> list[int]:
    """The classes that are predicted in most places of an output [C Y X], the first one first."""
    shares = predicted_shares(output, model)
    found: list[int] = shares.topk(min(count, len(shares))).indices.tolist()
    return [number for number in found if model.meaning is Meaning.VALUE or shares[number] > 0]


def ranked(shares: Tensor, rank: Top, model: Model) -> int:
    """The class with the largest predicted area (rank 1), the second largest, …"""
    there = len(shares) if model.meaning is Meaning.VALUE else int((shares > 0).sum())
    if rank.rank > there:
        raise TargetError(f"{rank}: {model.name} predicts {there} classes in this image; give one as CLASS@x,y")
    return int(shares.topk(rank.rank).indices[-1])


def predicted_area(output: Tensor, number: int, model: Model) -> Area:
    """Where a class is predicted; raise if nowhere."""
    where = predictions(output, model)[number]
    if not where.any():
        shares = predicted_shares(output, model)
        best = [i for i in shares.argsort(descending=True).tolist() if shares[i] > 0][:SHOWN]
        there = ", ".join(f"{model.label(i)} ({float(shares[i]):.0%})" for i in best) or "none"
        said = f"{model.label(number)} is predicted nowhere in this image; the classes that are: {there}"
        raise TargetError(f"{said}; or give a place: {number}@x,y")
    return Weighed(where.double() / where.sum())
