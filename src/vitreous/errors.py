"""Everything vitreous raises on purpose. Each message says what, where and the remedy, on one line.

VitreousError
├── InputError          a picture that cannot be used
├── ModelError          a model that cannot be loaded or run
│   ├── WeightsError    a checkpoint that does not fit
│   └── Unsupported     this method cannot work on this model, others can
├── TargetError         a class, concept or text that does not exist here
├── OptionError         a method, an option or a value that does not exist
└── CaptureError        the attention that was seen does not reproduce the layer's output
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VitreousError(Exception):
    """The root: catch this to catch them all."""


class InputError(VitreousError, ValueError):
    """A picture that cannot be used."""


class ModelError(VitreousError, ValueError):
    """A model that cannot be loaded or run."""


class WeightsError(ModelError):
    """A checkpoint that does not fit the architecture."""


class Unsupported(ModelError):
    """This method cannot work on this model."""


class TargetError(VitreousError, ValueError):
    """A target that does not exist in this model."""


class OptionError(VitreousError, ValueError):
    """A method, an option or a value that does not exist."""


class CaptureError(VitreousError, RuntimeError):
    """A·V, recomputed, differs from what the layer itself returned."""


def nearest(word: str, known: Iterable[str], most: int = 3) -> str:
    """`; did you mean a, b or c?`, or nothing where no name is near."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(names), n=most, cutoff=0.5)
    found += [low for low in names if word and word.lower() in low and low not in found][: most - len(found)]
    return f"; did you mean {one_of([names[low] for low in found])}?" if found else ""


def one_of(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *head, last = list(words)
    return f"{', '.join(head)} or {last}" if head else last


def one_line(error: BaseException, limit: int = 300) -> str:
    """Another library's message, folded to one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def explained(error: BaseException) -> str:
    """On one line; what is not ours says its kind."""
    said = one_line(error)
    return said if isinstance(error, VitreousError) else f"{type(error).__name__}: {said}"
