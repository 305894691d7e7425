"""The exceptions that vitreous raises. Each message is one line: what is wrong, where, and the remedy.

VitreousError
├── InputError          an image, a mask or a data file cannot be used
├── ModelError          a model cannot be loaded or run
│   ├── WeightsError    a checkpoint does not fit the architecture
│   └── Unsupported     a method cannot work on a model (others can)
├── TargetError         the model has no such class, concept or text
├── OptionError         there is no such method, metric, option or value
├── CaptureError        the captured attention does not reproduce the layer's output
└── EmptyMap            a method's map is zero everywhere, or not finite

InputWarning (a UserWarning): an image can be used, but is probably not what it is taken for.
"""

from __future__ import annotations

import difflib
import traceback
import warnings
from collections.abc import Iterable


class VitreousError(Exception):
    """Base class of all exceptions of vitreous."""


class InputError(VitreousError, ValueError):
    """An image, a mask or a data file cannot be used."""


class ModelError(VitreousError, ValueError):
    """A model cannot be loaded or run."""


class WeightsError(ModelError):
    """A checkpoint does not fit the architecture."""


class Unsupported(ModelError):
    """A method cannot work on a model."""


class ModelWarning(UserWarning):
    """Something was assumed or left out to load a model."""


class TargetError(VitreousError, ValueError):
    """The model has no such target."""


class OptionError(VitreousError, ValueError):
    """There is no such method, metric, option or value."""


class CaptureError(VitreousError, RuntimeError):
    """The captured attention does not reproduce the layer's output: A·V, recomputed, differs from it."""


class EmptyMap(VitreousError, RuntimeError):
    """The map of an image is zero everywhere, or not finite: it explains nothing."""


class InputWarning(UserWarning):
    """An image can be used, but is probably not what it is taken for."""


def warn_caller(said: str, kind: type[Warning]) -> None:
    """Give a warning that names the line from which this package was called."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)]
    ours = [i for i, name in enumerate(frames) if name.partition(".")[0] == "vitreous"]
    warnings.warn(said, kind, stacklevel=max(ours) + 2)


def nearest(word: str, known: Iterable[str], most: int = 3) -> str:
    """`; did you mean a, b or c?`, or an empty string if no known name is similar."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(names), n=most, cutoff=0.5)
    found += [low for low in names if word and word.lower() in low and low not in found][: most - len(found)]
    return f"; did you mean {one_of([names[low] for low in found])}?" if found else ""


def one_of(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *head, last = list(words)
    return f"{', '.join(head)} or {last}" if head else last


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of an exception, folded to one line and cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def explained(error: BaseException) -> str:
    """The message on one line; exceptions of other libraries are prefixed with their class name."""
    said = one_line(error)
    return said if isinstance(error, VitreousError) else f"{type(error).__name__}: {said}"
