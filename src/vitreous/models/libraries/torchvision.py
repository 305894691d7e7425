"""torchvision: networks whose weights carry transforms and class names."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from vitreous.errors import ModelError, nearest
from vitreous.images.preprocess import IMAGENET, Preprocess, adapt
from vitreous.models.checkpoint import Blank, State
from vitreous.models.checkpoints.read import Checkpoint
from vitreous.models.libraries.any import Loaded, Size, cropped, stated_size
from vitreous.models.libraries.any import channels as channels
from vitreous.models.libraries.any import classifies as classifies
from vitreous.models.libraries.any import frames as frames
from vitreous.models.libraries.any import labels as labels
from vitreous.models.libraries.any import meaning as meaning
from vitreous.models.libraries.any import name as name
from vitreous.models.libraries.any import run as run
from vitreous.models.libraries.any import text as text
from vitreous.models.libraries.grids import refuse_odd_size
from vitreous.models.libraries.hub import refuse_silent
from vitreous.models.libraries.loading import SEE, Filled, Settings, filled, fixed_size, not_built, read_weights

PREFIX = "torchvision"
PACKAGE = "torchvision"
CHECKPOINTING: tuple[str, ...] = ()
HOOKS: tuple[str, ...] = ()
PREFIXES: tuple[str, ...] = ()


def owns(net: nn.Module) -> bool:
    return type(net).__module__.startswith("torchvision.")


def preprocess(net: nn.Module, size: Size | None = None) -> Preprocess:
    return cropped(size or stated_size(net) or (224, 224), *IMAGENET, crop=0.875, channels=channels(net) or 3)


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    import torchvision

    known = torchvision.models.list_models()
    if name not in known:
        raise ModelError(f"torchvision has no model {name!r}{nearest(name, known) or SEE}")
    usual = torchvision.models.get_model_weights(name).DEFAULT
    state = read_weights(weights)
    if weights is None:
        refuse_silent(usual.url, name)
    if weights is None and size is not None:
        state = published(name, usual)

    def build(asked: Settings) -> nn.Module:
        options: dict[str, Any] = {} if asked.classes is None else {"num_classes": asked.classes}
        if asked.size is not None:
            options["image_size"] = one_side(asked.size, name)
        ready = usual if weights is None and size is None else None
        try:
            with nullcontext() if state is None else Blank():
                net: nn.Module = torchvision.models.get_model(name, weights=ready, **options)
        except Exception as error:
            if "image_size" in str(error) and asked.size is not None:
                raise fixed_size(name, error) from error
            if size is not None:
                refuse_odd_size(torchvision.models.get_model(name, weights=None), size, name)
            raise not_built(name, error, weights) from error
        refuse_odd_size(net, size, name)
        return net

    made = Filled(build(Settings(size))) if state is None else filled(build, state, size, stated_size, resample)
    made = made._replace(weights=files_of(usual)) if weights is None else made
    classes = usual.meta["categories"]
    known_classes = classes if classes_of(made.net) == len(classes) else None
    return Loaded(made.net, transform(made.net, usual), name, known_classes, True, *made[1:])


def published(name: str, usual: Any) -> Checkpoint:
    """The published weights as a state, for a network of another size."""
    try:
        state = usual.get_state_dict(progress=True, check_hash=True)
    except Exception as error:
        raise not_built(name, error, None) from error
    return Checkpoint(name, state, ())


def files_of(usual: Any) -> tuple[Path, ...]:
    """The file of the published weights in the local cache."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(usual.url).path).name
    return (file,) if file.is_file() else ()


def classes_of(net: Any) -> int | None:
    """How many classes the last layer has."""
    last = [module for module in net.modules() if isinstance(module, nn.Linear)]
    return last[-1].out_features if last else None


def transform(net: nn.Module, usual: Any) -> Preprocess:
    """The transform of the usual weights, unless this network was built for another size."""
    steps, side = adapt(usual.transforms()), getattr(net, "image_size", None)
    return steps if side is None or steps.size == (side, side) else preprocess(net)


def one_side(size: Size, name: str) -> int:
    if size[0] != size[1]:
        raise ModelError(f"{name} takes square images only, not {size[0]}×{size[1]}")
    return size[0]


def resample(state: State, net: Any) -> State:
    """Resize the position embedding of a state to this network's."""
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    if not isinstance(net, VisionTransformer) or "encoder.pos_embedding" not in state:
        return state
    return dict(interpolate_embeddings(net.image_size, net.patch_size, OrderedDict(state)))


def names(everything: bool) -> list[str] | None:
    import torchvision

    found: list[str] = torchvision.models.list_models(module=torchvision.models)
    return found if everything else [name for name in found if name.startswith(("vit", "swin"))]
