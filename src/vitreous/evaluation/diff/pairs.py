"""The rows of two models put side by side: one pair for each image, with every measure of its two maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitreous.evaluation.diff.measures import Corners, correlation, distance, on_grid, overlap, shares
from vitreous.evaluation.study.columns import flat_arrays
from vitreous.evaluation.study.read import Study

PLAIN = (
    *("image", "label", "class", "prediction", "target", "target_label", "probability"),
    *("answer", "answer_probability", "faithfulness", "missing", "error"),
)
ARRAYS = ("map", "parts")
NAMES = (*PLAIN, *ARRAYS, *(f"{name}_shape" for name in ARRAYS), "answer_map")


@dataclass(frozen=True, eq=False)
class Pair:
    """One image: what the two models answer, and how far apart their maps of the same target are."""

    image: str
    label: int | None  # in the numbers of the first model
    name: str | None  # of the label
    target: str | None  # the class that both maps explain
    answers: tuple[str, str]
    numbers: tuple[int, int]  # of the answers, both in the numbers of the first model; −1: a class that it lacks
    shares: tuple[float, float]  # the probability of each answer
    aimed: tuple[float, float]  # … and of the target
    correlation: float
    overlap: float
    distance: float
    noise: tuple[tuple[float, ...], tuple[float, ...]]  # distances under each model's own augmentations
    faithfulness: tuple[float, float]
    gained: np.ndarray  # the shares of the second map minus those of the first [h w]
    answered: np.ndarray  # the same of the maps of each model's own answer

    @property
    def same(self) -> bool:
        """Whether the answers are the same."""
        return self.numbers[0] == self.numbers[1]

    @cached_property
    def noisy(self) -> float:
        """What noise explains: the largest distance under A's augmentations, or the median under B's if it is larger.

        Not the largest under B's: a reason that an augmentation takes away would excuse itself.
        """
        return max(max(self.noise[0]), float(np.median(self.noise[1])))

    @property
    def ratio(self) -> float:
        """The distance, in medians of the distances under augmentation."""
        usual = float(np.median(np.concatenate(self.noise)))
        return self.distance / usual if usual > 0 else float("nan")

    @property
    def moved(self) -> bool:
        """Whether the maps are farther apart than noise explains."""
        return self.distance > self.noisy

    @property
    def right(self) -> tuple[bool, bool] | None:
        """Whether each answer is the label; None without one."""
        return None if self.label is None else (self.numbers[0] == self.label, self.numbers[1] == self.label)

    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        found: dict[str, Any] = {"image": self.image, "label": self.name, "target": self.target}
        for i, side in enumerate("ab"):
            found |= {
                f"answer_{side}": self.answers[i],
                f"answer_probability_{side}": self.shares[i],
                f"target_probability_{side}": self.aimed[i],
                f"right_{side}": None if self.right is None else self.right[i],
                f"noise_{side}": max(self.noise[i]),
                f"faithfulness_{side}": self.faithfulness[i],
            }
        measures = ("same", "moved", "correlation", "overlap", "distance", "noisy", "ratio")
        return found | {name: getattr(self, name) for name in measures}


@dataclass(frozen=True, eq=False)
class Gathered:
    """All pairs of a comparison, and what could not be compared."""

    pairs: Sequence[Pair]
    failed: Mapping[str, str]  # by image
    missing: str | None = None  # why faithfulness could not be measured
    copies: int = 0  # augmentations of an image


@dataclass(frozen=True)
class Shared:
    """How the two models' classes and views correspond; see `sides`."""

    classes: Sequence[int] | None = None
    seen: Sequence[Sequence[float]] | None = None

    @property
    def back(self) -> dict[int, int] | None:
        """The first model's number of each class of the second."""
        return None if self.classes is None else {b: a for a, b in enumerate(self.classes) if b >= 0}

    @property
    def boxes(self) -> tuple[Corners | None, Corners | None]:
        if self.seen is None:
            return None, None
        one, other = ((x0, y0, x1, y1) for x0, y0, x1, y1 in self.seen)
        return one, other


def gather(shared: Shared, one: Study, other: Study) -> Gathered:
    """Every image that both models have finished."""
    pairs: list[Pair] = []
    failed: dict[str, str] = {}
    missing: list[str] = []
    for rows in zip(*both(one, other)):
        for a, b in zip(*(list(rows_of(table)) for table in rows)):
            error = a["error"] or b["error"]
            if error is None and (a["parts"] is None or b["parts"] is None):
                error = "there is no map of an augmented image"
            if error is None:
                pair = paired(shared, a, b)
                error = None if np.isfinite([pair.distance, pair.noisy]).all() else "a map is empty or not finite"
            if error is not None:
                failed[a["image"]] = error
                continue
            pairs.append(pair)
            missing += [side["missing"] for side in (a, b) if side["missing"]]
    copies = min((len(each) for pair in pairs for each in pair.noise), default=0)
    return Gathered(pairs, failed, missing[0] if missing else None, copies)


def both(one: Study, other: Study) -> tuple[Iterator[Any], Iterator[Any]]:
    """The shards that both have finished, in the same order: they are cut alike."""
    first, second = one.mine.start, other.mine.start
    there = sorted({number - first for number in one.numbers} & {number - second for number in other.numbers})
    studies = (replace(one, found=[first + n for n in there]), replace(other, found=[second + n for n in there]))
    return studies[0].tables(NAMES), studies[1].tables(NAMES)


def rows_of(table: Any) -> Iterator[dict[str, Any]]:
    """Rows with their arrays."""
    arrays = {}
    for name in ARRAYS:
        shapes = table[f"{name}_shape"].to_pylist()
        flats = flat_arrays(table[name])
        arrays[name] = [None if shape is None else flat.reshape(shape) for flat, shape in zip(flats, shapes)]
    own = flat_arrays(table["answer_map"])  # empty where the answer is the target
    for i, row in enumerate(table.select(list(PLAIN)).to_pylist()):
        found: dict[str, Any] = {name: arrays[name][i] for name in ARRAYS}
        answered = own[i].reshape(found["map"].shape) if len(own[i]) else found["map"]
        yield row | found | {"answered": answered}


def paired(shared: Shared, a: Mapping[str, Any], b: Mapping[str, Any]) -> Pair:
    """Two rows of one image; maps of different grids are compared on the coarser one."""
    grid = tuple(min(x, y) for x, y in zip(a["map"].shape, b["map"].shape))
    stacks = [
        on_grid(np.concatenate([row["map"][None], row["answered"][None], row["parts"]]), (grid[0], grid[1]), box)
        for row, box in zip((a, b), shared.boxes)
    ]
    first, second = (stack[:1] for stack in stacks)
    noise = [tuple(distance(np.repeat(s[:1], len(s) - 2, 0), s[2:]).tolist()) for s in stacks]
    own = [shares(stack[1:2]) for stack in stacks]
    return Pair(
        image=a["image"],
        label=a["label"],
        name=a["class"],
        target=a["target_label"],
        answers=(a["answer"], b["answer"]),
        numbers=(a["prediction"], number_of(b["prediction"], shared.back)),
        shares=(a["answer_probability"], b["answer_probability"]),
        aimed=(known(a["probability"]), known(b["probability"])),
        correlation=float(correlation(first, second)[0]),
        overlap=float(overlap(first, second)[0]),
        distance=float(distance(first, second)[0]),
        noise=(noise[0], noise[1]),
        faithfulness=(known(a["faithfulness"]), known(b["faithfulness"])),
        gained=(shares(second) - shares(first)).reshape(grid).astype(np.float32),
        answered=(own[1] - own[0]).reshape(grid).astype(np.float32),
    )


def number_of(prediction: int, back: Mapping[int, int] | None) -> int:
    """A class of the second model in the numbers of the first."""
    return prediction if back is None else back.get(prediction, -1)


def known(value: float | None) -> float:
    return float("nan") if value is None else float(value)
