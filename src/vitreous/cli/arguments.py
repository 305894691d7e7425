"""Options that several commands share; nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="timm name, hf/ID-or-folder, torchvision/NAME, openclip/NAME; default: the embedded one."
    ),
]
WeightsFile = Annotated[
    str | None, typer.Option("--weights", "-w", help="Checkpoint file (.safetensors, .pth), or random.")
]
LabelsFile = Annotated[Path | None, typer.Option("--labels", help="Class names: one a line, or JSON.")]
ImageSize = Annotated[str | None, typer.Option("--img-size", help="Another input size: 384 or 224x448.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps; default: the GPU if there is one.")
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Use about so much memory: 4GB, 512MiB; default: half of what is free.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
ProbeFile = Annotated[
    Path | None, typer.Option("--probe", help="A file of vitreous probe train: its classes instead of the model's own.")
]
