"""A callback for the Trainer of transformers, which is not imported before the callback is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitreous._support.optional import needs
from vitreous._support.writers import MLflow, Sink, TensorBoard, WandB, sink_of
from vitreous.bridges.training import Due, Watch
from vitreous.declaration import ConfiguredMethod


def trainer_callback(
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
    writer: Any = None,
    **options: Any,
) -> Any:
    """A callback of the Hugging Face Trainer that explains the same images during training, and charts how maps move.

    `Trainer(…, callbacks=[vitreous.trainer_callback("photos/", "gae", every_steps=100)])`

    Parameters are those of `lightning_callback`. `preprocess`: by default the Trainer's `processing_class`, else that
    of the model. `writer`: where numbers and images go, as for `Attribution.log`; by default what the Trainer reports
    to: TensorBoard (a run of its own in `folder`), Weights & Biases, MLflow. maps.csv and maps.png are written to
    `folder`, by default vitreous/ in the output folder.
    """
    watch = Watch(
        *(images, method, target, options),
        network=network,
        preprocess=preprocess,
        labels=labels,
        name=name,
        folder=folder,
    )
    return joined(watch, Due(every_steps, every_epochs), None if writer is None else sink_of(writer))


class Hooks:
    """What is done at which moment of a training."""

    def __init__(self, watch: Watch, due: Due, given: Sink | None) -> None:
        self.watch, self.due, self.given = watch, due, given
        self.sinks: list[Sink] = [] if given is None else [given]

    def look(self, args: Any, state: Any, model: nn.Module) -> None:
        if state.is_world_process_zero and state.global_step != self.due.last:
            self.due.last = int(state.global_step)
            self.watch.look(model, self.due.last, float(state.epoch or 0), self.sinks, Path(args.output_dir))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.watch.preprocess is None and hasattr(steps := more.get("processing_class"), "image_mean"):
            self.watch.preprocess = steps
        if self.given is None:
            self.sinks = reported(args.report_to, self.watch.choose_folder(Path(args.output_dir)))
        self.look(args, state, more["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.due.at_step(state.global_step):
            self.look(args, state, more["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.due.at_epoch(round(state.epoch or 0)):
            self.look(args, state, more["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.look(args, state, more["model"])
        self.watch.end()
        for sink in self.sinks if self.given is None else ():
            if isinstance(sink, TensorBoard):
                sink.writer.close()


def joined(watch: Watch, due: Due, given: Sink | None) -> Any:
    """The hooks as a callback of transformers."""
    base = needs("transformers", "hf").TrainerCallback
    return type("ExplainedTraining", (Hooks, base), {})(watch, due, given)


def reported(names: Sequence[str], folder: Path) -> list[Sink]:
    """The loggers that a Trainer reports to, as far as they take images."""
    found: list[Sink] = []
    if "tensorboard" in names:
        from torch.utils.tensorboard import SummaryWriter

        found.append(TensorBoard(SummaryWriter(str(folder))))
    if "wandb" in names and (run := getattr(sys.modules.get("wandb"), "run", None)) is not None:
        found.append(WandB(run, "train/global_step"))
    mlflow = sys.modules.get("mlflow")
    if "mlflow" in names and mlflow is not None and mlflow.active_run() is not None:
        found.append(MLflow(mlflow))
    return found
