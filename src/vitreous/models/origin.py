"""What made a result: weights, library, input, preprocessing and versions."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitreous._support.files import sha256, stamp_file
from vitreous.errors import ModelError
from vitreous.models.fingerprint import weights_digest
from vitreous.models.model import Model
from vitreous.types import Extent
from vitreous.version import VERSION

VERSION_OF = attrgetter("_version")
CHANGED = "the weights have changed since the maps were made"


@dataclass(frozen=True, eq=False)
class Origin:
    """A model as it was when it made a result. What it tells is found out when it is first asked."""

    model: Model
    size: Extent  # (frames,) height and width of the input
    state: tuple[Any, ...]

    @classmethod
    def of(cls, model: Model, size: Extent) -> Origin:
        return cls(model, size, state_of(model))

    @cached_property
    def told(self) -> dict[str, Any]:
        """Everything about the model that is needed to make the same result again, as JSON."""
        model, source = self.model, self.model.library.PREFIX
        frames = {"frames": self.size[0]} if len(self.size) == 3 else {}
        return {
            "library": source or "any",
            "spec": model.spec,
            "architecture": type(model.module).__name__,
            "weights": self.weights,
            "input": {
                **frames,
                "size": list(self.size[-2:]),
                "channels": model.channels,
                "dtype": str(model.dtype)[6:],
            },
            "preprocess": preprocess_of(model),
            "output": model.output,
            **model.arguments.told,
            "versions": versions(model.library.PACKAGE),
        }

    @property
    def weights(self) -> dict[str, Any]:
        """The files they were read from, and a digest of every number, which is what tells two models apart."""
        files = [{"path": os.path.abspath(file), **file_hash(self.model, file)} for file in self.model.weights]
        if state_of(self.model) != self.state:
            return {"files": files, "digest": None, "note": CHANGED}
        digest = self.model.facts.find(("weights digest", self.state), lambda: weights_digest(self.model))
        return {"files": files, "digest": digest}


def state_of(model: Model) -> tuple[Any, ...]:
    """Changes when weights are changed in place (by an optimiser, load_state_dict, …) or moved to another type."""
    counted: list[Tensor]
    first, counted = model.facts.find("weights", lambda: weights_of(model))
    return sum(map(VERSION_OF, counted)), "" if first is None else str(first.dtype)


def weights_of(model: Model) -> tuple[Tensor | None, list[Tensor]]:
    """The first of its weights, and all that count their changes: those of inference mode do not."""
    tensors = [t for t in model.module.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]
    return next(iter(tensors), None), [tensor for tensor in tensors if not tensor.is_inference()]


def file_hash(model: Model, file: Path) -> dict[str, Any]:
    """The SHA-256 of a file of weights; none if it has changed since it was loaded."""
    loaded = model.facts.get(("stamp", file))
    if loaded is not None and stamp_file(file) != loaded:
        return {"sha256": None, "note": "the file has changed since it was loaded"}
    try:
        return {"sha256": model.facts.find(("sha256", file, loaded), lambda: sha256(file))}
    except OSError:
        return {"sha256": None, "note": "the file cannot be read any more"}


def preprocess_of(model: Model) -> dict[str, Any] | None:
    """How an image becomes the input: its size and colours, and the steps in words; None if it cannot be made."""
    try:
        steps = model.preprocess
        left, top, right, bottom = steps.box((320, 240))
    except ModelError:
        return None
    words = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(str(steps.transform).split()))
    return {
        "size": list(steps.size),
        "mean": [round(float(x), 6) for x in steps.mean],
        "std": [round(float(x), 6) for x in steps.std],
        "seen_of_320x240": [round(x, 1) for x in (left, top, right, bottom)],
        **({"assumed": True} if steps.assumed else {}),
        "transform": words if len(words) <= 500 else words[:499] + "…",
    }


def versions(package: str) -> dict[str, str]:
    """Versions of everything that has a part in a result."""
    named = {"torch": torch.__version__, "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        named[package] = version(package)
    return {"vitreous": VERSION, **named}
