"""A callback for Lightning, for the one of its two packages that is in use; neither is imported before that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from vitreous._support.writers import MLflow, Sink, TensorBoard, WandB, can
from vitreous.bridges.training import Due, Watch
from vitreous.declaration import ConfiguredMethod
from vitreous.errors import ModelError, OptionError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
WITHOUT_FORWARD = ("lightning", "pytorch_lightning", "torch")  # whose `forward` only says that there is none


def lightning_callback(
    images: Any,
    method: str | ConfiguredMethod | None = None,
    target: Any = None,
    *,
    every_steps: int | None = None,
    every_epochs: int | None = None,
    network: str | Callable[[Any], nn.Module] | None = None,
    preprocess: Any = None,
    labels: Any = None,
    name: str | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> Any:
    """A callback of Lightning that explains the same images while a network is trained, and charts how their maps move.

    `Trainer(callbacks=[vitreous.lightning_callback("photos/", "gae", every_steps=100, network="net")])`

    `images`: a folder, or what `explain` takes. `method`, `target` and further options: as for `explain`; by default
    each image keeps the class that was best at first. `every_steps`, `every_epochs`: how often, by default after every
    epoch; also before the first step and after the last. `network`: the attribute of the LightningModule that is the
    network, or a function of the module; by default the module if it defines `forward`, else its only part with
    weights. `preprocess`, `labels`: as for `Model`; by default those of the network.

    Every logger of the trainer gets, for each image: the probability of the target, the rank correlation of the map
    with the previous and with the first one, entropy and Gini index, and an image of the maps (`name` leads the tags,
    by default the method's). maps.csv and maps.png are written to `folder`, by default vitreous/ in the folder of the
    run. Only the first process does this, and training goes on as without it. If the maps cannot be made, a warning
    says why.
    """
    watch = Watch(
        *(images, method, target, options),
        network=usual_network if network is None else network,
        preprocess=preprocess,
        labels=labels,
        name=name,
        folder=folder,
    )
    return joined(watch, Due(every_steps, every_epochs))


class Hooks:
    """What is done at which moment of a training."""

    def __init__(self, watch: Watch, due: Due) -> None:
        self.watch, self.due, self.where = watch, due, Path()

    def __reduce__(self) -> Any:
        return joined, (self.watch, self.due)

    def look(self, trainer: Any, module: nn.Module) -> None:
        step = int(trainer.global_step)
        if trainer.is_global_zero and step != self.due.last:
            self.due.last = step
            sinks = [Logged(logger) for logger in trainer.loggers]
            self.watch.look(module, step, float(trainer.current_epoch), sinks, self.where)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.where = Path(trainer.log_dir or trainer.default_root_dir)  # asked by all processes, as they agree on it
        self.look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any, **__: Any) -> None:
        if self.due.at_step(int(trainer.global_step)):
            self.look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        if self.due.at_epoch(int(trainer.current_epoch) + 1):
            self.look(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.look(trainer, pl_module)
        self.watch.end()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.watch.end()


def usual_network(module: nn.Module) -> nn.Module:
    """The module itself if it has a `forward` of its own, else its only part with weights."""
    defines = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if defines.__module__.partition(".")[0] not in WITHOUT_FORWARD:
        return module
    parts = {name: part for name, part in module.named_children() if any(True for _ in part.parameters())}
    if len(parts) != 1:
        held = f"has no forward, and {len(parts) or 'no'} parts with weights{': ' if parts else ''}{', '.join(parts)}"
        raise OptionError(f"{type(module).__name__} {held}; say which is the network: network=…")
    return next(iter(parts.values()))


def joined(watch: Watch, due: Due) -> Any:
    """The hooks as a callback of the package that is in use."""
    return type("ExplainedTraining", (Hooks, *bases()), {})(watch, due)


def bases() -> list[type]:
    """The class Callback of each package of Lightning that is in use, or else of the first that is installed."""
    found = [sys.modules[name].Callback for name in PACKAGES if name in sys.modules]
    if not found:
        found = [package.Callback for name in PACKAGES if (package := imported(name)) is not None][:1]
    if not found:
        raise ModelError("this needs lightning: pip install 'vitreous[lightning]'")
    return found


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Logged:
    """Any logger of Lightning: it takes numbers, and images too if what it writes to does."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def send(self, scalars: Mapping[str, float], images: Mapping[str, Image.Image], step: int | None) -> None:
        self.logger.log_metrics(dict(scalars), step=step)
        sink = images_of(self.logger)
        if sink is not None:
            sink.send({}, images, step)


def images_of(logger: Any) -> Sink | None:
    """Where the images of a logger go; None if it takes numbers only."""
    experiment = getattr(logger, "experiment", None)
    if can(experiment, "add_scalar", "add_image"):
        return TensorBoard(experiment)
    if can(experiment, "log", "define_metric"):
        return WandB(experiment, "trainer/global_step")
    if can(experiment, "log_metric", "log_image") and isinstance(run := getattr(logger, "run_id", None), str):
        return MLflow(experiment, (run,))
    return None
