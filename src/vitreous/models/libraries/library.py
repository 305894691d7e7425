"""The functions that every library's module has, and helpers that several of them use.

A module without a quirk of its own imports the function from `any`. mypy checks every module against `Library`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from vitreous.images.preprocess import Preprocess, adapt

Size = tuple[int, int]  # height, width


class Loaded(NamedTuple):
    """A network that was loaded by name. Where labels or classifier are None, the network itself is asked."""

    net: nn.Module
    preprocess: Preprocess
    name: str
    labels: Sequence[str] | None = None
    classifier: bool | None = None


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

    CHECKPOINTING: tuple[str, ...]  # flags of modules that recompute activations in the backward pass
    HOOKS: tuple[str, ...]  # attributes of modules whose forward is wrapped

    def owns(self, net: nn.Module) -> bool:
        """Does the network belong to this library, or follow its conventions?"""

    def name(self, net: nn.Module) -> str:
        """The name of the network, for figures and errors."""

    def labels(self, net: nn.Module) -> Mapping[int, str]:
        """The names of its classes, if the network knows them."""

    def classifies(self, net: nn.Module) -> bool | None:
        """Are its outputs class scores? None if unknown."""

    def run(self, net: nn.Module, images: Tensor) -> Any:
        """One forward pass; returns whatever the network returns."""

    def preprocess(self, net: nn.Module, size: Size | None = None) -> Preprocess:
        """The library's evaluation transform for this network, at its own size or another."""

    def text(self, net: nn.Module, name: str) -> Callable[[str], Any] | None:
        """A function that embeds a prompt; None without a text tower. `name`: the model's, for the tokenizer."""


def stated_size(*places: Any) -> Size | None:
    """The image size that the first of these objects states that has one."""
    for place in places:
        for name in ("image_size", "img_size"):
            size = getattr(place, name, None)
            if isinstance(size, int):
                return size, size
            if isinstance(size, tuple | list) and len(size) == 2:
                return int(size[0]), int(size[1])
    return None


def cropped(size: Size, mean: Sequence[float], std: Sequence[float], crop: float = 1.0) -> Preprocess:
    """Scale the short side (bicubic), crop the centre, normalise: timm's evaluation transform, for any library."""
    from timm.data.transforms_factory import transforms_imagenet_eval

    mean, std = tuple(mean), tuple(std)
    return adapt(transforms_imagenet_eval(size, crop_pct=crop, interpolation="bicubic", mean=mean, std=std))
