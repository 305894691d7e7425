"""What the scores and boxes of a detector mean.

Scores are logits of classes that exclude each other, the last of them "no object" (DETR, YOLOS), or a score for each
class by itself (RT-DETR, OWL-ViT). Networks of one score more than classes have the last one for "no object".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous.errors import ModelWarning, warn_caller
from vitreous.models.output import AUTO, Meaning

NOTHING = ("no object", "no-object", "no_object", "nothing", "background", "∅")


@dataclass(frozen=True)
class Detections:
    """How the numbers of one query are to be read."""

    classes: int  # without "no object"
    empty: bool  # whether the class behind them is "no object"
    meaning: Meaning

    @property
    def scores(self) -> int:
        """How many scores a query has."""
        return self.classes + self.empty

    def probabilities(self, output: Tensor) -> Tensor:
        """The probability of every class at every query, [… Q C], without that of "no object"."""
        return self.meaning.probabilities(output[..., : self.scores])[..., : self.classes]

    def boxes(self, output: Tensor) -> Tensor:
        """The boxes [… Q 4] as left, top, right, bottom: shares of the model's input."""
        centre, size = output[..., -4:-2], output[..., -2:]
        return torch.cat([centre - size / 2, centre + size / 2], -1)


def describe(width: int, output: str, labels: Mapping[int, str], told: str | None, name: str) -> Detections:
    """How to read queries of `width` scores.

    `output`: what the user says of them, or "auto"; `told`: what the network's settings say of them.
    """
    named = str(labels.get(width - 1, "")).strip().lower() in NOTHING
    known = len(labels) - named
    if output != AUTO:
        meaning = Meaning(output)
        empty = named or (meaning is not Meaning.SIGMOID and known != width)
        return Detections(width - empty, empty, meaning)
    if told is None and not labels:
        said = f"{name} has {width} scores for each query: the last is taken for “no object”, as DETR's is"
        warn_caller(f"{said}; if each class has a score by itself, say so: Model(net, output='sigmoid')", ModelWarning)
    by_itself = known == width if told is None else Meaning(told) is Meaning.SIGMOID
    return Detections(width, False, Meaning.SIGMOID) if by_itself else Detections(width - 1, True, Meaning.LOGITS)
