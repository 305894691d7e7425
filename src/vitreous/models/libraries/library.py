"""What every library's module offers, and what several of them need.

A library that does as any other imports the function from `any`. mypy checks the modules against `Library`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from vitreous.images.preprocess import Preprocess, adapt

Size = tuple[int, int]  # height, width


class Loaded(NamedTuple):
    """A network loaded by name, with what its library knows about it; None: asked of the network itself."""

    net: nn.Module
    preprocess: Preprocess
    name: str
    labels: Sequence[str] | None = None
    classifier: bool | None = None


class Source(Protocol):
    """Networks that are loaded by name: "PREFIX/NAME"."""

    PREFIX: str

    def load(self, name: str, weights: str | None, size: Size | None) -> Loaded:
        """A network by name; `weights`: a file, "random", or None for the published ones."""

    def names(self, everything: bool) -> list[str] | None:
        """The names to choose from, or only those of Vision Transformers; None: they cannot be listed."""


class Library(Source, Protocol):
    """How the networks of one library are recognised, run and described."""

    CHECKPOINTING: tuple[str, ...]  # flags of a module that make it run parts of itself again in the backward pass
    HOOKS: tuple[str, ...]  # attributes of a module that show that its forward is wrapped

    def owns(self, net: nn.Module) -> bool:
        """Is this network of the library, or written after its conventions?"""

    def name(self, net: nn.Module) -> str:
        """What the network is called in figures and errors."""

    def labels(self, net: nn.Module) -> Mapping[int, str]:
        """The names of its classes, as far as it carries them."""

    def classifies(self, net: nn.Module) -> bool | None:
        """Are its outputs class scores? None: unknown."""

    def run(self, net: nn.Module, images: Tensor) -> Any:
        """One forward pass over images; whatever the network returns."""

    def preprocess(self, net: nn.Module, size: Size | None = None) -> Preprocess:
        """The library's evaluation transform for this network, at its own size or another."""

    def text(self, net: nn.Module, name: str) -> Callable[[str], Any] | None:
        """How it embeds a text, whatever it returns then; None: it has no text tower. `name`: of the model."""


def stated_size(*places: Any) -> Size | None:
    """The image size that one of these objects states, the first that does."""
    for place in places:
        for name in ("image_size", "img_size"):
            size = getattr(place, name, None)
            if isinstance(size, int):
                return size, size
            if isinstance(size, tuple | list) and len(size) == 2:
                return int(size[0]), int(size[1])
    return None


def cropped(size: Size, mean: Sequence[float], std: Sequence[float], crop: float = 1.0) -> Preprocess:
    """Scale the short side to the size (bicubic), crop the centre, normalise: timm's usual transform, for everyone."""
    from timm.data.transforms_factory import transforms_imagenet_eval

    mean, std = tuple(mean), tuple(std)
    return adapt(transforms_imagenet_eval(size, crop_pct=crop, interpolation="bicubic", mean=mean, std=std))
