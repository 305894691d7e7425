"""The embedded model: timm's DeiT-Tiny with four registers, and ImageNet's class names. A source, not a library."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vitreous.images.preprocess import IMAGENET
from vitreous.models.checkpoint import Blank, classes_in, fill, read_state
from vitreous.models.libraries.any import Loaded, Size, cropped
from vitreous.models.libraries.loading import RANDOM
from vitreous.models.libraries.timm import converter

PREFIX = "embedded"
NAME = "vitreous_tiny"
ASSETS = Path(__file__).parents[2] / "assets"


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    """Load the embedded model, whatever the name; `weights` may be those of any DeiT-Tiny."""
    import timm

    file = None if weights == RANDOM else Path(weights or ASSETS / f"{NAME}.safetensors")
    state = None if file is None else read_state(str(file))
    options: dict[str, Any] = {} if size is None else {"img_size": size}
    if state is None or any(key.endswith("reg_token") for key in state):  # a plain DeiT-Tiny has none
        options |= {"reg_tokens": 4, "no_embed_class": True}
    classes = {} if state is None else classes_in(state)
    with nullcontext() if state is None else Blank():
        net = timm.create_model("deit_tiny_patch16_224", **options, **classes)
    if state is not None:
        fill(net, state, weights or NAME, converter(net))
    labels = (ASSETS / "imagenet1k.txt").read_text(encoding="utf-8").splitlines()
    known = labels if net.num_classes == len(labels) else None
    return Loaded(net, cropped(size or (224, 224), *IMAGENET), NAME, known, weights=() if file is None else (file,))


def names(everything: bool) -> list[str] | None:
    return [NAME]
