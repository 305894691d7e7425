"""timm: networks that carry their configuration, its evaluation transform, and ImageNet's class names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from vitreous.errors import ModelError, VitreousError, nearest
from vitreous.images.preprocess import Preprocess, adapt, scaled
from vitreous.models.checkpoint import Blank, Convert, State
from vitreous.models.checkpoints.read import ENDINGS
from vitreous.models.libraries.any import Loaded, Size, stated_size
from vitreous.models.libraries.any import channels as channels
from vitreous.models.libraries.any import frames as frames
from vitreous.models.libraries.any import meaning as meaning
from vitreous.models.libraries.any import run as run
from vitreous.models.libraries.any import text as text
from vitreous.models.libraries.grids import refuse_odd_size
from vitreous.models.libraries.hub import cached, hub, refuse_silent
from vitreous.models.libraries.loading import (
    SEE,
    Filled,
    Settings,
    filled,
    fixed_size,
    hush,
    not_built,
    published_resampled,
    read_weights,
)

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
    """Those it states, or ImageNet's, if the count and the name of the weights point to one of its subsets."""
    from timm.data import infer_imagenet_subset

    count: Any = getattr(net, "num_classes", None)
    stated = stated_labels(net.pretrained_cfg)
    if stated:
        return stated if len(stated) == count else {}
    subset = infer_imagenet_subset(net) if count else None
    if not subset:
        return {}
    return dict(zip(range(count), imagenet_labels(subset)))


@cache
def imagenet_labels(subset: str) -> tuple[str, ...]:
    """The classes of a subset of ImageNet; reading them takes as long as a forward pass."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(info.num_classes()))


def stated_labels(config: Any) -> dict[int, str]:
    """The class names that a folder of timm states: names or indices to names, with or without descriptions."""
    names = config.get("label_names") if isinstance(config, dict) else None
    listed: Mapping[Any, Any] = dict(enumerate(names)) if isinstance(names, list | tuple) else names or {}
    told: Mapping[Any, Any] = (config.get("label_descriptions") if listed else None) or {}
    return {int(index): str(told.get(name, name)) for index, name in listed.items()}


def classifies(net: nn.Module) -> bool | None:
    count: Any = getattr(net, "num_classes", 0)
    return int(count) > 0


def preprocess(net: nn.Module, size: Size | None = None) -> Preprocess:
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({}, model=net)
    size = size or built_size(net)
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
    state = read_weights(weights)

    def build(asked: Settings) -> nn.Module:
        options = {"img_size": asked.size, "num_classes": asked.classes, "in_chans": asked.channels}
        options = {key: value for key, value in options.items() if value is not None}
        reason = None
        try:
            with hush(), nullcontext() if state is None else Blank(), fetching(name, weights) as reason:
                net: nn.Module = timm.create_model(name, pretrained=weights is None, **options)
        except VitreousError:
            raise
        except Exception as error:
            if "img_size" in str(error) and asked.size is not None:
                raise fixed_size(name, error) from error
            if size is not None:
                with hush():
                    refuse_odd_size(timm.create_model(name), size, name)
            raise not_built(name, error, weights, reason) from error
        refuse_odd_size(net, size, name)
        return net

    if state is None:
        net = build(Settings(size))
        asked = published_resampled(net, name, usual_size(net), size)
        made = Filled(net, (), asked, published_files(net)) if weights is None else Filled(net)
    else:
        made = filled(build, state, size, built_size, convert)
    known_as = Path(name).name if name.startswith("local-dir:") else name
    return Loaded(made.net, preprocess(made.net, size), known_as, None, None, *made[1:])


def fetching(name: str, weights: str | None) -> AbstractContextManager[str | None]:
    """What published weights need: a server that answers, or the local cache."""
    import timm

    online = name.startswith(("hf-hub:", "hf_hub:"))
    config: Any = timm.get_pretrained_cfg(name, allow_unregistered=True) if weights is None and not online else None
    if config is not None and config.url and not config.hf_hub_id:
        refuse_silent(config.url, name)
    repository = name.partition(":")[2] if online and weights is None else config and config.hf_hub_id
    return hub(repository.partition("@")[0], name) if repository else hub() if online else nullcontext()


def published_files(net: nn.Module) -> tuple[Path, ...]:
    """The file of the published weights in the local cache."""
    config: Any = net.pretrained_cfg
    repository = config.get("hf_hub_id") if isinstance(config, dict) else None
    return cached(repository, ("model.safetensors", "pytorch_model.bin")) if repository else ()


def built_size(net: nn.Module) -> Size | None:
    """The image size that a network was built for."""
    return stated_size(net, getattr(net, "patch_embed", None))


def usual_size(net: nn.Module) -> Size | None:
    """The image size of the published weights."""
    config: Any = net.pretrained_cfg
    found = config.get("input_size") if isinstance(config, dict) else None
    return None if found is None else (found[1], found[2])


def hint(name: str) -> str:
    """What the user may have meant by something that is not the name of a timm model."""
    path = Path(name)
    if name.count("/") == 1 and not path.suffix:
        return f"; there is no such folder here, and a Hugging Face ID is written hf/{name}"
    if path.suffix in ENDINGS:
        return "; there is no such file here"
    return ""


def convert(state: State, net: nn.Module) -> State:
    """Convert the original authors' checkpoints, and those for another input size, if timm can for this network."""
    found: Convert | None = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    return state if found is None else found(state, net)


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
