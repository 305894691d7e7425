"""Train a linear probe on a folder of classes, and measure it on another.

The backbone runs without gradients and stays as it is. All chance is drawn from (seed, epoch, picture), so that an
interrupted run ends, when it is resumed, with the very head of one that was not.
"""

from __future__ import annotations

import io
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitreous._support.files import write_whole
from vitreous.errors import InputError, ModelError, OptionError, one_line
from vitreous.images.class_folders import ImageFolder, Made, Make, Reader, augmentation, open_folder, split
from vitreous.models.fingerprint import fingerprint
from vitreous.models.model import Model
from vitreous.models.probe.attach import Probe, Probed, attach, embed, load_probe

__all__ = [
    "Evaluation",
    "Probe",
    "Probed",
    "Progress",
    "Report",
    "attach",
    "evaluate",
    "load_probe",
    "train",
    "unfinished",
]

SAVE_EVERY = 60.0  # seconds of work that an interrupt may cost, where an epoch is longer
Batch = tuple[Tensor, Tensor]  # embeddings [b D] and classes [b]


@dataclass(frozen=True)
class Progress:
    """How far it is: `done` of `total` batches; this epoch's loss so far, the accuracy after the last one."""

    stage: str  # "embedding", "training" or "evaluating"
    done: int
    total: int
    epoch: int = 0  # finished ones
    loss: float | None = None
    accuracy: float | None = None


Tell = Callable[[Progress], None]


def quietly(progress: Progress) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Epoch:
    """What one pass over the pictures gave."""

    number: int  # from 1
    loss: float
    validation_loss: float
    accuracy: float


@dataclass(frozen=True)
class Report:
    """What was trained, and on what."""

    out: Path
    backbone: str
    classes: tuple[str, ...]
    learned: int  # pictures
    validated: int
    accuracy: float  # of the best epoch, which is what was written
    best: int
    epochs: tuple[Epoch, ...]
    steps: int
    resumed: int  # epochs that an earlier run had done
    skipped: dict[str, str]  # unreadable pictures, and why


def train(
    model: Model,
    data: str | Path,
    out: str | Path,
    *,
    epochs: int = 10,
    batch: int = 128,
    lr: float = 1e-3,
    validation: float = 0.1,
    augment: bool = True,
    seed: int = 0,
    resume: bool = True,
    progress: Tell = quietly,
) -> Report:
    """A linear head for the classes of a folder (one sub-folder each); `out` gets the best epoch's.

    Adam on random crops, mirrored half of the time; without `augment`, on embeddings that are computed once. The best
    epoch has the highest accuracy (then the lowest loss) on the share of every class that is kept for `validation`.
    """
    out, options = Path(out), {"batch": batch, "lr": lr, "validation": validation, "augment": augment, "seed": seed}
    check_options(epochs, batch, lr, validation)
    check_out(out)
    folder = open_folder(Path(data))
    learn, check = split(folder, validation, seed)
    identity = fingerprint(model)
    files = Files(out, {"backbone": identity, "pictures": folder.digest, "image size": list(model.size), **options})
    with torch.inference_mode(False), torch.enable_grad(), Reader(folder) as reader:
        reader.check(learn, check)
        if not resume:
            files.clear()
        state = files.read(files.state)
        kept = embed_all(model, reader, check if augment else check + learn, batch, files, progress)
        feed = Feed(model, reader, learn, batch, seed, None if augment else kept)
        run = Training(feed, kept.take(check), lr, files, progress, state)
        run.go(epochs)
    weight, bias = run.best
    told = {"epochs": epochs, **options}
    Probe(weight, bias, folder.classes, model.name, identity, run.at.accuracy or 0.0, told).save(out)
    files.clear()
    return report(out, model, reader, learn, check, run)


def report(out: Path, model: Model, reader: Reader, learn: list[int], check: list[int], run: Training) -> Report:
    learned, validated = (sum(number not in reader.skipped for number in part) for part in (learn, check))
    return Report(
        out=out,
        backbone=model.name,
        classes=reader.folder.classes,
        learned=learned,
        validated=validated,
        accuracy=run.at.accuracy or 0.0,
        best=run.at.best,
        epochs=tuple(Epoch(**epoch) for epoch in run.at.history),
        steps=run.at.steps,
        resumed=run.resumed,
        skipped=reasons(reader),
    )


def reasons(reader: Reader) -> dict[str, str]:
    return {str(reader.folder.files[number]): why for number, why in sorted(reader.skipped.items())}


def check_options(epochs: int, batch: int, lr: float, validation: float) -> None:
    for name, value in {"epochs": epochs, "batch": batch}.items():
        if value < 1:
            raise OptionError(f"{name} = {value}: must be 1 or more")
    if not 0 < lr < float("inf"):
        raise OptionError(f"lr = {lr}: must be more than 0")
    if not 0 < validation < 1:
        raise OptionError(f"validation = {validation}: must lie between 0 and 1, e.g. 0.1 for a tenth of every class")


def check_out(out: Path) -> None:
    """Raise before the work where its result could not be written."""
    if out.is_dir():
        raise InputError(f"{out}: is a folder; name the file to write, e.g. {out / 'probe.safetensors'}")
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if not there.is_dir():
        raise InputError(f"{out}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise InputError(f"{out}: the folder {there} may not be written to")


# ------------------------------------------------------------------------------------------------- what is kept on disk


class Files:
    """Beside the result while a run is under way: its state, and the embeddings that do not change."""

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.identity = identity
        self.state = out.with_name(f"{out.name}.resume")
        self.embeddings = out.with_name(f"{out.name}.embeddings")

    def write(self, file: Path, content: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save({"identity": self.identity, **content}, buffer)
        write_whole(file, buffer.getvalue())

    def read(self, file: Path) -> dict[str, Any] | None:
        """What an interrupted run left; an error where that was another run."""
        if not file.is_file():
            return None
        again = "to begin anew: --fresh (resume=False)"
        try:
            found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
            before = found.pop("identity")
        except Exception as error:
            raise InputError(f"{file}: cannot be resumed from ({one_line(error, 80)}); {again}") from None
        other = [name for name, value in self.identity.items() if before.get(name) != value]
        if other:
            raise OptionError(f"{file}: is of an interrupted run with another {' and '.join(other)}; {again}")
        return found

    def clear(self) -> None:
        for file in (self.state, self.embeddings):
            file.unlink(missing_ok=True)


def unfinished(out: str | Path) -> bool:
    """Does an interrupted run wait to be resumed here?"""
    files = Files(Path(out), {})
    return files.state.is_file() or files.embeddings.is_file()


# ---------------------------------------------------------------------------------------------------------- embeddings


@dataclass(frozen=True)
class Kept:
    """Embeddings by the number of their picture."""

    rows: Tensor  # [n D]
    place: dict[int, int]
    labels: tuple[int, ...]

    def take(self, numbers: list[int]) -> Batch:
        """Those of these pictures that could be read."""
        there = [number for number in numbers if number in self.place]
        rows = self.rows[[self.place[number] for number in there]]
        return rows, torch.tensor([self.labels[number] for number in there])


def embed_all(model: Model, reader: Reader, numbers: list[int], batch: int, files: Files, tell: Tell) -> Kept:
    """The embeddings of pictures as they are, computed once; a resumed run goes on behind the last group on disk."""
    groups = [numbers[start : start + batch] for start in range(0, len(numbers), batch)]
    found = files.read(files.embeddings) or {"rows": [], "numbers": [], "groups": 0, "skipped": {}}
    reader.skipped |= found["skipped"]
    begun, saved = found["groups"], time.monotonic()
    for done, (there, x) in enumerate(reader.batches(groups[begun:], plain(model)), begun + 1):
        if x is not None:
            found["rows"].append(embed_still(model, x).cpu())
            found["numbers"] += there
        if found["rows"] and (done == len(groups) or time.monotonic() - saved >= SAVE_EVERY):
            found |= {"rows": [torch.cat(found["rows"])], "groups": done, "skipped": dict(reader.skipped)}
            files.write(files.embeddings, found)
            saved = time.monotonic()
        tell(Progress("embedding", done, len(groups)))
    return Kept(
        torch.cat(found["rows"]), {number: i for i, number in enumerate(found["numbers"])}, reader.folder.labels
    )


def plain(model: Model) -> Make:
    """The model's own preprocessing."""
    steps = model.preprocess

    def make(image: Image.Image, number: int) -> Made:
        return steps(image)

    return make


def embed_still(model: Model, images: Tensor) -> Tensor:
    """Embeddings without gradients, the network in eval mode and left as it was."""
    with torch.no_grad(), model.still():
        found = embed(model, model.prepare(images)).float()
    if not found.isfinite().all():
        raise ModelError(f"the embedding of {model.name} holds values that are not finite; try another dtype")
    return found


class Feed:
    """The batches of an epoch, in an order of its own: of kept embeddings, or of random crops."""

    def __init__(
        self, model: Model, reader: Reader, numbers: list[int], batch: int, seed: int, kept: Kept | None
    ) -> None:
        self.model, self.reader, self.batch, self.seed, self.kept = model, reader, batch, seed, kept
        self.numbers = numbers if kept is None else [number for number in numbers if number in kept.place]
        self.count = -(-len(self.numbers) // batch)

    def epoch(self, epoch: int, start: int) -> Iterator[Batch | None]:
        """From batch `start` on; None in place of one of which no picture can be read."""
        order = list(self.numbers)
        random.Random(f"order {self.seed} {epoch}").shuffle(order)
        groups = [order[i : i + self.batch] for i in range(start * self.batch, len(order), self.batch)]
        if self.kept is not None:
            yield from map(self.kept.take, groups)
            return
        for there, x in self.reader.batches(groups, augmentation(self.model.preprocess, self.seed, epoch)):
            labels = torch.tensor([self.reader.folder.labels[number] for number in there])
            yield None if x is None else (embed_still(self.model, x), labels)


# ------------------------------------------------------------------------------------------------------------- training


@dataclass
class At:
    """How far a training is."""

    epoch: int = 0  # finished ones
    batch: int = 0  # finished ones of this epoch
    loss: float = 0.0  # summed over the pictures of this epoch
    seen: int = 0
    steps: int = 0
    best: int = 0  # from 1
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accuracy(self) -> float | None:
        """Of the best epoch."""
        return self.history[self.best - 1]["accuracy"] if self.best else None


class Training:
    """Adam on a head that begins at zero; on disk after every epoch, and every minute of a long one."""

    def __init__(
        self, feed: Feed, check: Batch, lr: float, files: Files, tell: Tell, found: dict[str, Any] | None
    ) -> None:
        self.feed, self.files, self.tell = feed, files, tell
        self.device = feed.model.device
        self.check = check[0].to(self.device), check[1].to(self.device)
        shape = len(feed.reader.folder.classes), check[0].shape[1]
        self.weight = torch.zeros(shape, device=self.device, requires_grad=True)
        self.bias = torch.zeros(shape[0], device=self.device, requires_grad=True)
        self.optimiser = torch.optim.Adam([self.weight, self.bias], lr=lr)
        self.best = self.head()
        self.at = At()
        if found is not None:
            self.restore(found)
        self.resumed = self.at.epoch

    def head(self) -> tuple[Tensor, Tensor]:
        return self.weight.detach().cpu().clone(), self.bias.detach().cpu().clone()

    def restore(self, found: dict[str, Any]) -> None:
        self.at, self.best = At(**found["at"]), (found["best"][0], found["best"][1])
        for parameter, value in zip((self.weight, self.bias), found["head"]):
            parameter.data.copy_(value)
        self.optimiser.load_state_dict(found["optimiser"])
        self.feed.reader.skipped |= found["skipped"]

    def save(self) -> None:
        skipped, optimiser = dict(self.feed.reader.skipped), self.optimiser.state_dict()
        content = {"at": asdict(self.at), "best": list(self.best), "head": list(self.head()), "optimiser": optimiser}
        self.files.write(self.files.state, {**content, "skipped": skipped})

    def go(self, epochs: int) -> None:
        """Up to this many epochs in all."""
        saved = time.monotonic()
        while self.at.epoch < epochs:
            for batch in self.feed.epoch(self.at.epoch, self.at.batch):
                self.step(batch)
                if time.monotonic() - saved >= SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
                self.report(epochs)
            self.finish_epoch()
            self.save()
            self.report(epochs)

    def step(self, batch: Batch | None) -> None:
        if batch is not None:
            x, y = batch[0].to(self.device), batch[1].to(self.device)
            loss = F.cross_entropy(F.linear(x, self.weight, self.bias), y)
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            self.at.loss += loss.item() * len(y)
            self.at.seen += len(y)
            self.at.steps += 1
        self.at.batch += 1

    def finish_epoch(self) -> None:
        """Measure the head on the pictures kept for it, and keep it if it is the best so far."""
        at, (x, y) = self.at, self.check
        with torch.no_grad():
            logits = F.linear(x, self.weight, self.bias)
            loss, right = F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
        entry = Epoch(at.epoch + 1, at.loss / max(1, at.seen), loss, right)
        before = at.history[at.best - 1] if at.best else None
        if before is None or (right, -loss) > (before["accuracy"], -before["validation_loss"]):
            at.best, self.best = entry.number, self.head()
        at.history.append(asdict(entry))
        at.epoch, at.batch, at.loss, at.seen = entry.number, 0, 0.0, 0

    def report(self, epochs: int) -> None:
        at, count = self.at, self.feed.count
        last = at.history[-1] if at.history else {"loss": None, "accuracy": None}
        loss = at.loss / at.seen if at.seen else last["loss"]
        self.tell(Progress("training", at.epoch * count + at.batch, epochs * count, at.epoch, loss, last["accuracy"]))


# ----------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class ClassScore:
    """One class's pictures, how many were recognised, and for what the others were mostly taken."""

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
    """How well a probed model names the pictures of a folder."""

    model: str
    images: int
    accuracy: float
    classes: tuple[ClassScore, ...]
    skipped: dict[str, str]


def evaluate(model: Model, data: str | Path, *, batch: int = 128, progress: Tell = quietly) -> Evaluation:
    """Accuracy on a folder of classes (one sub-folder each, named as in the probe), in all and for each class."""
    if batch < 1:
        raise OptionError(f"batch = {batch}: must be 1 or more")
    folder = open_folder(Path(data), tuple(model.labels.values()))
    groups = [list(range(i, min(i + batch, len(folder.files)))) for i in range(0, len(folder.files), batch)]
    named: list[Counter[int]] = [Counter() for _ in folder.classes]  # of each class: what its pictures were taken for
    images = right = 0
    with torch.inference_mode(False), torch.no_grad(), Reader(folder) as reader:
        for done, (there, x) in enumerate(reader.batches(groups, plain(model)), 1):
            for number, said in zip(there, [] if x is None else name_images(model, x)):
                named[folder.labels[number]][said] += 1
                right += said == folder.labels[number]
            images += len(there)
            progress(Progress("evaluating", done, len(groups), accuracy=right / max(1, images)))
    if not images:
        raise InputError(f"{folder.root}: no picture can be read: {next(iter(reader.skipped.values()))}")
    scores = tuple(class_score(folder, number, counts) for number, counts in enumerate(named))
    return Evaluation(model.name, images, right / images, scores, reasons(reader))


def name_images(model: Model, images: Tensor) -> list[int]:
    with model.still():
        found: list[int] = model.run(model.prepare(images)).argmax(1).tolist()
    return found


def class_score(folder: ImageFolder, number: int, counts: Counter[int]) -> ClassScore:
    wrong = Counter({said: count for said, count in counts.items() if said != number}).most_common(1)
    confused, times = (folder.classes[wrong[0][0]], wrong[0][1]) if wrong else (None, 0)
    return ClassScore(folder.classes[number], counts.total(), counts[number], confused, times)
