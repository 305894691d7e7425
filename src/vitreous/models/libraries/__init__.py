"""Model libraries, one module each. No other part of the package knows anything about a particular library.

Each module has the functions of `any.Library`: owns, name, labels, classifies, meaning, run, preprocess, text, load and
names.
"""

from __future__ import annotations

from torch import nn

from vitreous.models.libraries import any as any_other
from vitreous.models.libraries import embedded, huggingface, open_clip, timm, torchvision
from vitreous.models.libraries.any import Library, Loaded, Size, Source, cropped, find_output
from vitreous.models.libraries.huggingface import adapt
from vitreous.models.libraries.timm import wordnet

__all__ = ["Library", "Loaded", "Size", "adapt", "cropped", "embedded", "find_output", "library_of", "wordnet"]

LIBRARIES: tuple[Library, ...] = (timm, huggingface, torchvision, open_clip, any_other)  # the first owner counts
SOURCES: dict[str, Source] = {source.PREFIX: source for source in (embedded, *LIBRARIES) if source.PREFIX}
DEFAULT = timm.PREFIX  # of a name without a prefix
# Of all libraries together, as a network of one may contain modules of another:
CHECKPOINTING = tuple(dict.fromkeys(flag for library in LIBRARIES for flag in library.CHECKPOINTING))
HOOKS = frozenset(hook for library in LIBRARIES for hook in library.HOOKS)
PREFIXES = tuple(name for library in LIBRARIES for name in library.PREFIXES)


def library_of(net: nn.Module) -> Library:
    """The first library that owns this network; the last one, `any`, owns all."""
    return next(library for library in LIBRARIES if library.owns(net))
