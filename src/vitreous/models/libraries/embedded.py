"""The embedded model: timm's DeiT-Tiny with four registers, and ImageNet's class names. A source, not a library."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from vitreous.images.preprocess import IMAGENET
from vitreous.models.checkpoint import Blank, fill, read_safetensors
from vitreous.models.libraries.any import Loaded, Size, cropped
from vitreous.models.libraries.grids import refuse_odd_size
from vitreous.models.libraries.loading import RANDOM, Filled, Settings, filled, published_resampled, read_weights
from vitreous.models.libraries.timm import built_size, convert

PREFIX = "embedded"
NAME = "vitreous_tiny"
SIZE = (224, 224)
ASSETS = Path(__file__).parents[2] / "assets"


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    """Load the embedded model, whatever the name; `weights` may be those of any DeiT-Tiny."""
    if weights in (None, RANDOM):
        made = own(weights is None, size)
    else:
        found = read_weights(weights)
        assert found is not None
        registers = any(key.endswith("reg_token") for key in found.state)  # a plain DeiT-Tiny has none
        made = filled(lambda asked: build(asked, registers, blank=True), found, size, built_size, convert)
    labels = (ASSETS / "imagenet1k.txt").read_text(encoding="utf-8").splitlines()
    known = labels if made.net.num_classes == len(labels) else None
    return Loaded(made.net, cropped(built_size(made.net) or SIZE, *IMAGENET), NAME, known, None, *made[1:])


def build(asked: Settings, registers: bool = True, blank: bool = False) -> nn.Module:
    import timm

    options: dict[str, Any] = {"reg_tokens": 4, "no_embed_class": True} if registers else {}
    options |= {} if asked.size is None else {"img_size": asked.size}
    options |= {} if asked.classes is None else {"num_classes": asked.classes}
    with Blank() if blank else nullcontext():
        net: nn.Module = timm.create_model("deit_tiny_patch16_224", **options)
    return net


def own(trained: bool, size: Size | None) -> Filled:
    """The model in the package; at another size, its position grid is resampled."""
    net, file = build(Settings(size), blank=trained), ASSETS / f"{NAME}.safetensors"
    if size is not None:
        refuse_odd_size(net, size, NAME)
    if not trained:
        return Filled(net)
    fill(net, read_safetensors(file), NAME, convert)
    return Filled(net, (), () if size is None else published_resampled(net, NAME, SIZE, size), (file,))


def names(everything: bool) -> list[str] | None:
    return [NAME]
