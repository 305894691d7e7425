"""What is explained: one number per image, made from the model's output or from the embedding before its classifier.

282  "tiger cat"   Class      a class by number or name          "top-1" "top-2"   Top       each image's own best class
"dog-cat"          Contrast   one rather than the other          "neuron:17"       Neuron    one number of the output
"concept:stripes"  Concept    similar to a few examples          "text:a dog"      Text      similar to a text (CLIP)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.errors import TargetError, nearest
from vitreous.model import Model, capturing
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


# ------------------------------------------------------------------------------------------------------------ parsing


def parse(given: Any, model: Model, outputs: int) -> Target:
    """A target from what a user writes: 282, "tiger cat", "top-1", "dog-cat", a list with one for each image."""
    if isinstance(given, bool):
        raise TargetError(f"{given!r} is not a target; give a class number, a class name or top-1")
    if isinstance(given, int):
        return Class(checked(given, outputs, "class"))
    if isinstance(given, str):
        return parse_text(given.strip(), model, outputs)
    if isinstance(given, Class) and isinstance(given.index, int):
        return Class(checked(given.index, outputs, "class"))
    if isinstance(given, Target) and not isinstance(given, type):
        if hasattr(given, "fits"):
            given.fits(model)
        return given
    if isinstance(given, Tensor) or hasattr(given, "tolist"):
        given = given.tolist()
        return parse(given, model, outputs)
    if isinstance(given, Sequence) and given and all(type(item) is int for item in given):
        return Class(tuple(checked(item, outputs, "class") for item in given))
    if isinstance(given, Sequence) and given:
        each = [parse(item, model, outputs) for item in given]
        numbers = [item.index for item in each if isinstance(item, Class) and isinstance(item.index, int)]
        return Class(tuple(numbers)) if len(numbers) == len(each) else Each(tuple(each))
    raise TargetError(f"{str(given)[:60]!r} is not a target; give a class number, a class name or top-1")


def parse_text(text: str, model: Model, outputs: int) -> Target:
    """One string: what `str(target)` gives comes back as the same target."""
    if len(listed(text)) > 1:
        return parse(listed(text), model, outputs)
    parts = re.split(r"\s*-\s*(?=(?:text|concept|neuron):)", text)
    if len(parts) == 2 and parts[0]:
        return Contrast(parse_text(parts[0], model, outputs), parse_text(parts[1], model, outputs))
    kind, colon, rest = text.partition(":")
    kind = kind.lower()
    if colon and kind in ("text", "concept", "neuron"):
        return parse_kind(kind, rest.strip(), model, outputs)
    for part in (False, True):  # whole names first, then parts of names
        found = parse_plain(text, model, outputs, part) or parse_contrast(text, model, outputs, part)
        if found is not None:
            return found
    raise unknown_class(text, model)


def listed(text: str) -> list[str]:
    """The targets in "a;b-c;d", one for each image; a text may hold any sign."""
    return [text] if "text:" in text.lower() else [part.strip() for part in text.split(";")]


def parse_plain(text: str, model: Model, outputs: int, part: bool) -> Target | None:
    """A number, a rank or a class name (`part`: or a part that only one label holds)."""
    if not text:
        return None
    if re.fullmatch(r"-?\d+", text):
        return Class(checked(int(text), outputs, "class"))
    if re.fullmatch(r"top-?\d+", text, re.IGNORECASE):
        rank = int(text[3:].lstrip("-"))
        if not 1 <= rank <= outputs:
            raise TargetError(f"top-{rank} is out of range: {model.name} has {outputs} outputs")
        return Top(rank)
    found = find_class(text, model) if part else find_exact(text, model)
    if found is not None:
        return Class(found)
    return None


def parse_contrast(text: str, model: Model, outputs: int, part: bool) -> Target | None:
    """One minus the other, at the first dash with a target on both sides (names hold dashes too)."""
    for dash in [i for i, c in enumerate(text) if c == "-"]:
        with suppress(TargetError):
            one, other = (parse_plain(t.strip(), model, outputs, part) for t in (text[:dash], text[dash + 1 :]))
            if one is not None and other is not None:
                return Contrast(one, other)
    return None


def parse_kind(kind: str, rest: str, model: Model, outputs: int) -> Target:
    if not rest:
        raise TargetError(f"{kind}: says nothing; write {kind}:{'17' if kind == 'neuron' else 'something'}")
    if kind == "text":
        from vitreous.text import embed_text

        return Text(rest, embed_text(model, rest))
    if kind == "concept":
        from vitreous.concept import Concept

        return Concept.find(rest, model)
    if not rest.isdigit():
        raise TargetError(f"neuron:{rest}: {rest!r} is not a number")
    return Neuron(checked(int(rest), outputs, "neuron"))


def find_exact(text: str, model: Model) -> int | None:
    """The class of this name, any of its names."""
    low = text.lower()
    return next((i for i, label in model.labels.items() if low == label.lower() or low in names(label)), None)


def find_class(text: str, model: Model) -> int | None:
    """The class of this name, else the only one whose label holds the text."""
    exact, low = find_exact(text, model), text.lower()
    if exact is not None:
        return exact
    part = [i for i, label in model.labels.items() if low in label.lower()]
    if len(part) > 1:
        some = ", ".join(f"{model.label(i)} ({i})" for i in part[:5])
        raise TargetError(f"{text!r} fits {len(part)} classes: {some}{' …' if len(part) > 5 else ''}; give one of them")
    return part[0] if part else None


def names(label: str) -> list[str]:
    return [part.strip().lower() for part in label.split(",")]


def unknown_class(text: str, model: Model) -> TargetError:
    if not model.labels:
        return TargetError(
            f"unknown class {text!r}: {model.name} has no labels; give a class number, or labels to the model"
        )
    short = [name.strip() for label in model.labels.values() for name in label.split(",")]
    return TargetError(f"unknown class {text!r}{nearest(text, short)}")


def checked(index: int, outputs: int, what: str) -> int:
    if not 0 <= index < outputs:
        raise TargetError(f"{what} {index} is out of range: the model has {what} 0 to {outputs - 1}")
    return index
