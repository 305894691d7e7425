"""Networks of no known library: a plain call, and conventions that many authors share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from vitreous.errors import ModelError
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models.libraries.library import Loaded, Size, cropped, stated_size

PREFIX = ""
CHECKPOINTING: tuple[str, ...] = ()
HOOKS: tuple[str, ...] = ()
KEYS = ("logits", "image_embeds", "pooler_output", "x_norm_clstoken")  # of the dictionaries that networks return


def owns(net: nn.Module) -> bool:
    return True


def name(net: nn.Module) -> str:
    return type(net).__name__


def labels(net: nn.Module) -> Mapping[int, str]:
    return {}


def classifies(net: nn.Module) -> bool | None:
    return None


def run(net: nn.Module, images: Tensor) -> Any:
    return net(images)


def preprocess(net: nn.Module, size: Size | None = None) -> Preprocess:
    """A centre crop of the full short side in ImageNet's colours, at the size that the network states anywhere."""
    config = getattr(net, "config", None)
    places = net, getattr(net, "patch_embed", None), getattr(net, "visual", None), config
    found = size or stated_size(*places, getattr(config, "vision_config", None))
    return cropped(found or (224, 224), *IMAGENET)


def text(net: nn.Module, name: str) -> Callable[[str], Any] | None:
    return None


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    raise ModelError(f"{name}: a network of no known library cannot be loaded by name; give it to Model(net)")


def names(everything: bool) -> list[str] | None:
    return None


def find_output(raw: Mapping[str, Any]) -> Tensor | None:
    """The scores or the embedding among named outputs: by a known name, or because it is the only vector."""
    for key in KEYS:
        if raw.get(key) is not None:
            return raw[key]  # type: ignore[no-any-return]
    tokens = raw.get("last_hidden_state")
    if tokens is not None:
        return tokens[:, 0]  # type: ignore[no-any-return]
    vectors = [value for value in raw.values() if isinstance(value, Tensor) and value.ndim == 2]
    return vectors[0] if len(vectors) == 1 else None
