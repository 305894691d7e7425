"""The embeddings that a probe is trained on: computed once, or anew from random crops in every epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from vitreous.errors import ModelError
from vitreous.images.bands import Bands
from vitreous.images.class_folders import Made, Make, Reader, augmentation
from vitreous.models.model import Model
from vitreous.models.probe.attach import embed
from vitreous.models.probe.progress import Progress, Tell
from vitreous.models.probe.resume import Files

Batch = tuple[Tensor, Tensor]  # embeddings [b D] and classes [b]


@dataclass(frozen=True)
class Kept:
    """Embeddings, found by the number of their image."""

    rows: Tensor  # [n D]
    place: dict[int, int]
    labels: tuple[int, ...]

    def take(self, numbers: list[int]) -> Batch:
        """Embeddings and classes of those of these images that could be read."""
        there = [number for number in numbers if number in self.place]
        rows = self.rows[[self.place[number] for number in there]]
        return rows, torch.tensor([self.labels[number] for number in there])


def embed_all(model: Model, reader: Reader, numbers: list[int], batch: int, files: Files, tell: Tell) -> Kept:
    """Embed images without augmentation, once; a resumed run continues after the last group on disk."""
    groups = [numbers[start : start + batch] for start in range(0, len(numbers), batch)]
    found = files.read(files.embeddings) or {"rows": [], "numbers": [], "groups": 0, "skipped": {}}
    reader.skipped |= found["skipped"]
    begun = found["groups"]
    for done, (there, x) in enumerate(reader.batches(groups[begun:], plain(model)), begun + 1):
        if x is not None:
            found["rows"].append(embed_still(model, x).cpu())
            found["numbers"] += there
        if found["rows"] and (done == len(groups) or files.due()):
            found |= {"rows": [torch.cat(found["rows"])], "groups": done, "skipped": dict(reader.skipped)}
            files.write(files.embeddings, found)
        tell(Progress("embedding", done, len(groups)))
    return Kept(
        torch.cat(found["rows"]), {number: i for i, number in enumerate(found["numbers"])}, reader.folder.labels
    )


def plain(model: Model) -> Make:
    """The model's own preprocessing."""
    steps = model.preprocess

    def make(image: Image.Image | Bands, number: int) -> Made:
        return steps(image)

    return make


def embed_still(model: Model, images: Tensor) -> Tensor:
    """Embed a batch without gradients, in eval mode, and leave the network as it was."""
    with torch.no_grad(), model.still():
        found = embed(model, model.prepare(images)).float()
    if not found.isfinite().all():
        raise ModelError(f"the embedding of {model.name} contains NaN or infinite values; try another dtype")
    return found


class Feed:
    """The batches of each epoch in an order of its own: of kept embeddings, or of random crops."""

    def __init__(
        self, model: Model, reader: Reader, numbers: list[int], batch: int, seed: int, kept: Kept | None
    ) -> None:
        self.model, self.reader, self.batch, self.seed, self.kept = model, reader, batch, seed, kept
        self.numbers = numbers if kept is None else [number for number in numbers if number in kept.place]
        self.count = -(-len(self.numbers) // batch)

    def epoch(self, epoch: int, start: int) -> Iterator[Batch | None]:
        """The batches from `start` on; None for a batch of which no image can be read."""
        order = list(self.numbers)
        random.Random(f"order {self.seed} {epoch}").shuffle(order)
        groups = [order[i : i + self.batch] for i in range(start * self.batch, len(order), self.batch)]
        if self.kept is not None:
            yield from map(self.kept.take, groups)
            return
        for there, x in self.reader.batches(groups, augmentation(self.model.preprocess, self.seed, epoch)):
            labels = torch.tensor([self.reader.folder.labels[number] for number in there])
            yield None if x is None else (embed_still(self.model, x), labels)
