"""Send numbers and images to TensorBoard, Weights & Biases or MLflow, whichever a writer is.

A writer is known by what it can do, so that none of the packages is imported to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from vitreous._support.optional import needs
from vitreous.errors import OptionError

TAKES = "a SummaryWriter of TensorBoard, a run of wandb (or wandb itself), mlflow, a run of it or (client, run id)"


@runtime_checkable
class Sink(Protocol):
    """Where numbers and images go."""

    def send(self, scalars: Mapping[str, float], images: Mapping[str, Image.Image], step: int | None) -> None: ...


@dataclass(frozen=True)
class TensorBoard:
    """A SummaryWriter."""

    writer: Any

    def send(self, scalars: Mapping[str, float], images: Mapping[str, Image.Image], step: int | None) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        for tag, image in images.items():
            self.writer.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases, or its module; everything of one call is one row of its history."""

    writer: Any
    axis: str | None = None  # the column that holds the step, where a trainer counts its own

    def send(self, scalars: Mapping[str, float], images: Mapping[str, Image.Image], step: int | None) -> None:
        made = getattr(self.writer, "Image", None) or needs("wandb", "wandb").Image
        row = {**scalars, **{tag: made(image.convert("RGB")) for tag, image in images.items()}}
        if self.axis is None:
            self.writer.log(row, step=step)
        else:
            self.writer.log({**row, self.axis: step})


@dataclass(frozen=True)
class MLflow:
    """The module or a client of MLflow; a client is told the run each time."""

    writer: Any
    run: tuple[str, ...] = ()

    def send(self, scalars: Mapping[str, float], images: Mapping[str, Image.Image], step: int | None) -> None:
        for key, value in scalars.items():
            self.writer.log_metric(*self.run, key, value, step=step)
        for key, image in images.items():
            where = {"artifact_file": f"{key}.png"} if step is None else {"key": key, "step": step}
            self.writer.log_image(*self.run, image.convert("RGB"), **where)


def sink_of(writer: Any) -> Sink:
    """What a writer is; raises for anything else."""
    if isinstance(writer, tuple) and len(writer) == 2 and can(writer[0], "log_metric", "log_image"):
        return MLflow(writer[0], (str(writer[1]),))
    if can(writer, "add_scalar", "add_image"):
        return TensorBoard(writer)
    if can(writer, "log_metric", "log_image", "active_run"):
        return MLflow(writer)
    if can(writer, "log", "define_metric"):
        return WandB(writer)
    if isinstance(run := getattr(getattr(writer, "info", None), "run_id", None), str):
        return MLflow(needs("mlflow", "mlflow").MlflowClient(), (run,))
    if can(writer, "log_metric", "log_image"):
        raise OptionError("a client of mlflow does not know the run; give both: log((client, run_id))")
    kind = writer.__name__ if isinstance(writer, type) else type(writer).__name__
    raise OptionError(f"a {kind} is not a writer that vitreous knows; give {TAKES}")


def can(writer: Any, *names: str) -> bool:
    return not isinstance(writer, type) and all(callable(getattr(writer, name, None)) for name in names)
