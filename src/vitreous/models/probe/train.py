"""Train a linear probe on a folder of classes.

The backbone runs without gradients and is not changed. All randomness is drawn from (seed, epoch, image), so that a run
that was interrupted and resumed ends with the same probe as one that was not.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import InputError, OptionError
from vitreous.images.class_folders import Reader, open_folder, split
from vitreous.models.fingerprint import fingerprint
from vitreous.models.model import Model
from vitreous.models.probe.attach import Probe
from vitreous.models.probe.embeddings import Batch, Feed, embed_all
from vitreous.models.probe.progress import Progress, Tell, quietly
from vitreous.models.probe.resume import Files


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch."""

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
    learned: int  # images
    validated: int
    accuracy: float  # of the best epoch, the one that was written
    best: int
    epochs: tuple[Epoch, ...]
    steps: int
    resumed: int  # epochs done by an earlier run
    skipped: dict[str, str]  # unreadable images, and why


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
    limit: int | None = None,
    resume: bool = True,
    progress: Tell = quietly,
) -> Report:
    """Train a linear probe on a folder with one sub-folder per class; the best epoch is written to `out`.

    Adam on random crops, half of them mirrored; without `augment`, on embeddings that are computed once. The best epoch
    has the highest accuracy (then the lowest loss) on the share of every class that is held out for `validation`.
    `limit`: use only the first N images of each class.
    """
    out, options = Path(out), {"batch": batch, "lr": lr, "validation": validation, "augment": augment, "seed": seed}
    check_options(epochs, batch, lr, validation)
    check_out(out)
    folder = open_folder(Path(data), limit=limit)
    learn, check = split(folder, validation, seed)
    identity = fingerprint(model)
    files = Files(out, {"backbone": identity, "images": folder.digest, "image size": list(model.size), **options})
    with torch.inference_mode(False), torch.enable_grad(), Reader(folder, model.channels) as reader:
        reader.check(learn, check)
        if not resume:
            files.clear()
        state = files.read(files.state)
        kept = embed_all(model, reader, check if augment else check + learn, batch, files, progress)
        feed = Feed(model, reader, learn, batch, seed, None if augment else kept)
        run = Training(feed, kept.take(check), lr, files, progress, state)
        run.go(epochs)
    weight, bias = run.best
    told = {"epochs": epochs, **options, "images": folder.digest}
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
        skipped=reader.reasons(),
    )


def check_options(epochs: int, batch: int, lr: float, validation: float) -> None:
    for name, value in {"epochs": epochs, "batch": batch}.items():
        if value < 1:
            raise OptionError(f"{name} = {value}: must be 1 or more")
    if not 0 < lr < float("inf"):
        raise OptionError(f"lr = {lr}: must be more than 0")
    if not 0 < validation < 1:
        raise OptionError(f"validation = {validation}: must lie between 0 and 1, e.g. 0.1 for a tenth of every class")


def check_out(out: Path) -> None:
    """Raise now if the result could not be written later."""
    if out.is_dir():
        raise InputError(f"{out}: is a folder; name the file to write, e.g. {out / 'probe.safetensors'}")
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if not there.is_dir():
        raise InputError(f"{out}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise InputError(f"{out}: the folder {there} is not writable")


# ------------------------------------------------------------------------------------------------------------- training


@dataclass
class At:
    """The state of a training."""

    epoch: int = 0  # finished ones
    batch: int = 0  # finished ones of this epoch
    loss: float = 0.0  # summed over the images of this epoch
    seen: int = 0
    steps: int = 0
    best: int = 0  # from 1
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the best epoch."""
        return self.history[self.best - 1]["accuracy"] if self.best else None


class Training:
    """Adam on weights that start at zero; saved after every epoch, and every minute of a long one."""

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
        """Train up to this many epochs in total."""
        while self.at.epoch < epochs:
            for batch in self.feed.epoch(self.at.epoch, self.at.batch):
                self.step(batch)
                if self.files.due():
                    self.save()
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
        """Measure the probe on the held-out images, and keep it if it is the best so far."""
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
