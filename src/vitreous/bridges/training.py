"""Explain the same images again and again while a network is trained, and measure how their maps move.

What the callbacks for Lightning and the Hugging Face Trainer have in common. Training is not disturbed: modes,
gradients, random numbers, autocast and device are afterwards as before.
"""

from __future__ import annotations

import csv
import io
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitreous._support.files import write_whole
from vitreous._support.writers import Sink
from vitreous.api import explain
from vitreous.attribution import Attribution
from vitreous.declaration import ConfiguredMethod
from vitreous.errors import OptionError, explained
from vitreous.images import pictures
from vitreous.metrics.correlation import rank_correlation
from vitreous.models.kinds_of_module import unwrap
from vitreous.models.model import Model
from vitreous.plot.figure import png_bytes
from vitreous.plot.film import film_figure, row_of_maps
from vitreous.plot.logged import finite, mean, numbers, unique
from vitreous.trace.apply import find_method, of_images

FOLDER, TABLE, STRIP = "vitreous", "maps.csv", "maps.png"
KEPT = 16  # at least so many looks are kept for the strip, twice as many at most
NUMBERS = ("share", "with_previous", "with_first", "entropy", "gini")


@dataclass(frozen=True)
class Row:
    """One image at one step."""

    step: int
    epoch: float
    image: str
    target: str | None
    label: str | None
    share: float  # the probability of the target, or its value; NaN if it is not a class
    with_previous: float  # rank correlation with the map of the step before; NaN at the first
    with_first: float
    entropy: float
    gini: float


@dataclass
class Due:
    """Whether it is time: every so many steps, every so many epochs, or both."""

    steps: Any  # whole numbers, which is checked below, or None
    epochs: Any
    last: int = -1  # the step of the last look

    def __post_init__(self) -> None:
        for name, value in (("every_steps", self.steps), ("every_epochs", self.epochs)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} takes a whole number of at least 1, not {value!r}")
        if self.steps is None and self.epochs is None:
            self.epochs = 1

    def at_step(self, step: int) -> bool:
        return self.steps is not None and step // self.steps > max(self.last, 0) // self.steps

    def at_epoch(self, number: int) -> bool:
        """After the epoch of this number, the first being 1."""
        return self.epochs is not None and number % self.epochs == 0


class Watch:
    """The images, their maps so far, and where the numbers go."""

    def __init__(
        self,
        images: Any,
        method: str | ConfiguredMethod | None,
        target: Any,
        options: dict[str, Any],
        *,
        network: str | Callable[[Any], nn.Module] | None,
        preprocess: Any,
        labels: Any,
        name: str | None,
        folder: str | Path | None,
    ) -> None:
        if method is None and options:
            raise OptionError(f"name the method that takes {', '.join(options)}: method=…")
        if method is not None:
            find_method(method, options)
        is_folder = isinstance(images, str | Path) and Path(images).is_dir()
        self.images = pictures.find(images) if is_folder else images
        self.method, self.target, self.options = method, target, options
        self.network, self.preprocess, self.labels, self.name = network, preprocess, labels, name
        self.given = folder
        self.begin()
        self.model: Model | None = None

    def begin(self) -> None:
        """Start a new table; a trainer may train more than once."""
        self.folder = Path()
        self.rows: list[Row] = []
        self.looks: list[tuple[int, Attribution]] = []  # some of them, for the strip
        self.first: Tensor | None = None
        self.previous: Tensor | None = None

    def look(self, owner: nn.Module, step: int, epoch: float, sinks: Sequence[Sink], folder: Path) -> None:
        """Explain the images, send the numbers and keep them; what goes wrong is a warning, as training goes on."""
        try:
            with undisturbed(next(owner.parameters()).device):
                found = self.explained(owner)
                rows = self.measured(found, step, epoch)
                self.note(rows, found)
                self.send(rows, found, step, sinks)
                self.write_table(folder)
        except Exception as error:
            warnings.warn(f"vitreous: no maps at step {step} ({explained(error)})", RuntimeWarning, stacklevel=2)

    def explained(self, owner: nn.Module) -> Attribution:
        """The maps by the present weights; what was found out about the network before is forgotten."""
        refuse_sharded(owner)
        if self.model is None:
            self.model = of_images(
                Model(network_of(owner, self.network), self.preprocess, self.labels), "callbacks work"
            )
            if not isinstance(self.images, Tensor):
                listed = pictures.as_list(self.images, self.model.channels)
                self.images = [pictures.read(one, i, self.model.channels) for i, one in enumerate(listed)]
        self.model.forget()
        found = explain(self.model, self.images, self.method, self.target, **self.options)
        self.model.forget()
        if found.targets[0] is not None and (self.target is None or str(self.target).startswith("top-")):
            self.target = list(found.targets)  # the class that was best at first, whatever is best later
        self.method = self.method or found.method
        return found

    def measured(self, found: Attribution, step: int, epoch: float) -> list[Row]:
        maps = found.map.detach().float().cpu()
        unknown = torch.full((len(maps),), torch.nan)
        known = {
            "share": unknown.tolist(),
            **numbers(found),
            "with_previous": (unknown if self.previous is None else rank_correlation(maps, self.previous)).tolist(),
            "with_first": (unknown if self.first is None else rank_correlation(maps, self.first)).tolist(),
        }
        self.first = maps if self.first is None else self.first
        self.previous = maps
        labels = found.labels or (None,) * len(maps)
        each = zip(found.names, found.targets, labels, *(known[key] for key in NUMBERS))
        return [Row(step, epoch, *values) for values in each]

    def note(self, rows: list[Row], found: Attribution) -> None:
        """Keep the table, and of the maps every second, every fourth, … of a long training."""
        self.rows += rows
        self.looks.append((rows[0].step, found))
        if len(self.looks) > 2 * KEPT:
            self.looks = [*self.looks[:-1:2], self.looks[-1]]

    def send(self, rows: list[Row], found: Attribution, step: int, sinks: Sequence[Sink]) -> None:
        name, scalars = self.name or found.method, {}
        for key in NUMBERS:
            values = [getattr(row, key) for row in rows]
            scalars[f"{name}/{key}_mean"] = mean(values)
            scalars |= {f"{name}/{key}/{tag}": value for tag, value in zip(unique(found.names), values)}
        images: dict[str, Image.Image] = {f"{name}/maps": row_of_maps(found)} if sinks else {}
        for sink in sinks:
            sink.send(finite(scalars), images, step)

    def write_table(self, folder: Path) -> None:
        """The whole table at every look, so that a training that is stopped leaves it behind."""
        self.choose_folder(folder)
        text = io.StringIO()
        table = csv.DictWriter(text, [field.name for field in fields(Row)])
        table.writeheader()
        table.writerows({k: "" if v != v else v for k, v in asdict(row).items()} for row in self.rows)
        write_whole(self.folder / TABLE, text.getvalue().encode())

    def choose_folder(self, run: Path) -> Path:
        """Where the files go: as given, or a folder in that of the run; never one that holds those of another run."""
        if self.folder == Path():
            self.folder = unused(run / FOLDER if self.given is None else Path(self.given))
        return self.folder

    def end(self) -> None:
        """Write the strip of maps beside the table."""
        if not self.looks or self.folder == Path():
            return
        steps = list(dict.fromkeys(row.step for row in self.rows))
        moved = {}
        for key in ("with_first", "with_previous"):
            values = [mean([getattr(row, key) for row in self.rows if row.step == step]) for step in steps]
            moved[f"rank correlation {key.replace('_', ' the ')} map"] = [
                (step, value) for step, value in zip(steps, values) if value == value
            ]
        figure = film_figure([found for _, found in self.looks], [step for step, _ in self.looks], moved)
        write_whole(self.folder / STRIP, png_bytes(figure))


def network_of(owner: nn.Module, wanted: str | Callable[[Any], nn.Module] | None) -> nn.Module:
    """The network inside what is trained: all of it, an attribute of it by name, or what a function takes from it."""
    owner = unwrap(owner)
    if wanted is None:
        return owner
    found = owner.get_submodule(wanted) if isinstance(wanted, str) else wanted(owner)
    if not isinstance(found, nn.Module):
        raise OptionError(f"network={wanted!r} gives a {type(found).__name__}, not a network")
    return found


def refuse_sharded(net: nn.Module) -> None:
    """Raise if other processes hold parts of the weights: a forward pass of one alone would wait for them forever."""
    split = any(hasattr(p, "ds_id") or hasattr(p, "placements") for p in net.parameters())
    if split or any(type(module).__name__ == "FullyShardedDataParallel" for module in net.modules()):
        raise OptionError("the weights are divided among processes (FSDP, ZeRO-3); explain a saved checkpoint instead")


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Full precision, gradients on, and every random generator afterwards as before."""
    others = random.getstate(), np.random.get_state()
    cuda = [device.index or 0] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(cuda),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])


def unused(folder: Path) -> Path:
    """This folder, or folder-2, folder-3, … if there is a table of another training in it."""
    number = 2
    tried = folder
    while (tried / TABLE).exists():
        tried = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return tried
