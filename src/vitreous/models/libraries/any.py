"""The functions that every library's module has, and how they work for networks of no known library.

A module without a quirk of its own imports the function from here. mypy checks every module against `Library`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from vitreous.errors import ModelError
from vitreous.images.preprocess import IMAGENET, Preprocess, adapt, scaled

Size = tuple[int, int]  # height, width
PREFIX = ""
PACKAGE = "timm"  # whose transforms are the usual preprocessing
CHECKPOINTING: tuple[str, ...] = ()
HOOKS: tuple[str, ...] = ()
PREFIXES: tuple[str, ...] = ()
IMAGES = ("pixel_values", "image", "images", "img", "imgs", "pixels")  # what the argument of an image is called
KEYS = (
    "logits",
    "logits_per_image",
    "image_embeds",
    "pooler_output",
    "x_norm_clstoken",
)  # of the dictionaries that networks return


class Loaded(NamedTuple):
    """A network that was loaded by name. Where labels or classifier are None, the network itself is asked."""

    net: nn.Module
    preprocess: Preprocess
    name: str
    labels: Sequence[str] | Mapping[int, str] | None = None
    classifier: bool | None = None
    notes: tuple[str, ...] = ()  # what was assumed or left out; Python users are warned
    asked: tuple[str, ...] = ()  # what was done because the user asked for it; of this no one is warned
    weights: tuple[Path, ...] = ()  # the files that its weights came from


@runtime_checkable
class Source(Protocol):
    """Loads networks by name: "PREFIX/NAME"."""

    PREFIX: str

    def load(self, name: str, weights: str | None, size: Size | None) -> Loaded:
        """Load a network; `weights` is a file, "random", or None for the published ones."""

    def names(self, everything: bool) -> list[str] | None:
        """All names, or only those of Vision Transformers; None if they cannot be listed."""


@runtime_checkable
class Library(Source, Protocol):
    """How the networks of one library are recognised, run and described."""

    PACKAGE: str  # whose version matters to a result
    CHECKPOINTING: tuple[str, ...]  # flags of modules that recompute activations in the backward pass
    HOOKS: tuple[str, ...]  # attributes of modules whose forward is wrapped
    PREFIXES: tuple[str, ...]  # attributes of modules inside blocks: how many tokens come before the patches

    def owns(self, net: nn.Module) -> bool:
        """Does the network belong to this library, or follow its conventions?"""

    def name(self, net: nn.Module) -> str:
        """The name of the network, for figures and errors."""

    def labels(self, net: nn.Module) -> Mapping[int, str]:
        """The names of its classes, if the network knows them."""

    def classifies(self, net: nn.Module) -> bool | None:
        """Are its outputs class scores? None if unknown."""

    def channels(self, net: nn.Module) -> int | None:
        """How many channels its images have; None if unknown."""

    def frames(self, net: nn.Module) -> int | None:
        """How many frames it takes, if it takes videos; None: it takes images, or does not tell."""

    def meaning(self, net: nn.Module) -> str | None:
        """What its settings say of its outputs: "logits", "sigmoid" or "value"; None if nothing."""

    def run(self, net: nn.Module, images: Tensor) -> Any:
        """One forward pass; returns whatever the network returns."""

    def preprocess(self, net: nn.Module, size: Size | None = None) -> Preprocess:
        """The library's evaluation transform for this network, at its own size or another."""

    def text(self, net: nn.Module, name: str) -> Callable[[str], Any] | None:
        """A function that embeds a prompt; None without a text tower. `name`: the model's, for the tokenizer."""


def owns(net: nn.Module) -> bool:
    return True


def name(net: nn.Module) -> str:
    return type(net).__name__


def labels(net: nn.Module) -> Mapping[int, str]:
    return {}


def classifies(net: nn.Module) -> bool | None:
    return None


def channels(net: nn.Module) -> int | None:
    """Those of the first convolution, or of a linear layer that embeds patches of a stated size."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            return module.in_channels
    for module in net.modules():
        side = stated_size(module, names=("patch_size",))
        area = 0 if side is None else side[0] * side[1]
        widths = [child.in_features for child in module.modules() if isinstance(child, nn.Linear)]
        fitting = [width // area for width in widths if area and width % area == 0]
        if fitting:
            return 3 if 3 in fitting else fitting[0]
    return None


def frames(net: nn.Module) -> int | None:
    return None


def meaning(net: nn.Module) -> str | None:
    return None


def run(net: nn.Module, images: Tensor) -> Any:
    return net(images)


def preprocess(net: nn.Module, size: Size | None = None) -> Preprocess:
    """A centre crop of the full short side in ImageNet's colours, at the size that the network states anywhere."""
    config = getattr(net, "config", None)
    places = net, getattr(net, "patch_embed", None), getattr(net, "visual", None), config
    found = size or stated_size(*places, getattr(config, "vision_config", None))
    return replace(cropped(found or (224, 224), *IMAGENET, channels=channels(net) or 3), assumed=True)


def text(net: nn.Module, name: str) -> Callable[[str], Any] | None:
    return None


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    raise ModelError(f"{name}: a network of no known library cannot be loaded by name; give it to Model(net)")


def names(everything: bool) -> list[str] | None:
    return None


def find_output(raw: Mapping[str, Any], mean: bool = False) -> Tensor | None:
    """The scores or the embedding among named outputs: by a known name, or because it is the only vector.

    `mean`: the mean of the tokens where only tokens are returned, else the first of them.
    """
    for key in KEYS:
        if raw.get(key) is not None:
            return raw[key]  # type: ignore[no-any-return]
    tokens = raw.get("last_hidden_state")
    if tokens is not None:
        return tokens.mean(1) if mean else tokens[:, 0]  # type: ignore[no-any-return]
    vectors = [value for value in raw.values() if isinstance(value, Tensor) and value.ndim == 2]
    return vectors[0] if len(vectors) == 1 else None


def stated_size(*places: Any, names: Sequence[str] = ("image_size", "img_size")) -> Size | None:
    """The image size that the first of these objects states that has one."""
    for place in places:
        for name in names:
            size = getattr(place, name, None)
            if isinstance(size, int):
                return size, size
            if isinstance(size, tuple | list) and len(size) == 2:
                return int(size[0]), int(size[1])
    return None


def cropped(
    size: Size, mean: Sequence[float], std: Sequence[float], crop: float = 1.0, channels: int = 3
) -> Preprocess:
    """Scale the short side (bicubic), crop the centre, normalise: timm's evaluation transform, for any library."""
    if channels != 3:
        return scaled(size, mean, std, channels, crop)
    from timm.data.transforms_factory import transforms_imagenet_eval

    mean, std = tuple(mean), tuple(std)
    return adapt(transforms_imagenet_eval(size, crop_pct=crop, interpolation="bicubic", mean=mean, std=std))
