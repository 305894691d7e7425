"""Measure a model with a probe on a folder of classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitreous.errors import InputError, OptionError
from vitreous.images.class_folders import ImageFolder, Reader, open_folder
from vitreous.models.model import Model
from vitreous.models.probe.embeddings import plain
from vitreous.models.probe.progress import Progress, Tell, quietly


@dataclass(frozen=True)
class ClassScore:
    """How many images of a class were recognised, and which class the others were most often taken for."""

    name: str
    images: int
    right: int
    confused: str | None = None
    times: int = 0

    @property
    def accuracy(self) -> float | None:
        return self.right / self.images if self.images else None


@dataclass(frozen=True)
class Evaluation:
    """How well a model with a probe classifies the images of a folder."""

    model: str
    images: int
    accuracy: float
    classes: tuple[ClassScore, ...]
    skipped: dict[str, str]


def evaluate(
    model: Model, data: str | Path, *, batch: int = 128, limit: int | None = None, progress: Tell = quietly
) -> Evaluation:
    """Measure accuracy, overall and per class, on a folder with one sub-folder per class, named as in the probe.

    `limit`: use only the first N images of each class.
    """
    if batch < 1:
        raise OptionError(f"batch = {batch}: must be 1 or more")
    folder = open_folder(Path(data), tuple(model.labels.values()), limit)
    groups = [list(range(i, min(i + batch, len(folder.files)))) for i in range(0, len(folder.files), batch)]
    named: list[Counter[int]] = [Counter() for _ in folder.classes]  # for each class: what its images were taken for
    images = right = 0
    with torch.inference_mode(False), torch.no_grad(), Reader(folder, model.channels) as reader:
        for done, (there, x) in enumerate(reader.batches(groups, plain(model)), 1):
            for number, said in zip(there, [] if x is None else name_images(model, x)):
                named[folder.labels[number]][said] += 1
                right += said == folder.labels[number]
            images += len(there)
            progress(Progress("evaluating", done, len(groups), accuracy=right / max(1, images)))
    if not images:
        raise InputError(f"{folder.root}: no image can be read: {next(iter(reader.skipped.values()))}")
    scores = tuple(class_score(folder, number, counts) for number, counts in enumerate(named))
    return Evaluation(model.name, images, right / images, scores, reader.reasons())


def name_images(model: Model, images: Tensor) -> list[int]:
    with model.still():
        found: list[int] = model.run(model.prepare(images)).argmax(1).tolist()
    return found


def class_score(folder: ImageFolder, number: int, counts: Counter[int]) -> ClassScore:
    wrong = Counter({said: count for said, count in counts.items() if said != number}).most_common(1)
    confused, times = (folder.classes[wrong[0][0]], wrong[0][1]) if wrong else (None, 0)
    return ClassScore(folder.classes[number], counts.total(), counts[number], confused, times)
