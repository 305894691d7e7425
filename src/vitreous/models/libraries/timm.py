"""timm: networks that carry their configuration, its evaluation transform, and ImageNet's class names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from vitreous.errors import ModelError, nearest
from vitreous.images.preprocess import Preprocess, adapt, scaled
from vitreous.models.checkpoint import Blank, Convert, channels_in, classes_in, fill, read_state
from vitreous.models.libraries.any import Loaded, Size, stated_size
from vitreous.models.libraries.any import channels as channels
from vitreous.models.libraries.any import meaning as meaning
from vitreous.models.libraries.any import run as run
from vitreous.models.libraries.any import text as text
from vitreous.models.libraries.loading import RANDOM, SEE, fixed_size, hush, not_built

PREFIX = "timm"
PACKAGE = "timm"
CHECKPOINTING: tuple[str, ...] = ("grad_checkpointing",)
HOOKS: tuple[str, ...] = ()
PREFIXES: tuple[str, ...] = ("num_prefix_tokens",)
ELSEWHERE = ("hf-hub:", "hf_hub:", "local-dir:")  # names that are not in timm's own list
TRANSFORMERS = [  # its files of Vision Transformers
    *("beit", "cait", "deit", "eva", "naflexvit", "swin_transformer", "swin_transformer_v2"),
    *("vision_transformer", "vision_transformer_relpos", "xcit"),
]


def owns(net: nn.Module) -> bool:
    return hasattr(net, "pretrained_cfg")


def name(net: nn.Module) -> str:
    config: Any = net.pretrained_cfg
    architecture = config.get("architecture") if isinstance(config, dict) else None
    return str(architecture or type(net).__name__)


def labels(net: nn.Module) -> Mapping[int, str]:
    """ImageNet's names, if the number of classes and the name of the weights point to one of its subsets."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    count: Any = getattr(net, "num_classes", None)
    subset = infer_imagenet_subset(net) if count else None
    if not subset:
        return {}
    info = ImageNetInfo(subset)
    return {index: info.index_to_description(index) for index in range(count)}


def classifies(net: nn.Module) -> bool | None:
    count: Any = getattr(net, "num_classes", 0)
    return int(count) > 0


def preprocess(net: nn.Module, size: Size | None = None) -> Preprocess:
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({}, model=net)
    size = size or stated_size(net, getattr(net, "patch_embed", None))
    if size is not None:
        config["input_size"] = (3, *size)
    count = channels(net) or 3
    if count != 3:
        whole = config["crop_mode"] == "squash"
        return scaled(config["input_size"][1:], config["mean"], config["std"], count, config["crop_pct"], whole)
    return adapt(create_transform(**config))


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    import timm

    architecture = name.partition(".")[0]
    known = timm.list_models()
    if not name.startswith(ELSEWHERE) and architecture not in known:
        raise ModelError(f"unknown model {name!r}{hint(name) or nearest(architecture, known) or SEE}")
    options: dict[str, Any] = {} if size is None else {"img_size": size}
    state = None if weights in (None, RANDOM) else read_state(str(weights))
    if state is not None:
        options |= classes_in(state)
    try:
        with hush(), nullcontext() if state is None else Blank():
            net = timm.create_model(name, pretrained=weights is None, **options)
            count = None if state is None else channels_in(state, net)
            if count not in (None, channels(net)):
                net = timm.create_model(name, in_chans=count, **options)
    except Exception as error:
        if "img_size" in str(error) and size is not None:
            raise fixed_size(name, error) from error
        raise not_built(name, error, weights) from error
    if state is not None:
        fill(net, state, str(weights), converter(net))
    return Loaded(net, preprocess(net, size), name)


def hint(name: str) -> str:
    """What the user may have meant by something that is not the name of a timm model."""
    path = Path(name)
    if path.is_dir() or (name.count("/") == 1 and not path.suffix):
        return f"; a Hugging Face folder or ID is written hf/{name}"
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt"):
        return (
            "; a file of weights needs its architecture: load(NAME, weights=FILE), on the command line -m NAME -w FILE"
        )
    return ""


def converter(net: nn.Module) -> Convert | None:
    """The function that converts the original authors' checkpoints, if timm has one for this network."""
    found: Convert | None = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return found


def names(everything: bool) -> list[str] | None:
    import timm

    found: list[str] = timm.list_models(module="" if everything else TRANSFORMERS)
    return found


@cache
def wordnet() -> dict[str, tuple[int, str]]:
    """ImageNet's classes by their WordNet IDs: the class number and its names, separated by commas."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return {name: (index, info.index_to_description(index)) for index, name in enumerate(info.label_names())}
