"""torchvision: networks whose weights carry transforms and class names."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

from torch import nn

from vitreous.errors import ModelError, nearest
from vitreous.images.preprocess import IMAGENET, Preprocess, adapt
from vitreous.models.checkpoint import Blank, State, bare_names, classes_in, fill, read_state
from vitreous.models.libraries.any import Loaded, Size, cropped, stated_size
from vitreous.models.libraries.any import channels as channels
from vitreous.models.libraries.any import classifies as classifies
from vitreous.models.libraries.any import labels as labels
from vitreous.models.libraries.any import meaning as meaning
from vitreous.models.libraries.any import name as name
from vitreous.models.libraries.any import run as run
from vitreous.models.libraries.any import text as text
from vitreous.models.libraries.loading import RANDOM, SEE, fixed_size, not_built

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
    state = None if weights in (None, RANDOM) else read_state(str(weights))
    options: dict[str, Any] = {} if state is None else classes_in(state)
    if size is not None:
        options["image_size"] = one_side(size, name)
    try:
        if weights is None and size is not None:
            state = usual.get_state_dict(progress=True, check_hash=True)
        ready = usual if weights is None and size is None else None
        with nullcontext() if state is None else Blank():
            net = torchvision.models.get_model(name, weights=ready, **options)
    except Exception as error:
        if "image_size" in str(error) and size is not None:
            raise fixed_size(name, error) from error
        raise not_built(name, error, weights) from error
    if state is not None:
        fill(net, resample(net, state), str(weights or name))
    classes = usual.meta["categories"]
    known_classes = classes if options.get("num_classes", 1000) == len(classes) else None
    return Loaded(net, transform(net, usual), name, known_classes, classifier=True)


def transform(net: nn.Module, usual: Any) -> Preprocess:
    """The transform of the usual weights, unless this network was built for another size."""
    steps, side = adapt(usual.transforms()), getattr(net, "image_size", None)
    return steps if side is None or steps.size == (side, side) else preprocess(net)


def one_side(size: Size, name: str) -> int:
    if size[0] != size[1]:
        raise ModelError(f"{name} takes square images only, not {size[0]}×{size[1]}")
    return size[0]


def resample(net: Any, state: State) -> State:
    """Resize the position embedding of a state to this network's."""
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    key = "encoder.pos_embedding"
    state = bare_names(net.state_dict(), state)
    if (
        not isinstance(net, VisionTransformer)
        or key not in state
        or state[key].shape == net.encoder.pos_embedding.shape
    ):
        return state
    return dict(interpolate_embeddings(net.image_size, net.patch_size, OrderedDict(state)))


def names(everything: bool) -> list[str] | None:
    import torchvision

    found: list[str] = torchvision.models.list_models(module=torchvision.models)
    return found if everything else [name for name in found if name.startswith(("vit", "swin"))]
