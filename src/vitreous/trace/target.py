"""What is explained: one number per image, made from the model's output or from the embedding before its classifier.

282  "tiger cat"   Class      a class by number or name          "top-1" "top-2"   Top       each image's own best class
"dog-cat"          Contrast   one rather than the other          "neuron:17"       Neuron    one number of the output
"concept:stripes"  Concept    similar to a few examples          "text:a dog"      Text      similar to a text (CLIP)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import TargetError
from vitreous.models.model import Model, capturing
from vitreous.types import Output, Scores


@runtime_checkable
class Target(Protocol):
    """Anything that turns the output (or the embedding before the classifier) into one number per image."""

    def __call__(self, output: Output, embedding: Tensor) -> Scores: ...


@dataclass(frozen=True)
class Class:
    """The score of a class, the same for all images or one for each."""

    index: int | tuple[int, ...]

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        if isinstance(self.index, int):
            return output[:, self.index]
        if len(output) % len(self.index):
            raise TargetError(f"{len(self.index)} targets for {len(output)} images; give one, or one for each image")
        chosen = torch.tensor(self.index, device=output.device).repeat_interleave(len(output) // len(self.index))
        return output.gather(1, chosen[:, None])[:, 0]

    def __str__(self) -> str:
        return str(self.index) if isinstance(self.index, int) else ";".join(map(str, self.index))


@dataclass(frozen=True, eq=False)
class Numbered:
    """A class for each image, or the same for all, whose numbers lie on a GPU and are not asked for."""

    index: Tensor  # [B] or [1]

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return output.gather(1, self.index.expand(len(output))[:, None])[:, 0]


@dataclass(frozen=True)
class Top:
    """The score of each image's own best class (`rank` 1), second best (2), …"""

    rank: int = 1

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return output.gather(1, output.detach().topk(self.rank, -1).indices[:, -1:])[:, 0]

    def __str__(self) -> str:
        return f"top-{self.rank}"


@dataclass(frozen=True)
class Contrast:
    """What speaks for `one` rather than for `other`."""

    one: Target
    other: Target

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return self.one(output, embedding) - self.other(output, embedding)

    def __str__(self) -> str:
        sides = [str(side).split(";") if isinstance(side, Class) else [str(side)] for side in (self.one, self.other)]
        count = max(map(len, sides))
        return ";".join("-".join(side[i % len(side)] for side in sides) for i in range(count))


@dataclass(frozen=True)
class Neuron:
    """One number of the output, whatever it means."""

    index: int

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return output[:, self.index]

    def __str__(self) -> str:
        return f"neuron:{self.index}"


@dataclass(frozen=True)
class Each:
    """A target of its own for each image, of any kinds."""

    targets: tuple[Target, ...]

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        count = len(output) // max(1, len(self.targets))  # copies of each image
        if count * len(self.targets) != len(output):
            raise TargetError(f"{len(self.targets)} targets for {len(output)} images; give one, or one for each image")
        parts = [slice(i * count, (i + 1) * count) for i in range(len(self.targets))]
        return torch.cat([target(output[part], embedding[part]) for target, part in zip(self.targets, parts)])

    def __str__(self) -> str:
        return ";".join(map(str, self.targets))


@dataclass(frozen=True)
class Probability:
    """What a target of classes asks for, in probabilities rather than logits."""

    target: Target

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return self.target(output.softmax(-1), embedding)

    def __str__(self) -> str:
        return str(self.target)


@dataclass(frozen=True, eq=False)
class Text:
    """The cosine between an image and a text, for models that embed both."""

    prompt: str
    vector: Tensor

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return F.cosine_similarity(embedding, self.vector.to(embedding)[None], dim=-1)

    def __str__(self) -> str:
        return f"text:{self.prompt}"


# ------------------------------------------------------------------------------------------------------- using them


def fix(target: Target, output: Output) -> Target:
    """The same target with each image's best class named, so that it stays while the images change."""
    if isinstance(target, Top):
        best = output.topk(target.rank, -1).indices[:, -1]
        return Numbered(best) if capturing(output) else Class(tuple(best.tolist()))
    if isinstance(target, Contrast):
        return Contrast(fix(target.one, output), fix(target.other, output))
    if isinstance(target, Each):
        return Each(tuple(single(fix(t, output[i : i + 1])) for i, t in enumerate(target.targets)))
    return target


def of_rows(target: Target, rows: Sequence[int]) -> Target:
    """What a fixed target asks of variants of the images: variant i is one of image `rows[i]`."""
    if isinstance(target, Class) and isinstance(target.index, tuple):
        return target if len(target.index) == 1 else Class(tuple(target.index[row] for row in rows))
    if isinstance(target, Contrast):
        return Contrast(of_rows(target.one, rows), of_rows(target.other, rows))
    if isinstance(target, Probability):
        return Probability(of_rows(target.target, rows))
    return Each(tuple(target.targets[row] for row in rows)) if isinstance(target, Each) else target


def of_image(target: Target, index: int) -> Target:
    """What a fixed target asks of one image."""
    return of_rows(target, [index])


def single(target: Target) -> Target:
    """A target fixed on one image, without the list of one."""
    if isinstance(target, Class) and isinstance(target.index, tuple) and len(target.index) == 1:
        return Class(target.index[0])
    if isinstance(target, Contrast):
        return Contrast(single(target.one), single(target.other))
    return target


def classes(target: Target) -> bool:
    """Does it name classes, so that it makes no sense without a classifier?"""
    if isinstance(target, Contrast):
        return classes(target.one) or classes(target.other)
    if isinstance(target, Each):
        return any(map(classes, target.targets))
    return isinstance(target, Class | Top | Numbered)


def no_classifier(name: str) -> TargetError:
    return TargetError(
        f"{name} has no classifier, so its outputs are not classes: give a concept (vitreous.Concept, concept:NAME), "
        "a text (text:…, for models with a text tower), neuron:NUMBER, or load it with a probe (vitreous probe train)"
    )


def title(target: Target, model: Model, output: Output, index: int) -> str:
    """What a target means for one image, for people: its label and probability."""
    target = target.targets[index] if isinstance(target, Each) else target
    fixed = fix(target, output[index : index + 1]) if isinstance(target, Top) else target
    if isinstance(fixed, Contrast):
        one, other = (title(t, model, output, index) for t in (fixed.one, fixed.other))
        return f"{one} rather than {other}"
    if isinstance(fixed, Class):
        number = fixed.index if isinstance(fixed.index, int) else fixed.index[index if len(fixed.index) > 1 else 0]
        return f"{model.label(number)} {output[index].softmax(-1)[number]:.0%}"
    return str(fixed)
