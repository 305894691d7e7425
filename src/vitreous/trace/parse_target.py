"""Parse targets: 282, "tiger cat", "top-1", "dog-cat", "concept:stripes", "cat@120,80", or a list, one per image."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from vitreous.errors import TargetError
from vitreous.models.labels import ClassNames, fitting, suggest
from vitreous.models.model import Model
from vitreous.models.output import Form
from vitreous.trace.concept import Concept, Text
from vitreous.trace.located import parse_located
from vitreous.trace.pairs import Like
from vitreous.trace.target import Class, Contrast, Each, Neuron, Target, Top, as_target, checked
from vitreous.trace.text import embed_text

SHOWN = 5  # classes that an ambiguous name may mean
Find = Callable[[str, Model], int | None]


def parse(given: Any, model: Model, outputs: int) -> Target:
    """Parse a target: 282, "tiger cat", "top-1", "dog-cat", or a list with one per image."""
    if model.form is Form.WORDS:
        from vitreous.trace.word import parse_words

        return parse_words(given, model)
    if isinstance(given, bool):
        raise TargetError(f"{given!r} is not a target; give a class number, a class name or top-1")
    if isinstance(given, int):
        return Class(checked(given, outputs, "class"))
    if isinstance(given, str):
        return parse_text(given.strip(), model, outputs)
    if callable(given) and not isinstance(given, type):
        target = as_target(given)
        target.check(model, outputs)
        return target
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
    """Parse one string; `str(target)` parses to the same target."""
    if len(listed(text)) > 1:
        return parse(listed(text), model, outputs)
    if "@" in text and model.form is not Form.VECTOR:
        return parse_located(text, lambda part: parse_text(part, model, outputs), outputs)
    parts = re.split(r"\s*-\s*(?=(?:text|concept|neuron|like|latent):)", text)
    if len(parts) == 2 and parts[0]:
        return Contrast(parse_text(parts[0], model, outputs), parse_text(parts[1], model, outputs))
    kind, colon, rest = text.partition(":")
    kind = kind.lower()
    if colon and kind in ("text", "concept", "neuron", "like", "latent"):
        return parse_kind(kind, rest.strip(), model, outputs)
    for find in (find_written, find_named, find_class):  # whole names first, then parts of names
        found = parse_plain(text, model, outputs, find) or parse_contrast(text, model, outputs, find)
        if found is not None:
            return found
    raise unknown_class(text, model)


def listed(text: str) -> list[str]:
    """Split "a;b-c;d" into one target per image; a text or a word may contain any character."""
    return [text] if "text:" in text.lower() or "token:" in text.lower() else [part.strip() for part in text.split(";")]


def parse_plain(text: str, model: Model, outputs: int, find: Find) -> Target | None:
    """Parse a number, a rank or a class name."""
    if not text:
        return None
    if re.fullmatch(r"-?\d+", text):
        return Class(checked(int(text), outputs, "class"))
    if re.fullmatch(r"top-?\d+", text, re.IGNORECASE):
        top = Top(int(text[3:].lstrip("-")))
        top.check(model, outputs)
        return top
    found = find(text, model)
    return None if found is None else Class(found)


def parse_contrast(text: str, model: Model, outputs: int, find: Find) -> Target | None:
    """Parse a contrast: split at the first dash with a target on both sides (names may contain dashes too)."""
    for dash in [i for i, c in enumerate(text) if c == "-"]:
        with suppress(TargetError):
            one, other = (parse_plain(t.strip(), model, outputs, find) for t in (text[:dash], text[dash + 1 :]))
            if one is not None and other is not None:
                return Contrast(one, other)
    return None


def parse_kind(kind: str, rest: str, model: Model, outputs: int) -> Target:
    if not rest:
        raise TargetError(f"{kind}: is empty; write {kind}:{'17' if kind == 'neuron' else 'something'}")
    if kind == "text":
        return Text(rest, embed_text(model, rest))
    if kind == "concept":
        return Concept.find(rest, model)
    if kind == "like":
        return Like.to_file(model, rest)
    if kind == "latent":
        from vitreous.trace.latent import parse_latent

        return parse_latent(rest, model)
    if not rest.isdigit():
        raise TargetError(f"neuron:{rest}: {rest!r} is not a number")
    return Neuron(checked(int(rest), outputs, "neuron"))


def asks_latent(target: Any) -> bool:
    """Whether a target is a latent, which is read from patches and not from the output."""
    if isinstance(target, list | tuple):
        return any(map(asks_latent, target))
    return "latent:" in str(target).lower() if isinstance(target, str | Target) else False


def find_written(text: str, model: Model) -> int | None:
    """The class of which this is a name as written, but for the case."""
    return ClassNames(model.labels).written(text)


def find_named(text: str, model: Model) -> int | None:
    """The class of this name; hyphens, underscores and spaces are equal."""
    return ClassNames(model.labels).find(text)


def find_class(text: str, model: Model) -> int | None:
    """The only class with these whole words in its name, else with words that begin so, else that contains the text."""
    found = fitting(text, model.labels)
    best = [(number, name) for grade, number, name in found if grade == found[0][0]]
    if len(best) > 1:
        some = ", ".join(f"{name} ({number})" for number, name in best[:SHOWN])
        more = " …" if len(best) > SHOWN else ""
        raise TargetError(f"{text!r} fits {len(best)} classes: {some}{more}; give one of them")
    return best[0][0] if best else None


def unknown_class(text: str, model: Model) -> TargetError:
    if "@" in text:
        said = f"{text!r} is a place in the image, and {model.name} has {model.form.value}"
        return TargetError(f"{said}; give a class without a place: {text.partition('@')[0]!r}")
    if not model.labels:
        return TargetError(
            f"unknown class {text!r}: {model.name} has no labels; give a class number, or load the model with labels"
        )
    return TargetError(f"unknown class {text!r}{suggest(text, model.labels)}")
