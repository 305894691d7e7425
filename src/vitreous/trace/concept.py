"""Targets in the embedding space of a model: a concept is the mean of example images, a text its own embedding."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitreous._support.files import write_whole
from vitreous._support.memory import batch_size
from vitreous._support.words import plain
from vitreous.errors import InputError, TargetError, nearest, one_line
from vitreous.images import pictures
from vitreous.models.fingerprint import fingerprint
from vitreous.models.inputs import Inputs
from vitreous.models.model import Model
from vitreous.trace.target import Target
from vitreous.types import Output, Scores

SIMILARITIES = ("dot", "cosine", "l2")
FOLDER = Path("vitreous-concepts")
BATCH = 16


@dataclass(frozen=True, eq=False)
class Concept(Target):
    """The similarity of the embedding z before the classifier to a vector c: z·c, cos(z, c) or −‖z − c‖."""

    vector: Any  # [D]: a tensor, an array or a list
    similarity: str = "dot"
    name: str = "concept"
    model: str | None = None  # fingerprint of the model it was built on; None: any model of the right width
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        vector = torch.as_tensor(self.vector).detach()
        if vector.ndim != 1 or not vector.is_floating_point() or not vector.isfinite().all():
            raise TargetError(f"a concept is one vector of finite numbers, not {vector.dtype} {list(vector.shape)}")
        object.__setattr__(self, "vector", vector)
        if self.similarity not in SIMILARITIES:
            raise TargetError(f"unknown similarity {self.similarity!r}; known: {', '.join(SIMILARITIES)}")

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        if embedding.shape[-1] != len(self.vector):
            raise TargetError(
                f"concept {self.name!r} has {len(self.vector)} numbers, the model's embedding {embedding.shape[-1]}"
            )
        c = self.vector.to(embedding)
        if self.similarity == "dot":
            dot: Tensor = (embedding * c).sum(-1)
            return dot
        if self.similarity == "cosine":
            return F.cosine_similarity(embedding, c[None], dim=-1)
        distance: Tensor = torch.linalg.vector_norm(embedding - c, dim=-1)
        return -distance

    def __str__(self) -> str:
        return f"concept:{self.name}"

    @property
    def identity(self) -> Hashable:
        return str(self), self.similarity, self.vector.numpy().tobytes()

    def for_any_model(self) -> Concept:
        return replace(self, model=None)

    def check(self, model: Model, outputs: int | None = None) -> None:
        """Raise unless the concept was built on this model."""
        if self.model is not None and self.model != fingerprint(model):
            raise TargetError(
                f"concept {self.name!r} was built on another model than {model.name}; build it again on this one"
            )

    @classmethod
    def from_images(cls, model: Model, images: Any, similarity: str = "dot", *, name: str = "concept") -> Concept:
        """Build a concept as the mean embedding of examples: a folder, or a list of images as `explain` takes them."""
        if isinstance(images, str | Path):
            images = pictures.find(images)
        listed = images if isinstance(images, Tensor) else pictures.as_list(images, model.channels)
        if len(listed) == 0:
            raise InputError("a concept needs at least one example image")
        vectors = torch.cat(list(embeddings(model, listed)))
        named = tuple(Path(i).name if isinstance(i, str | Path) else f"image {k}" for k, i in enumerate(listed))
        return cls(vectors.mean(0).float().cpu(), similarity, name, fingerprint(model), named)

    def save(self, path: str | Path) -> Path:
        """Save the vector, the similarity, the model's fingerprint and the examples' names as .safetensors."""
        from safetensors.torch import save

        told = {"name": self.name, "similarity": self.similarity, "model": self.model or ""}
        file = Path(path)
        write_whole(file, save({"vector": self.vector.contiguous()}, {**told, "examples": json.dumps(self.examples)}))
        return file

    @classmethod
    def load(cls, path: str | Path) -> Concept:
        from safetensors import safe_open

        try:
            with safe_open(str(path), "pt") as stored:
                told, vector = stored.metadata() or {}, stored.get_tensor("vector")
            examples = tuple(json.loads(told["examples"]))
            return cls(vector, told["similarity"], told["name"], told["model"] or None, examples)
        except Exception as error:
            raise TargetError(f"{path} is not a concept file ({one_line(error, 100)})") from None

    @classmethod
    def find(cls, name: str, model: Model) -> Concept:
        """Load a concept by file, or by its name in the folder `vitreous-concepts`."""
        places = [Path(name), FOLDER / f"{name}.safetensors"]
        kept = [place for place in sorted(FOLDER.glob("*.safetensors")) if ".latents" not in place.suffixes]
        places += [place for place in kept if plain(place.stem) == plain(name)]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            hint = nearest(name, [place.stem for place in kept]) or "; build it: vitreous concept build NAME IMAGES…"
            raise TargetError(f"there is no concept {name!r} here{hint}")
        found = cls.load(file)
        found.check(model)
        return found


@dataclass(frozen=True, eq=False)
class Text(Target):
    """The cosine similarity of an image and a text, for models that embed both."""

    prompt: str
    vector: Tensor

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return F.cosine_similarity(embedding, self.vector.to(embedding)[None], dim=-1)

    def __str__(self) -> str:
        return f"text:{self.prompt}"


def embeddings(model: Model, images: Any, inputs: Inputs | None = None) -> Iterator[Float[Tensor, "b D"]]:
    """The embeddings that the classifier receives, computed in batches."""
    from vitreous.trace.trace import Trace

    given = Inputs(len(images)) if inputs is None else inputs
    seen = (images.shape[-2], images.shape[-1]) if isinstance(images, Tensor) else model.size
    size = batch_size(model.layout_at(seen, given).footprint[0], model.device, BATCH)
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        trace = Trace(model, images[part], given.part(part) if given else None)
        record = trace.any_finished()
        assert record.embedding is not None
        if trace.classifies and record.embedding is record.output:
            raise TargetError(f"{model.name} has no single embedding before its classifier, so no concepts")
        yield record.embedding.detach()
