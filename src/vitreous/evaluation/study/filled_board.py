"""A leaderboard that is filled from the rows of a study, a shard at a time, for as many images as a study may have."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from vitreous._support.statistics import Moments
from vitreous.evaluation.results import About, Board, Plan
from vitreous.evaluation.study.columns import codes, flat_arrays
from vitreous.evaluation.study.kind import Rows
from vitreous.images.dataset import Data
from vitreous.images.samples import Samples

if TYPE_CHECKING:
    import pyarrow

KEYS = ("image", "prediction", "asked", "method", "error")
NONE = -1  # no class


class FilledBoard(Board):
    """As `Board`, with arrays instead of a number and a reason for each image; of targets, rows know more."""

    def __init__(self, about: About, data: Data, plan: Plan, labels: Int[np.ndarray, "N"]) -> None:
        super().__init__(about, data, plan)
        self.labels, self.tops = labels, np.full(len(data), NONE)
        self.lacking: dict[tuple[int, int, str], list[np.ndarray]] = defaultdict(list)

    @property
    def accuracy(self) -> float | None:
        """The share of labelled images whose label is the model's best class."""
        known = (self.labels != NONE) & (self.tops != NONE)
        return float((self.labels[known] == self.tops[known]).mean()) if known.any() else None

    def gaps(self) -> Iterator[tuple[int, int, str, Sequence[int]]]:
        """In the order of the images, methods and metrics."""
        first = {key: (int(parts[0][0]), key[0], key[1]) for key, parts in self.lacking.items()}
        for key in sorted(self.lacking, key=lambda key: first[key]):
            yield *key, np.concatenate(self.lacking[key])  # type: ignore[misc]

    def add(self, table: pyarrow.Table, start: int, asked: str | None, at: Mapping[str, Any]) -> int:
        """Copy the values of a shard whose first image has this number; return how many images it has.

        `asked`: the target whose rows count; `at`: where the curves of the metrics have their points.
        """
        images, place = codes(table["image"])
        names, which = codes(table["method"])
        method = np.array([self.methods.index(name) for name in names], np.int64)[which]
        place = place + start
        mine = np.ones(len(place), bool)
        if asked is not None:
            words, said = codes(table["asked"])
            mine = said == (words.index(asked) if asked in words else len(words))
        bad = mine & table["error"].is_valid().to_numpy()
        for row in np.flatnonzero(bad).tolist():
            self.skipped[int(place[row])] = table["error"][row].as_py()
        good = mine & ~bad
        self.measured[method[good], place[good]] = True
        best = table["prediction"].fill_null(NONE).to_numpy()
        known = good & (best != NONE)
        self.tops[place[known]] = best[known]
        for k, metric in enumerate(self.metrics):
            self.values[method[good], k, place[good]] = table[metric].to_numpy()[good]
            self._add_curves(table, metric, method, good, at)
        self._add_gaps(table, method, place, good)
        return len(images)

    def _add_curves(
        self,
        table: pyarrow.Table,
        metric: str,
        method: Int[np.ndarray, "R"],
        good: Bool[np.ndarray, "R"],
        at: Mapping[str, Any],
    ) -> None:
        if f"at {metric}" not in at:
            return
        column = table[f"{metric}_curve"]
        there, curves = good & column.is_valid().to_numpy(), flat_arrays(column)
        for m in np.unique(method[there]).tolist():
            kept = self.curves.setdefault((self.methods[m], metric), Moments(at[f"at {metric}"]))
            own = [curves[row] for row in np.flatnonzero(there & (method == m)) if len(curves[row]) == len(kept.at)]
            if own:
                kept.add(np.stack(own))

    def _add_gaps(
        self,
        table: pyarrow.Table,
        method: Int[np.ndarray, "R"],
        place: Int[np.ndarray, "R"],
        good: Bool[np.ndarray, "R"],
    ) -> None:
        """Why values are missing: a reason is read once, however many rows have it."""
        told, which = codes(table["missing"])
        for i, text in enumerate(told):
            for metric, why in json.loads(text).items():
                if metric not in self.metrics:
                    continue
                k = self.metrics.index(metric)
                rows = np.flatnonzero(good & (which == i) & np.isnan(table[metric].to_numpy()))
                for m in np.unique(method[rows]).tolist():
                    self.lacking[m, k, why].append(place[rows[method[rows] == m]])


def images_of(study: Rows) -> tuple[Data, Int[np.ndarray, "N"]]:
    """The images of the finished shards, and their labels as numbers."""
    names, labels = list[str](), [np.zeros(0, np.int64)]
    for table in study.tables(["image", "label"]):
        own, which = codes(table["image"])
        names += own
        _, first = np.unique(which, return_index=True)
        labels.append(table["label"].fill_null(NONE).to_numpy()[first])
    numbers = np.concatenate(labels)
    found = Samples(names, labels=[None if number == NONE else number for number in numbers.tolist()])
    return Data(str(study.manifest["source"]), found), numbers
