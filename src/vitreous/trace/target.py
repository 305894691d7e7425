"""Targets: what is explained, one number per image from the model's output or the embedding before its classifier.

282  "tiger cat"   Class      a class by number or name          "top-1" "top-2"   Top       each image's own best class
"dog-cat"          Contrast   one rather than the other          "neuron:17"       Neuron    one number of the output
"concept:stripes"  Concept    similar to a few examples          "text:a dog"      Text      similar to a text (CLIP)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitreous._support.memory import capturing
from vitreous.errors import TargetError
from vitreous.models.model import Model
from vitreous.models.output import Meaning, Of, along_classes
from vitreous.types import Output, Scores

Scoring = Callable[[Output, Tensor], Scores]  # every target is one; a plain function will do


class Target(ABC):
    """Base class of targets: the output, or the embedding before the classifier, to a number; needs only `__call__`."""

    @abstractmethod
    def __call__(self, output: Output, embedding: Tensor) -> Scores: ...

    @property
    def names_classes(self) -> bool:
        """Whether the target needs a classifier."""
        return False

    @property
    def one_class(self) -> bool:
        """Whether the target is exactly the score of one class per image."""
        return False

    @property
    def varies(self) -> bool:
        """Whether the class depends on the image until the target is fixed."""
        return False

    def check(self, model: Model, outputs: int) -> None:  # noqa: B027, optional
        """Raise if this model, with this many outputs, has no such target."""

    def fix(self, output: Output) -> Target:
        """The same target with the class of each image fixed, so that it does not change with the images."""
        return self

    def of_rows(self, rows: Sequence[int]) -> Target:
        """Of a fixed target: the target for variants of the images, where variant i belongs to image `rows[i]`."""
        return self

    def of_image(self, index: int) -> Target:
        """Of a fixed target: the target of one image."""
        return self.of_rows([index])

    def single(self) -> Target:
        """Of a target fixed on one image: the same without the list of one."""
        return self

    def graded(self, meaning: Meaning = Meaning.LOGITS, of: Of = "probability", exclusive: bool = True) -> Target:
        """The same target by probability or logit for classes; any other target, and one of values, is unchanged."""
        return Graded(self, scale) if self.names_classes and (scale := meaning.scale(of, exclusive)) else self

    def for_any_model(self) -> Target:
        """The same target without the check of the model that it was made for."""
        return self

    def strings(self) -> list[str]:
        """The target as a string, or one string per image."""
        return [str(self)]

    def title(self, model: Model, output: Output, index: int) -> str:
        """A readable title for one image: label and probability or value."""
        return str(self)

    @property
    def identity(self) -> Hashable:
        """A key that is equal for equal targets."""
        return str(self)

    @property
    def replay_key(self) -> Hashable | None:
        """A key shared by all targets that can use the same CUDA graph; None if the target cannot be replayed."""
        return None

    def class_numbers(self, images: int) -> list[int] | None:
        """The class of each of `count` images, if classes are given by number."""
        return None


@dataclass(frozen=True)
class Function(Target):
    """A plain function as a target."""

    function: Scoring

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return self.function(output, embedding)

    def __str__(self) -> str:
        return str(self.function)


def as_target(given: Scoring) -> Target:
    return given if isinstance(given, Target) else Function(given)


@dataclass(frozen=True)
class Class(Target):
    """The score of a class, the same for all images or one for each."""

    index: int | tuple[int, ...]
    names_classes = one_class = True

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        if isinstance(self.index, int):
            return output[:, self.index]
        if len(output) % len(self.index):
            raise TargetError(f"{len(self.index)} targets for {len(output)} images; give one, or one for each image")
        chosen = torch.tensor(self.index, device=output.device).repeat_interleave(len(output) // len(self.index))
        return output.gather(1, chosen[:, None])[:, 0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The class of each image, or one class for all."""
        return (self.index,) if isinstance(self.index, int) else self.index

    def check(self, model: Model, outputs: int) -> None:
        for number in self.numbers:
            checked(number, outputs, "class")

    def of_rows(self, rows: Sequence[int]) -> Target:
        return self if len(self.numbers) == 1 else Class(tuple(self.numbers[row] for row in rows))

    def single(self) -> Target:
        return Class(self.numbers[0]) if len(self.numbers) == 1 else self

    def strings(self) -> list[str]:
        return [str(number) for number in self.numbers]

    def __str__(self) -> str:
        return ";".join(self.strings())

    def title(self, model: Model, output: Output, index: int) -> str:
        number = self.numbers[index if len(self.numbers) > 1 else 0]
        share = model.meaning.probabilities(output[index])[number]
        return f"{model.label(number)} {model.meaning.written(float(share))}"

    @property
    def replay_key(self) -> Hashable:
        return Class

    def class_numbers(self, images: int) -> list[int]:
        return [number for number in self.numbers for _ in range(images // len(self.numbers))]


@dataclass(frozen=True, eq=False)
class Numbered(Target):
    """One class per image, or one for all, whose numbers stay on the GPU without synchronisation."""

    index: Tensor  # [B] or [1]
    names_classes = one_class = True

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return output.gather(1, self.index.expand(len(output))[:, None])[:, 0]

    def of_rows(self, rows: Sequence[int]) -> Target:
        return self if len(self.index) == 1 else Numbered(torch.cat([self.index[row : row + 1] for row in rows]))


@dataclass(frozen=True)
class Top(Target):
    """The score of the best class of each image (`rank` 1), the second best (2), …"""

    rank: int = 1
    names_classes = one_class = varies = True

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return output.gather(1, output.detach().topk(self.rank, -1).indices[:, -1:])[:, 0]

    def check(self, model: Model, outputs: int) -> None:
        if self.rank < 1 or (self.rank > outputs and model.detections is None):
            raise TargetError(f"{self} is out of range: {model.name} has {outputs} outputs")

    def fix(self, output: Output) -> Target:
        best = output.topk(self.rank, -1).indices[:, -1]
        return Numbered(best) if capturing(output) else Class(tuple(best.tolist()))

    def __str__(self) -> str:
        return f"top-{self.rank}"

    def title(self, model: Model, output: Output, index: int) -> str:
        return self.fix(output[index : index + 1]).title(model, output[index : index + 1], 0)

    @property
    def replay_key(self) -> Hashable:
        return self


@dataclass(frozen=True, init=False)
class Contrast(Target):
    """The evidence for `one` rather than `other`: the difference of their scores."""

    one: Target
    other: Target

    def __init__(self, one: Scoring, other: Scoring) -> None:
        object.__setattr__(self, "one", as_target(one))
        object.__setattr__(self, "other", as_target(other))

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return self.one(output, embedding) - self.other(output, embedding)

    @property
    def names_classes(self) -> bool:
        return self.one.names_classes or self.other.names_classes

    @property
    def varies(self) -> bool:
        return self.one.varies or self.other.varies

    def check(self, model: Model, outputs: int) -> None:
        self.one.check(model, outputs)
        self.other.check(model, outputs)

    def fix(self, output: Output) -> Target:
        return Contrast(self.one.fix(output), self.other.fix(output))

    def of_rows(self, rows: Sequence[int]) -> Target:
        return Contrast(self.one.of_rows(rows), self.other.of_rows(rows))

    def single(self) -> Target:
        return Contrast(self.one.single(), self.other.single())

    def for_any_model(self) -> Target:
        return Contrast(self.one.for_any_model(), self.other.for_any_model())

    def strings(self) -> list[str]:
        one, other = self.one.strings(), self.other.strings()
        return [f"{one[i % len(one)]}-{other[i % len(other)]}" for i in range(max(len(one), len(other)))]

    def __str__(self) -> str:
        return ";".join(self.strings())

    def title(self, model: Model, output: Output, index: int) -> str:
        return f"{self.one.title(model, output, index)} rather than {self.other.title(model, output, index)}"

    @property
    def identity(self) -> Hashable:
        return self.one.identity, self.other.identity


@dataclass(frozen=True)
class Neuron(Target):
    """One element of the output, whatever it means."""

    index: int

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return output[:, self.index]

    def check(self, model: Model, outputs: int) -> None:
        checked(self.index, outputs, "neuron")

    def __str__(self) -> str:
        return f"neuron:{self.index}"


@dataclass(frozen=True)
class Each(Target):
    """One target per image, of any kinds."""

    targets: tuple[Target, ...]

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        count = len(output) // max(1, len(self.targets))  # copies of each image
        if count * len(self.targets) != len(output):
            raise TargetError(f"{len(self.targets)} targets for {len(output)} images; give one, or one for each image")
        parts = [slice(i * count, (i + 1) * count) for i in range(len(self.targets))]
        return torch.cat([target(output[part], embedding[part]) for target, part in zip(self.targets, parts)])

    @property
    def names_classes(self) -> bool:
        return any(target.names_classes for target in self.targets)

    @property
    def varies(self) -> bool:
        return any(target.varies for target in self.targets)

    def check(self, model: Model, outputs: int) -> None:
        for target in self.targets:
            target.check(model, outputs)

    def fix(self, output: Output) -> Target:
        return Each(tuple(target.fix(output[i : i + 1]).single() for i, target in enumerate(self.targets)))

    def of_rows(self, rows: Sequence[int]) -> Target:
        return Each(tuple(self.targets[row] for row in rows))

    def for_any_model(self) -> Target:
        return Each(tuple(target.for_any_model() for target in self.targets))

    def single(self) -> Target:
        return self.targets[0].single() if len(self.targets) == 1 else self

    def __str__(self) -> str:
        return ";".join(map(str, self.targets))

    def title(self, model: Model, output: Output, index: int) -> str:
        return self.targets[index].title(model, output, index)


@dataclass(frozen=True)
class Graded(Target):
    """A class target by probability or logit instead of score."""

    target: Target
    scale: Callable[[Output], Output]

    def __call__(self, output: Output, embedding: Tensor) -> Scores:
        return self.target(along_classes(self.scale, output), embedding)

    def fix(self, output: Output) -> Target:
        return Graded(self.target.fix(output), self.scale)

    def of_rows(self, rows: Sequence[int]) -> Target:
        return Graded(self.target.of_rows(rows), self.scale)

    def __str__(self) -> str:
        return str(self.target)


def checked(index: int, outputs: int, what: str) -> int:
    if not 0 <= index < outputs:
        raise TargetError(f"{what} {index} is out of range: the model has {what} 0 to {outputs - 1}")
    return index


def no_classifier(name: str) -> TargetError:
    return TargetError(
        f"{name} has no classifier, so its outputs are not classes: give a concept (vitreous.Concept, concept:NAME), "
        "a text (text:…, for models with a text tower), neuron:NUMBER, or load it with a probe (vitreous probe train); "
        "if they are classes, say so: Model(net, classifier=True), on the command line --output-is logits"
    )
