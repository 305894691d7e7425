"""Two images: the likeness of one to another as a target, and networks that take both."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitreous.errors import InputError, TargetError
from vitreous.models.fingerprint import fingerprint
from vitreous.models.inputs import Inputs
from vitreous.models.model import Model
from vitreous.trace.concept import Concept, embeddings

Names = tuple[str, str]  # the arguments of a network that take two images


@dataclass(frozen=True, eq=False)
class Like(Concept):
    """The similarity of an image's embedding to that of another image: what makes the two alike?"""

    similarity: str = "cosine"

    def __str__(self) -> str:
        return f"like:{self.name}"

    @classmethod
    def to(
        cls, model: Model, images: Any, names: Sequence[str], similarity: str = "cosine", inputs: Inputs | None = None
    ) -> list[Like]:
        """The likeness to each of these images."""
        vectors = torch.cat(list(embeddings(model, images, inputs))).float().cpu()
        return [cls(vector, similarity, name, fingerprint(model)) for vector, name in zip(vectors, names)]

    @classmethod
    def to_file(cls, model: Model, path: str) -> Like:
        """The likeness to the image in a file."""
        try:
            return cls.to(model, [path], [path])[0]
        except InputError as error:
            raise TargetError(f"like:{path}: {error}; write like:FILE, an image") from error


def two_arguments(model: Model, given: Collection[str], named: Sequence[str] | None) -> Names | None:
    """The arguments of a network that take two images, as named or because it needs two; None: it takes one image."""
    if named is not None:
        if len(named) != 2 or isinstance(named, str):
            raise InputError(f"arguments={named!r}: name the two that take the images, in their order")
        return named[0], named[1]
    needed = model.arguments.needed(given)
    if len(needed) > 2:
        said = f"{model.name}.forward needs {', '.join(needed)}; give what is no image as inputs="
        raise InputError(f"{said}, or name the two images: arguments=({needed[0]!r}, {needed[1]!r})")
    return (needed[0], needed[1]) if len(needed) == 2 else None


def taking(model: Model, image: str) -> Model:
    """The same model, which takes its images through this argument."""
    if image not in model.arguments.twins:
        twin = copy.copy(model)
        twin.arguments, twin._layouts = model.arguments.taking(image), {}
        model.arguments.twins[image] = twin
    twin = model.arguments.twins[image]
    assert isinstance(twin, Model)
    return twin


def beside(given: Mapping[str, Any] | None, name: str, images: Any) -> dict[str, Any]:
    """The inputs of one image of a pair: the other image, and what belongs to both."""
    return {**(given or {}), name: images}
